"""The layout: segments on blocks, buckets of whole chunks, little padding; and its fingerprint."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from onebit_triton.buckets import block_map, memory_order_is_dense, message_bytes, plan_layout

SIZES = st.lists(st.integers(0, 5000), min_size=1, max_size=30)


@given(
    sizes=SIZES, block=st.sampled_from([64, 256, 1024]), bucket=st.sampled_from([1024, 4096]), ranks=st.integers(1, 7)
)
def test_layout_covers_everything_once(sizes: list[int], block: int, bucket: int, ranks: int) -> None:
    layout = plan_layout([torch.empty(n) for n in sizes], block, bucket, ranks)
    placed = [i for b in layout.buckets for i in b.parameters]
    assert placed == [i for i, n in enumerate(sizes) if n]
    assert layout.elements == sum(sizes)
    for planned in layout.buckets:
        blocks = block_map(planned, block, torch.device("cpu"))
        assert planned.blocks % ranks == 0
        assert planned.blocks - sum(planned.segment_blocks) < ranks
        assert len(planned.sizes) == 1 or sum(planned.segment_blocks) * block <= bucket
        assert blocks.segment.tolist() == sorted(blocks.segment.tolist())
        assert blocks.first_block[-1] == planned.blocks
        for segment, (start, size) in enumerate(zip(blocks.starts, blocks.sizes, strict=True)):
            assert start % block == 0
            assert (blocks.segment[start // block : -(-(start + size) // block)] == segment).all()
        assert message_bytes(planned, block, ranks) == 32 + planned.blocks * block // ranks // 8


@given(sizes=SIZES)
def test_fingerprint_tells_layouts_apart(sizes: list[int]) -> None:
    def fingerprint(sizes: list[int], block: int = 64, ranks: int = 2, dtype: torch.dtype = torch.float32) -> int:
        return plan_layout([torch.empty(n, dtype=dtype) for n in sizes], block, 4096, ranks).fingerprint

    base = fingerprint(sizes)
    assert base == fingerprint(list(sizes))
    assert base != fingerprint([*sizes, 3])
    assert base != fingerprint(sizes, block=128)
    assert base != fingerprint(sizes, ranks=3)
    if sum(sizes):
        assert base != fingerprint(sizes, dtype=torch.bfloat16)
    if sizes != sizes[::-1]:
        assert base != fingerprint(sizes[::-1])


def test_dtypes_have_buckets_of_their_own() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    layout = plan_layout([torch.empty(10, dtype=d) for d in dtypes], 64, 1024, 2)
    assert [(b.dtype, b.parameters) for b in layout.buckets] == [
        (torch.float32, (0, 2)),
        (torch.bfloat16, (1, 3)),
    ]


def test_dense_memory_orders() -> None:
    image = torch.empty(2, 3, 4, 5)
    for dense in (image, image.to(memory_format=torch.channels_last), image.transpose(0, 3), image[:1], image[0, 0, 0]):
        assert memory_order_is_dense(dense)
    for gappy in (image[:, :2], image[..., ::2], torch.empty(1).expand(4), image[:, :, 0]):
        assert not memory_order_is_dense(gappy)
