"""Stage 2 on several ranks: the 1-bit momentum exchange."""

from __future__ import annotations

import torch
from torch import Tensor

from ..buckets import message_bytes
from ..collectives import CompressedAllReduce, Work
from ..kernels.momentum_reference import stamp_headers
from ..kernels.planes_reference import balance, header
from ..kernels.tables import Decision, Fault, Header
from .replica import Replica, phase


class Compression:
    """One compressed step: pack and send every bucket, decide, then server, variance, rate and update per bucket.

    Before the decision only x has changed, which belongs to this rank alone; if the step is skipped, the passes that
    follow do nothing and x is taken back. What a rank found in the messages of workers goes to all ranks in the headers
    of its own as a server, and the first bucket's headers settle the step: nothing that ranks share has changed yet.
    """

    name = "compression"

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        layout = replica.layout
        self.exchange = CompressedAllReduce(
            replica.communicator,
            [message_bytes(b.layout, layout.block_elements, layout.ranks) for b in replica.buckets],
            layout.fingerprint & 0x7FFFFFFF,
            replica.device,
        )

    def step(self) -> None:
        """Take one step with this rank's own gradients."""
        replica, exchange, passes = self._replica, self.exchange, self._replica.passes
        decision, clip = replica.decision, replica.clip
        if not replica.buckets:  # nothing to exchange: the step counts all the same
            passes.decide_averaged(replica.norms, replica.local_squares, replica.roll, decision, clip, False)
            return
        if replica.clipping:
            with phase("clip"):
                replica.share_local_squares(replica.sum_local_squares())
                passes.clip_local(replica.local_squares, clip)
        sent = []
        with phase("compress"):
            for i, bucket in enumerate(replica.buckets):
                partials = bucket.partials[:2]
                passes.compress_momentum(
                    bucket.grads, bucket.map, bucket.x, bucket.x_scale, exchange.momentum[i], bucket.exp_avg,
                    bucket.hyper, bucket.rates, clip, exchange.messages[i], partials, replica.l1,
                )  # fmt: skip
                passes.seal_worker(
                    partials, bucket.count, exchange.tags[i : i + 1], replica.stamp, decision, exchange.messages[i],
                    bucket.x_scale, replica.l1,
                )  # fmt: skip
                sent.append(exchange.send_to_servers(i))
        with phase("wait for workers"):
            for work in sent:
                work.wait()
        with phase("decide"):
            passes.decide_exchanged(exchange.received_flat, exchange.headers, exchange.message_words, decision)
        returned = []
        with phase("serve"):
            for i, bucket in enumerate(replica.buckets):
                partials = bucket.partials[0, : bucket.map.blocks // replica.layout.ranks]
                passes.reduce_chunk(
                    exchange.received[i], bucket.y, bucket.y_scale, decision, exchange.server[i], partials,
                    replica.layout.block_elements, replica.l1,
                )  # fmt: skip
                passes.seal_server(
                    partials, bucket.chunk_count, exchange.tags[i : i + 1], replica.stamp, decision,
                    exchange.server[i], bucket.y_scale, replica.l1,
                )  # fmt: skip
                returned.append(exchange.send_to_workers(i))
        with phase("update"):
            for i, (bucket, work) in enumerate(zip(replica.buckets, returned, strict=True)):
                self._wait_for_servers(i, work)
                passes.compressed_update(
                    bucket.params, bucket.copies, None, bucket.map, exchange.momentum[i], exchange.messages[i],
                    bucket.exp_avg, bucket.exp_avg_sq, bucket.exp_avg_sq_fresh, bucket.hyper, bucket.rates, clip,
                    decision, bucket.partials, replica.bias_correction,
                )  # fmt: skip
                passes.undo_momentum(
                    bucket.grads, bucket.map, bucket.x, bucket.x_scale, exchange.momentum[i], bucket.exp_avg,
                    bucket.hyper, bucket.rates, clip, decision,
                )  # fmt: skip
        self._drop_dense_momentum()

    def abstain(self) -> None:
        """Take part in the exchanges of a step that this rank cannot take, so that all ranks skip it."""
        replica, exchange, passes = self._replica, self.exchange, self._replica.passes
        if replica.clipping:
            replica.share_local_squares(torch.zeros_like(replica.clip[:1]))
        sent = []
        for i in range(len(replica.buckets)):
            exchange.messages[i].zero_()
            header(exchange.messages[i], Header.FLAGS).fill_(int(Fault.FAILED))
            stamp_headers(exchange.messages[i], exchange.tags[i : i + 1], replica.stamp, replica.decision)
            balance(exchange.messages[i])
            sent.append(exchange.send_to_servers(i))
        for work in sent:
            work.wait()
        passes.decide_exchanged(exchange.received_flat, exchange.headers, exchange.message_words, replica.decision)
        returned = []
        for i, bucket in enumerate(replica.buckets):
            passes.seal_server(
                torch.zeros_like(bucket.count), bucket.chunk_count, exchange.tags[i : i + 1], replica.stamp,
                replica.decision, exchange.server[i], bucket.y_scale, replica.l1,
            )  # fmt: skip
            returned.append(exchange.send_to_workers(i))
        for i, work in enumerate(returned):
            self._wait_for_servers(i, work)

    def _wait_for_servers(self, bucket: int, work: Work) -> None:
        """Wait for what servers send back for a bucket, and check it."""
        exchange, decision = self.exchange, self._replica.decision
        work.wait()
        self._replica.passes.accept_returned(
            exchange.messages[bucket], exchange.tags[bucket : bucket + 1], decision, bucket == 0
        )

    def _drop_dense_momentum(self) -> None:
        """Free the dense momentum once a compressed step has been taken: from then on it is bits.

        Reads the decision on the host, so only in the first compressed step (again if that one was skipped).
        """
        dense = [bucket for bucket in self._replica.buckets if bucket.exp_avg is not None]
        if dense and self._replica.capturing():
            raise RuntimeError(
                "The first compressed step cannot be captured in a CUDA graph: it frees the dense momentum. Take one "
                "step before the capture."
            )
        if dense and not int(self._replica.decision[Decision.SKIP]):
            for bucket in dense:
                bucket.exp_avg = None

    def held(self) -> list[Tensor]:
        """Buffers that only this stage has."""
        return self.exchange.held()
