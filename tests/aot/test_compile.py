"""Every kernel compiles for real GPUs, in every variant that is launched, without spills, atomics or contraction."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from onebit_triton.kernels.backends import PASSES


@pytest.mark.aot
@pytest.mark.parametrize("arch", [90])
def test_kernels_compile(arch: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot.compile_kernels", str(arch)],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in found} == {f"_{name}_kernel" for names in PASSES.values() for name in names}
    for kernel in found:
        assert kernel["stack"] == 0, kernel
        assert kernel["registers"] <= 128, kernel
        assert kernel["atomics"] == 0, kernel
        assert kernel["fused_multiply_adds"] == 0, kernel
        if kernel["per_block"]:
            assert kernel["barriers"] == 0, kernel
            assert kernel["wide_loads"] >= 8 or kernel["dtype"] != "fp32", kernel
