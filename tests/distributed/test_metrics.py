"""What metrics() says on several ranks: errors by layer, bytes that were saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onebit_triton.buckets import plan_layout
from onebit_triton.estimate import compressed_bytes

from ..ranks import RankPool
from ..training import gradients, parameters, set_gradients, two_groups

pytestmark = pytest.mark.distributed


def train(rank: int, ranks: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    params = parameters(dtype)
    optimizer = two_groups(params, backend="torch", freeze_step=3)
    seen = []
    for step in range(6):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
        found = optimizer.metrics()
        states = optimizer.state_dict()["state"]
        errors = [float(states[i].get("worker_error", torch.zeros(1)).double().norm()) for i in range(len(params))]
        found["errors"] = errors
        scales = [float(bucket.x_scale) for bucket in optimizer._replica.buckets for _ in bucket.parameters]
        found["sent"] = [scale * param.numel() ** 0.5 for scale, param in zip(scales, params, strict=True)]
        found["rank"] = optimizer.rank
        seen.append(found)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_by_layer_and_bytes_saved(ranks: RankPool, dtype: torch.dtype) -> None:
    n = 3
    layout = plan_layout(parameters(dtype), 64, 512, n)
    size = dtype.itemsize
    whole = sum(2 * sum(bucket.sizes) * size * (n - 1) // n for bucket in layout.buckets)
    compressed = compressed_bytes(layout.padded_elements, n, len(layout.buckets))
    for rank, seen in enumerate(ranks(n, train, dtype)):
        for step, found in enumerate(seen):
            assert found["rank"] == rank
            stage = "warmup" if step < 3 else "compression"
            assert found["last_stage"] == stage
            assert found["bytes_sent_last_step"] + found["bytes_saved_last_step"] == whole
            assert found["bytes_sent"][stage] + found["bytes_saved"][stage] == whole * (step % 3 + 1)
            assert found["exchange_seconds"] > 0
            assert found["pass_seconds"] > 0
            if stage == "warmup":
                assert found["bytes_saved_last_step"] <= 0
                assert found["layer_error_ratio"] == [0.0] * 6
                continue
            assert found["bytes_sent_last_step"] == compressed
            expected = np.array(found["errors"]) / np.array(found["sent"])
            np.testing.assert_allclose(found["layer_error_ratio"], expected, rtol=1e-5)
            total = np.linalg.norm(found["errors"]) / np.linalg.norm(found["sent"])
            assert found["error_ratio"] == pytest.approx(total, rel=1e-5)
            assert total > 0
        assert seen[-1]["bytes_saved"]["compression"] == 3 * (whole - compressed)
