"""The wire: collectives over one process group, counted where they are sent, and the compressed all-reduce.

Only this module and ddp.py know torch.distributed. gloo and NCCL take the same single-tensor calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store

from .clock import Clock
from .clock import Work as Work
from .failures import Pending, Watch


def ring_bytes(elements: int, ranks: int, element_bytes: int) -> int:
    """Bytes that a rank sends in a ring all-reduce."""
    return 2 * elements * element_bytes * (ranks - 1) // ranks


class Done:
    """A collective with nothing to wait for."""

    def wait(self) -> None:
        """Return."""


class _Watched:
    """A started collective; if it fails, the error says who is missing.

    Args:
        started: what torch.distributed returned.
        watch: who waits for it.
        on_cpu: whether its tensors are.
    """

    def __init__(self, started: Pending, watch: Watch, on_cpu: bool) -> None:
        self._started, self._watch, self._on_cpu = started, watch, on_cpu

    def wait(self) -> None:
        """Order what follows after it: on the current stream on CUDA, by blocking on a CPU."""
        self._watch.wait(self._started, self._on_cpu)


class _Timed:
    """A started collective whose wait is timed.

    Args:
        started: the collective.
        clock: what times the wait.
    """

    def __init__(self, started: Work, clock: Clock) -> None:
        self._started, self._clock = started, clock

    def wait(self) -> None:
        """Wait, and count the time as exchange."""
        self._clock.wait(self._started)


class Traffic:
    """Bytes this rank has sent, by stage. A ring is assumed where the library may choose (all-reduce, all-gather).

    Attributes:
        sent: bytes sent in each stage.
        whole: bytes that averaging whole gradients in every step of a stage would have sent.
        stage: which stage bytes are counted for.
        last_step, last_whole: the same two of the last step.
    """

    def __init__(self) -> None:
        self.sent = {"warmup": 0, "compression": 0}
        self.whole = {"warmup": 0, "compression": 0}
        self.stage = "warmup"
        self.last_step = self.last_whole = 0
        self._mark = 0

    def add(self, size: int) -> None:
        """Count bytes for the present stage."""
        self.sent[self.stage] += size

    def end_step(self, whole: int) -> None:
        """Close the account of one step: what was sent since the last one, backward pass included.

        Args:
            whole: bytes that averaging whole gradients would have sent.
        """
        self.last_step = sum(self.sent.values()) - self._mark
        self.last_whole = whole
        self.whole[self.stage] += whole
        self.start_step()

    def start_step(self) -> None:
        """Leave what was sent so far (agreeing, switching) out of the account of the next step."""
        self._mark = sum(self.sent.values())


class Communicator:
    """Collectives over one process group, or over nobody.

    Args:
        process_group: a torch.distributed group, or a DeviceMesh of one dimension; None means the default group when
            torch.distributed is initialised, else a single process.

    Attributes:
        group: the process group, None for a single process.
        rank: this process's rank in the group.
        ranks: size of the group.
        traffic: bytes sent so far.
        clock: what times the waits of a step.
        watch: what waits for collectives, and names ranks that are missing when one fails.

    Raises:
        ValueError: if this process is not in the group.
    """

    def __init__(self, process_group: ProcessGroup | DeviceMesh | None) -> None:
        ready = dist.is_available() and dist.is_initialized()
        if isinstance(process_group, DeviceMesh):
            if process_group.ndim != 1:
                raise ValueError(
                    f"Invalid process_group={process_group!r}. A mesh must have one dimension: pick that of the "
                    "replicas, as in mesh['replicate']."
                )
            process_group = process_group.get_group()
        given: object = process_group
        if given is not None and not isinstance(given, ProcessGroup):
            where = f"rank {dist.get_rank()}" if ready else "this process"
            raise ValueError(
                f"Invalid process_group={process_group!r}. Must be a process group that {where} belongs to; "
                "new_group() returns a placeholder on other ranks: create the optimizer on its members only."
            )
        self.group = process_group if process_group is not None else (dist.group.WORLD if ready else None)
        self.rank, self.ranks = 0, 1
        if self.group is not None:
            self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
            if self.rank < 0:
                raise ValueError("Invalid process_group. Must contain this rank.")
        self.traffic = Traffic()
        self.clock = Clock()
        if self.group is None or self.ranks == 1:
            self.watch = Watch([0], 0, None, None)
        else:
            store = _get_process_group_store(self.group)
            world = dist.get_process_group_ranks(self.group)
            # torchrun's store outlives the processes that it restarts: what they wrote must not be taken for ours.
            attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{dist.get_world_size()}"
            session = PrefixStore(f"onebit_triton/{attempt}", store)
            self.watch = Watch(world, self.rank, session, _host(store))

    def _start(self, collective: Callable[..., Any], *tensors: Tensor, **options: int) -> Work:
        started = collective(*tensors, **options, group=self.group, async_op=True)
        return _Watched(started, self.watch, tensors[0].device.type == "cpu")

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        """Send row r of `sent` to rank r; row r of `received` comes from rank r. Asynchronous."""
        if self.ranks == 1:
            received.copy_(sent)
            return Done()
        self.traffic.add(sent.nbytes // self.ranks * (self.ranks - 1))
        return _Timed(self._start(dist.all_to_all_single, received, sent), self.clock)

    def all_gather(self, gathered: Tensor, sent: Tensor) -> Work:
        """Concatenate every rank's `sent` in rank order. Asynchronous."""
        if self.ranks == 1:
            gathered.view(-1).copy_(sent.view(-1))
            return Done()
        self.traffic.add(sent.nbytes * (self.ranks - 1))
        # torch 2.13 renames the call and deprecates the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return _Timed(self._start(gather, gathered.view(-1), sent.view(-1)), self.clock)

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum over ranks, in place. Asynchronous."""
        if self.ranks == 1:
            return Done()
        self.count_all_reduce(tensor)
        return _Timed(self._start(dist.all_reduce, tensor), self.clock)

    def count_all_reduce(self, tensor: Tensor) -> None:
        """Count the bytes that a ring all-reduce of a tensor sends."""
        self.traffic.add(ring_bytes(tensor.numel(), self.ranks, tensor.element_size()))

    def broadcast(self, tensor: Tensor) -> None:
        """Give every rank the tensor of rank 0 of the group."""
        if self.group is not None and self.ranks > 1:
            self._start(dist.broadcast, tensor, src=dist.get_global_rank(self.group, 0)).wait()

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Every rank's numbers, on the host."""
        backend = str(dist.get_backend(self.group)) if self.group is not None and self.ranks > 1 else "gloo"
        device = torch.device("cuda" if "nccl" in backend and "gloo" not in backend else "cpu")
        mine = torch.tensor(numbers, dtype=torch.int64, device=device)
        theirs = torch.empty(self.ranks * len(numbers), dtype=torch.int64, device=device)
        self.all_gather(theirs, mine).wait()
        return theirs.view(self.ranks, -1).tolist()

    def raise_together(self, error: Exception | None, doing: str) -> None:
        """Raise on every rank if any rank failed: its own error there, one that names it elsewhere.

        Without this a rank that failed would leave its peers waiting in their next collective.
        """
        failed = [rank for rank, (flag,) in enumerate(self.gather_numbers([int(error is not None)])) if flag]
        if error is not None:
            raise error
        if failed:
            raise RuntimeError(f"Rank {failed[0]} failed to {doing}; its own error message says why.")

    def agree(self, facts: Mapping[str, int]) -> None:
        """Compare facts between ranks.

        Args:
            facts: name -> number that must be the same on every rank, same names everywhere.

        Raises:
            RuntimeError: on every rank alike, naming the first fact that differs and who has what.
        """
        rows = self.gather_numbers(list(facts.values()))
        for column, name in enumerate(facts):
            for rank, row in enumerate(rows):
                if row[column] != rows[0][column]:
                    raise RuntimeError(
                        f"Ranks do not agree on {name}: rank {rank} has {row[column]}, rank 0 has {rows[0][column]}. "
                        "Every rank must build the same optimizer over the same parameters in the same order."
                    )


def _host(store: Store) -> int | None:
    """The rank that hosts a store, if one does: by default rank 0. torchrun's agent hosts it itself."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, TCPStore) and not agent else None


class SharedGroup:
    """A process group within something that is copied. Copies share it; only the default group can be pickled.

    Args:
        group: the group; None stands for the default group, or a single process.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, object]) -> SharedGroup:
        return self

    def __reduce__(self) -> tuple[type[SharedGroup], tuple[None]]:
        if self.group is not None and self.group is not dist.group.WORLD:
            raise TypeError(
                "An optimizer with a process_group of its own cannot be pickled: groups belong to running processes. "
                "Save its state_dict() instead."
            )
        return SharedGroup, (None,)


class CompressedAllReduce:
    """Mean of sign-compressed buckets over a process group: all-to-all, then all-gather, one message a rank each.

    Buffers are allocated once and stay where they are, so that a step can be captured in a CUDA graph. For each bucket
    there are two sets of messages: `messages` are packed, sent, and then overwritten by what the exchange leaves;
    `momentum` is a copy of that, made by the passes unless the step is skipped.

    Args:
        communicator: the group.
        message_bytes: bytes of one message of every bucket.
        tag: number that messages carry, mixed with the bucket's number.
        device: where the buffers live.

    Attributes:
        momentum, messages: uint8 [ranks, message bytes] per bucket.
        received: likewise, message i from rank i.
        server: uint8 [message bytes] per bucket, this rank's chunk for everybody.
        received_flat: uint8, all buckets' `received`.
        headers: int64 [buckets, ranks], where in `received_flat` each message starts.
        message_words: int32 [buckets], words of a message.
        tags: int32 [buckets].
    """

    def __init__(
        self, communicator: Communicator, message_bytes: Sequence[int], tag: int, device: torch.device
    ) -> None:
        self.communicator = communicator
        ranks = communicator.ranks
        starts, end = [], 0
        for size in message_bytes:
            starts.append(end)
            end += -(-ranks * size // 16) * 16

        def allocate() -> tuple[Tensor, list[Tensor]]:
            buffer = torch.zeros(end, dtype=torch.uint8, device=device)
            return buffer, [
                buffer[start : start + ranks * size].view(ranks, size)
                for start, size in zip(starts, message_bytes, strict=True)
            ]

        self._momentum_flat, self.momentum = allocate()
        self._messages_flat, self.messages = allocate()
        self.received_flat, self.received = allocate()
        self.server = [torch.zeros(size, dtype=torch.uint8, device=device) for size in message_bytes]
        offsets = [[start + r * size for r in range(ranks)] for start, size in zip(starts, message_bytes, strict=True)]
        self.headers = torch.tensor(offsets, dtype=torch.int64).view(-1, ranks).to(device)
        self.message_words = torch.tensor([size // 4 for size in message_bytes], dtype=torch.int32).to(device)
        tags = [(tag + 0x9E3779B1 * number) & 0x7FFFFFFF for number in range(len(message_bytes))]
        self.tags = torch.tensor(tags, dtype=torch.int32).to(device)

    def send_to_servers(self, bucket: int) -> Work:
        """Start the first exchange of a bucket: every rank receives its chunk of everybody's `messages`."""
        return self.communicator.all_to_all(self.received[bucket], self.messages[bucket])

    def send_to_workers(self, bucket: int) -> Work:
        """Start the second exchange of a bucket: everybody receives every server's message in `messages`."""
        return self.communicator.all_gather(self.messages[bucket], self.server[bucket])

    @property
    def step_bytes(self) -> int:
        """Bytes this rank sends in one step."""
        return 2 * (self.communicator.ranks - 1) * sum(message.nbytes for message in self.server)

    def held(self) -> list[Tensor]:
        """Every buffer, for counting memory."""
        return [self._momentum_flat, self._messages_flat, self.received_flat, *self.server]
