"""Every kernel compiles for real GPUs in the variants that are launched, and keeps the rules of gates.py."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from .gates import Facts, accesses, narrow_offsets, violations
from .launches import Launch, Setting

CLEAN = Facts(
    registers=40, stack=0, local=0, shared=0, loads={128: 24, 64: 2, 32: 41}, stores={128: 8, 32: 32}, barriers=0,
    shuffles=0, atomics=0, contracted=0, approximate=0, narrow=[],
)  # fmt: skip
"""What lamb_apply may look like."""


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_compile() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot.compile_kernels"],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]


def lamb_apply(setting: Setting) -> Launch:
    """A launch as `record` makes them, of two constexprs."""
    return Launch(
        "lamb_apply", setting, {"bias_correction": False, "copies": setting.dtype != torch.float32},
        module="", kernel_name="",
        signature={"BLOCK": "constexpr", "TILE": "constexpr"},
        constants={(0,): setting.block, (1,): setting.block // 8}, attributes={},
        options={"num_warps": setting.block // 1024, "enable_fp_fusion": False},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"registers": 65}, "65 registers, budget 64"),
        ({"stack": 8}, "stack is 8"),
        ({"local": 4}, "local is 4"),
        ({"loads": {128: 23, 64: 2, 32: 45}}, "23 loads of 128 bits"),
        ({"stores": {64: 16, 32: 32}}, "0 stores of 128 bits"),
        ({"stores": {128: 8, 8: 2}}, "2 stores of 8 bits"),
        ({"barriers": 1}, "1 barriers"),
        ({"shuffles": 5}, "5 shuffles"),
        ({"atomics": 1}, "atomics is 1"),
        ({"contracted": 1}, "contracted is 1"),
        ({"approximate": 1}, "approximate is 1"),
        ({"narrow": ["%1 = tt.addptr"]}, "narrow is"),
    ],
    ids=lambda value: next(iter(value), "clean") if isinstance(value, dict) else "",
)
def test_a_broken_rule_is_seen(change: dict[str, object], said: str | None) -> None:
    found = list(violations(lamb_apply(Setting()), replace(CLEAN, **change)))
    assert [problem[: len(said or "")] for problem in found] == ([said] if said else [])


@pytest.mark.parametrize(
    ("setting", "loads", "stores"),
    [
        (Setting(dtype=torch.bfloat16), {128: 24}, {128: 8, 64: 8}),
        (Setting(aligned=False), {128: 16}, {32: 64}),
        (Setting(block=4096), {128: 24}, {128: 8}),
    ],
    ids=str,
)
def test_the_widths_that_are_asked_for(setting: Setting, loads: dict[int, int], stores: dict[int, int]) -> None:
    assert not list(violations(lamb_apply(setting), replace(CLEAN, loads=loads, stores=stores)))
    for kind, asked in (("loads", loads), ("stores", stores)):
        for width in asked:
            fewer = replace(CLEAN, **{"loads": loads, "stores": stores} | {kind: asked | {width: asked[width] - 1}})
            assert len(list(violations(lamb_apply(setting), fewer))) == (width >= 64)


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("%1 = arith.extsi %0 : i32 to i64\n%2 = tt.addptr %p, %1 : !tt.ptr<f32>, i64", 0),
        (
            "%1 = arith.extsi %0 : i32 to i64\n%2 = arith.muli %1, %c : i64\n%3 = tt.addptr %p, %2 : !tt.ptr<f32>, i64",
            0,
        ),
        ("%1 = tt.addptr %p, %0 : !tt.ptr<f32>, i32", 1),
        ("%1 = arith.muli %0, %c : i32\n%2 = arith.extsi %1 : i32 to i64", 1),
        ("%1 = tt.splat %0 : i32 -> tensor<8xi32>\n%2 = arith.addi %1, %r : tensor<8xi32>\n%3 = tt.addptr %q, %2", 1),
        ("%1 = arith.subi %n, %0 : i32\n%2 = arith.extsi %1 : i32 to i64\n%3 = tt.addptr %p, %2", 0),
        ("%1 = scf.for %i = %0 to %n step %c -> (i32) {", 1),
        ("scf.yield %0 : i32", 1),
        ("%1 = arith.cmpi eq, %0, %c : i32\n scf.if %1 {", 0),
    ],
)
def test_narrow_offsets(body: str, lines: int) -> None:
    assert len(narrow_offsets(f"%0 = tt.get_program_id x : i32\n{body}")) == lines


def test_accesses() -> None:
    ptx = """
        @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        ld.global.L1::evict_last.v2.b32 {%r5, %r6}, [%rd2];
        ld.global.b64 %rd3, [%rd4];
        ld.param.b64 %rd5, [kernel_param_0];
        st.global.b8 [ %rd6 + 0 ], { %rs1 };
    """
    assert accesses(ptx, "ld") == {128: 1, 64: 2}
    assert accesses(ptx, "st") == {8: 1}
