"""Compile every kernel for one GPU architecture, without a GPU, and print what came out, one JSON object a line.

Run in a process of its own, without TRITON_INTERPRET: where the interpreter is on, nothing compiles.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from onebit_triton.kernels import common, decision, gradients, lamb, momentum, server, variance

BLOCK = 1024
POINTERS = {
    "*i64": ("param_ptr", "grad_ptr", "numel_ptr", "headers_ptr"),
    "*i32": ("segment_ptr", "first_block_ptr", "decision_ptr", "tag_ptr", "tags_ptr"),
    "*u8": ("old_messages_ptr", "new_messages_ptr", "messages_ptr", "message_ptr", "received_ptr"),
}
INTEGERS = ("blocks", "blocks_per_chunk", "message_bytes", "buckets")
CONSTANTS = {
    "BLOCK": BLOCK,
    "RANKS": 4,
    "PLANES": 1,
    "TRACK_RHO": True,
    "ALIGNED": True,
    "PARAM_ALIGNED": True,
    "GRAD_ALIGNED": True,
}


def pointer_type(name: str) -> str:
    """Triton's type of a pointer argument: fp32 unless listed."""
    return next((kind for kind, names in POINTERS.items() if name in names), "*fp32")


def variants(flags: list[str]) -> Iterator[dict[str, bool]]:
    """Values of the boolean constexprs that launchers use together."""
    for values in itertools.product((False, True), repeat=len(flags)):
        chosen = dict(zip(flags, values, strict=True))
        if chosen.get("NEW_DENSE") and not chosen["OLD_DENSE"]:
            continue
        yield chosen


def compile_kernel(kernel: Any, arch: int, dtype: tl.dtype, flags: dict[str, bool]) -> dict[str, Any]:
    """Compile one variant; resources from cuobjdump, instructions from the PTX."""
    signature, constants, attributes = {}, {}, {}
    per_block = "BLOCK" in kernel.arg_names
    for position, (name, parameter) in enumerate(inspect.signature(kernel.fn).parameters.items()):
        if "constexpr" in str(parameter.annotation):
            signature[name] = "constexpr"
            tile = common.tile_elements(BLOCK) if per_block else common.REDUCE_TILE
            constants[name] = dtype if "DTYPE" in name else CONSTANTS.get(name, flags.get(name, tile))
        elif name in INTEGERS:
            signature[name] = "i32"
        else:
            signature[name] = pointer_type(name)
            attributes[(position,)] = [["tt.divisibility", 16]]
    if kernel.__name__ == "_decide_exchanged_kernel":
        constants["TILE"] = constants["RANKS"]
    options = common.launch_constants(BLOCK) if per_block else {"num_warps": 4, "enable_fp_fusion": False}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    ptx = compiled.asm["ptx"]
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "dtype": str(dtype),
        "flags": flags,
        "per_block": per_block,
        "registers": registers,
        "stack": stack,
        "wide_loads": len(re.findall(r"ld\.global\.v4\.b32", ptx)),
        "atomics": len(re.findall(r"\b(?:atom|red)\.", ptx)),
        "barriers": ptx.count("bar.sync"),
        "fused_multiply_adds": len(re.findall(r"\bfma\.rn\.f32", ptx)),
    }


def main() -> None:
    """Compile for the architecture on the command line (90 for sm_90)."""
    arch = int(sys.argv[1])
    for module in (gradients, decision, lamb, momentum, server, variance):
        for name, kernel in vars(module).items():
            if not name.endswith("_kernel"):
                continue
            names = kernel.arg_names
            dtypes = (tl.float32, tl.bfloat16) if any("DTYPE" in n for n in names) else (tl.float32,)
            for flags in variants([n for n in names if n.endswith("DENSE")]):
                for dtype in dtypes:
                    print(json.dumps(compile_kernel(kernel, arch, dtype, flags)), flush=True)


if __name__ == "__main__":
    main()
