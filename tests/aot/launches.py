"""What launchers launch: each is called as a step calls it, on small tensors, under a driver that only takes notes.

Types, constants, alignments and options of a kernel are thus the launcher's own, and specialising on arguments is
Triton's: nothing here repeats them. Nothing is computed either, so tensors stay empty.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget

from onebit_triton.kernels.backends import PASSES, load_passes
from onebit_triton.kernels.tables import HEADER_BYTES, BlockMap, Clip, Decision, Hyper, Rate, Roll, Stamp, TensorTable
from onebit_triton.options import check_optimizer

PARTIALS = {
    "gradient_norms": 1,
    "decide_averaged": 1,
    "lamb_moments": 2,
    "trust_ratio": 2,
    "compress_momentum": 2,
    "seal_worker": 2,
    "reduce_chunk": 1,
    "seal_server": 1,
    "fresh_variance": 4,
    "soft_threshold_rate": 4,
}
"""Pass -> partial results of a block that it writes or reads."""

OPTIONS = ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion")
"""Triton's options that a launch may set."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """How two calls of one launcher can differ, besides optional arguments and flags.

    Attributes:
        dtype: of the parameters.
        grad_dtype: of the gradients; None: that of the parameters.
        aligned: whether all tensors start on 16 bytes; if not, only those that are allocated for a bucket do.
        block: elements of a block.
        ranks: number of ranks.
        chunk_blocks: blocks of a chunk; Triton may compile numbers that come from it anew where they are 1, or
            multiples of 16.
    """

    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype | None = None
    aligned: bool = True
    block: int = 1024
    ranks: int = 2
    chunk_blocks: int = 3

    def __str__(self) -> str:
        usual = asdict(Setting())
        return ", ".join(f"{k}={v}".replace("torch.", "") for k, v in asdict(self).items() if v != usual[k])


Choice = dict[str, bool]
"""Optional argument -> whether it is given; flag -> its value."""

Call = tuple[Setting, Choice]


@dataclass(frozen=True)
class Launch:
    """A kernel as it is launched: what Triton needs to compile it, and the call of the launcher that led to it."""

    name: str
    setting: Setting
    choice: Choice
    module: str
    kernel_name: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    def __str__(self) -> str:
        said = [str(self.setting), *(key for key, value in self.choice.items() if value)]
        return f"{self.name}({', '.join(filter(None, said))})"

    @property
    def kernel(self) -> Any:
        """The jit function."""
        return getattr(sys.modules[self.module], self.kernel_name)

    @property
    def usual(self) -> bool:
        """Whether this is what is launched by default."""
        return self.setting == Setting() and not any(self.choice.values())

    @property
    def code(self) -> str:
        """The same for launches that are compiled to the same code."""
        return repr((self.name, self.signature, self.constants, self.attributes, self.options))

    def constant(self, name: str) -> Any:
        """Value of a constexpr, None if the kernel has none of this name."""
        names = list(self.signature)
        return self.constants.get((names.index(name),)) if name in names else None


class _NoteTaker:
    """A driver with nothing behind it. That it names a target brings a launch as far as the compiler."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def block_sizes() -> list[int]:
    """All block sizes that the optimizer accepts."""

    def accepted(block: int) -> bool:
        try:
            check_optimizer(1, None, None, None, "rms", 1, None, block, block)
        except ValueError:
            return False
        return True

    return [1 << power for power in range(32) if accepted(1 << power)]


def choices(launcher: Callable[..., None]) -> list[Choice]:
    """Every way to give a launcher its optional arguments and to set its flags; none of them first, all last."""
    parameters = inspect.signature(launcher).parameters.values()
    names = [p.name for p in parameters if p.annotation == "bool" or "None" in p.annotation]
    every = (dict(zip(names, v, strict=True)) for v in itertools.product((False, True), repeat=len(names)))
    # Gradients in place of an exchange's messages belong to one process, whose momentum is always dense.
    return [choice for choice in every if not choice.get("grads") or choice["exp_avg"]]


def arguments(name: str, setting: Setting) -> dict[str, Any]:
    """What launchers take, by the names of their parameters."""
    block, ranks = setting.block, setting.ranks
    chunked = name in ("reduce_chunk", "seal_server")
    blocks = ranks * setting.chunk_blocks
    message_bytes = HEADER_BYTES + setting.chunk_blocks * block // 8
    grad_dtype = setting.grad_dtype or setting.dtype

    def table(dtype: torch.dtype) -> TensorTable:
        made = TensorTable(1, dtype, CPU)
        made.aligned = setting.aligned
        return made

    def part(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A part of a larger tensor: it starts where the part before it ends."""
        whole = torch.empty(4 + torch.Size(shape).numel(), dtype=dtype)
        return whole[4 if setting.aligned else 1 :][: torch.Size(shape).numel()].view(shape)

    return {
        "params": table(torch.float32),
        "copies": table(setting.dtype),
        "grads": table(grad_dtype),
        "blocks": BlockMap(
            segment=torch.empty(blocks, dtype=torch.int32),
            first_block=torch.empty(2, dtype=torch.int32),
            numel=torch.empty(1, dtype=torch.int64),
            sizes=(blocks * block,),
            starts=(0,),
            block_elements=block,
        ),
        "block_elements": block,
        "ranks": ranks,
        "partials": part(PARTIALS.get(name, 0), setting.chunk_blocks if chunked else blocks),
        "out": torch.empty(blocks * block, dtype=setting.dtype),
        **{key: torch.empty(blocks * block) for key in ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh", "x")},
        "y": torch.empty(setting.chunk_blocks * block),
        **{
            key: torch.empty(ranks, message_bytes, dtype=torch.uint8)
            for key in ("old_messages", "new_messages", "messages", "received")
        },
        "message": torch.empty(message_bytes, dtype=torch.uint8),
        "headers": torch.empty(3, ranks, dtype=torch.int64),
        "message_words": torch.empty(3, dtype=torch.int32),
        "stamp": torch.empty(len(Stamp), dtype=torch.int32),
        "roll": torch.empty(ranks, len(Roll)),
        "tag": part(1, dtype=torch.int32),
        **{key: part(1) for key in ("count", "x_scale", "y_scale")},
        "hyper": part(1, len(Hyper)),
        "rates": part(1, len(Rate)),
        "local_squares": torch.empty(ranks),
        "decision": torch.empty(len(Decision), dtype=torch.int32),
        "clip": torch.empty(len(Clip)),
    }


def call(name: str, launcher: Callable[..., None], setting: Setting, choice: Choice) -> None:
    """Call a launcher.

    Raises:
        LookupError: if it takes something that `arguments` does not know.
    """
    known, given = arguments(name, setting), {}
    for argument, parameter in inspect.signature(launcher).parameters.items():
        if parameter.annotation == "bool":
            given[argument] = choice[argument]
        elif argument in known:
            given[argument] = known[argument] if choice.get(argument, True) else None
        else:
            raise LookupError(f"{name} takes {argument}, which tests/aot/launches.py does not know: add it there.")
    launcher(**given)


def record(plan: Callable[[str, list[Choice]], Iterable[Call]]) -> Iterator[Launch]:
    """Every different kernel that the launchers of all passes launch.

    Args:
        plan: from the name of a pass and its launcher's choices to the calls to make.

    Raises:
        LookupError: if a launcher cannot be called, or launches nothing.
    """
    passes = load_passes("triton", torch.device("cuda"))
    noted: list[tuple[Any, dict[str, Any]]] = []

    def note(fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        noted.append((fn, compile))
        return True  # do not compile

    triton.runtime.driver.set_active(_NoteTaker())
    knobs.runtime.jit_cache_hook = note
    seen: set[str] = set()
    for name in itertools.chain.from_iterable(PASSES.values()):
        launcher = getattr(passes, name)
        for setting, choice in plan(name, choices(launcher)):
            noted.clear()
            call(name, launcher, setting, choice)
            if not noted:
                raise LookupError(f"{name} launches nothing.")
            for function, found in noted:
                launch = Launch(
                    name,
                    setting,
                    choice,
                    function.module,
                    function.name,
                    signature=found["signature"],
                    constants=found["constants"],
                    attributes=found["configs"][0],
                    options={option: found[option] for option in OPTIONS},
                )
                if launch.code not in seen:
                    seen.add(launch.code)
                    yield launch
