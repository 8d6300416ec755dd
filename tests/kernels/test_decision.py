"""What a step decides, kernel against twin and against the rules in numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from onebit_triton.kernels.backends import Passes
from onebit_triton.kernels.planes_reference import header
from onebit_triton.kernels.tables import FLAG_NONFINITE, RHO_DECAY, Clip, Decision

from .bed import RTOL, TORCH, TRITON, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow)")

INF, NAN = float("inf"), float("nan")
TAG = 0x5EADBEEF


def new_decision() -> Tensor:
    decision = torch.zeros(len(Decision), dtype=torch.int32)
    decision[Decision.BAD_RANK] = -1
    return decision


def new_clip(max_norm: float = INF, rho: float = 0.0, weight: float = 0.0, unscale: float = 1.0) -> Tensor:
    clip = torch.full((len(Clip),), 0.123)
    clip[Clip.RHO], clip[Clip.RHO_WEIGHT], clip[Clip.MAX_NORM] = rho, weight, max_norm
    clip[Clip.UNSCALE] = unscale
    return clip


def agree(run: Callable[[Passes, Tensor, Tensor], None], decision: Tensor, clip: Tensor) -> tuple[Tensor, Tensor]:
    """Run on copies with both implementations; what they agree on."""
    results = []
    for passes in (TRITON, TORCH):
        copies = decision.clone(), clip.clone()
        run(passes, *copies)
        results.append(copies)
    (kernel_decision, kernel_clip), (twin_decision, twin_clip) = results
    assert torch.equal(kernel_decision, twin_decision)
    torch.testing.assert_close(kernel_clip, twin_clip, rtol=RTOL, atol=0)
    assert same_bits(kernel_clip[Clip.RHO_WEIGHT], twin_clip[Clip.RHO_WEIGHT])
    assert same_bits(kernel_clip[Clip.MAX_NORM], clip[Clip.MAX_NORM])
    return kernel_decision, kernel_clip


@pytest.mark.parametrize("track_rho", [False, True])
@pytest.mark.parametrize("max_norm", [INF, 1.0, 1e6])
@pytest.mark.parametrize("blocks", [1, 3, 1023, 1024, 5000])
def test_averaged_step_is_taken_and_clipped(blocks: int, max_norm: float, track_rho: bool) -> None:
    partials = torch.rand(blocks, generator=torch.Generator().manual_seed(blocks)) + 1.0
    local = torch.tensor([2.0, 3.0, 5.0]) * blocks

    def run(passes: Passes, decision: Tensor, clip: Tensor) -> None:
        passes.decide_averaged(partials, local, decision, clip, track_rho)

    decision, clip = agree(run, new_decision(), new_clip(max_norm, 0.5, 0.25))
    assert decision.tolist() == [0, 1, 0, 0, -1, 0, 0, 0]
    norm = math.sqrt(partials.double().sum())
    rho = math.sqrt(local.double().mean()) / norm
    assert clip[Clip.GRAD_SCALE].item() == pytest.approx(min(1.0, max_norm / norm), rel=RTOL)
    if track_rho:
        assert clip[Clip.RHO].item() == pytest.approx(RHO_DECAY * 0.5 + (1 - RHO_DECAY) * rho, rel=RTOL)
        assert clip[Clip.RHO_WEIGHT].item() == pytest.approx(RHO_DECAY * 0.25 + (1 - RHO_DECAY), rel=RTOL)
    else:
        assert clip[[Clip.RHO, Clip.RHO_WEIGHT]].tolist() == [0.5, 0.25]


@pytest.mark.parametrize("partials", [[1.0, NAN], [INF, 2.0], [3e38, 3e38], [INF, -INF]])
def test_averaged_step_that_is_not_finite_is_skipped(partials: list[float]) -> None:
    def run(passes: Passes, decision: Tensor, clip: Tensor) -> None:
        passes.decide_averaged(torch.tensor(partials), torch.tensor([1.0, NAN]), decision, clip, True)

    before = torch.tensor([0, 7, 2, 1, 3, 0, 4, 5], dtype=torch.int32)
    decision, clip = agree(run, before, new_clip(1.0, 0.5, 0.25, -0.125))
    assert decision.tolist() == [1, 7, 3, 2, -1, 0, 4, 5]
    assert clip.tolist() == [-0.125, 0.5, 0.25, 1.0, -0.125]


@pytest.mark.parametrize("local", [[0.0, 0.0], [4.0, 1.0], [NAN, 1.0], [INF, 1.0]])
@pytest.mark.parametrize("norm", [0.0, 4.0])
def test_rho_moves_only_by_finite_values(norm: float, local: list[float]) -> None:
    def run(passes: Passes, decision: Tensor, clip: Tensor) -> None:
        passes.decide_averaged(torch.tensor([norm * norm]), torch.tensor(local), decision, clip, True)

    decision, clip = agree(run, new_decision(), new_clip(2.0, 0.5, 0.25))
    assert decision[Decision.SKIP] == 0
    assert clip[Clip.GRAD_SCALE] == (0.5 if norm else 1.0)
    moved = norm > 0 and math.isfinite(sum(local))
    assert (clip[[Clip.RHO, Clip.RHO_WEIGHT]].tolist() != [0.5, 0.25]) == moved


def test_rho_over_several_steps() -> None:
    """RHO / RHO_WEIGHT stays a weighted mean of the values seen."""
    clips = [new_clip(), new_clip()]
    for value in (1.5, 2.0, 3.0):
        for passes, clip in zip((TRITON, TORCH), clips, strict=True):
            passes.decide_averaged(torch.tensor([4.0]), torch.tensor([4 * value**2]), new_decision(), clip, True)
    torch.testing.assert_close(clips[0], clips[1], rtol=RTOL, atol=0)
    weights = [RHO_DECAY**2, RHO_DECAY, 1.0]
    mean = sum(w * v for w, v in zip(weights, (1.5, 2.0, 3.0), strict=True)) / sum(weights)
    assert (clips[0][Clip.RHO] / clips[0][Clip.RHO_WEIGHT]).item() == pytest.approx(mean, rel=RTOL)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("rho", "weight"), [(0.0, 0.0), (0.6, 0.3)])
@pytest.mark.parametrize("max_norm", [INF, 0.5, 1e6])
def test_local_clipping(max_norm: float, rho: float, weight: float, ranks: int) -> None:
    local = torch.arange(1.0, ranks + 1)

    def run(passes: Passes, decision: Tensor, clip: Tensor) -> None:
        passes.clip_local(local, clip)

    decision, clip = agree(run, new_decision(), new_clip(max_norm, rho, weight))
    expected = max_norm * (rho / weight if weight else 1.0) / math.sqrt(local.double().mean())
    assert clip[Clip.GRAD_SCALE].item() == pytest.approx(min(1.0, expected), rel=RTOL)
    assert clip[1:].tolist() == new_clip(max_norm, rho, weight)[1:].tolist()
    assert torch.equal(decision, new_decision())


@pytest.mark.parametrize("unscale", [0.25, -1.0, -(2.0**-16)])
@pytest.mark.parametrize("max_norm", [INF, 0.5])
def test_factor_undoes_the_loss_scale(max_norm: float, unscale: float) -> None:
    """Norms of averaged gradients are those of scaled ones, local norms are unscaled when they are shared."""
    local, squares = torch.tensor([1.0, 3.0]), torch.tensor([0.5, 0.5])

    def averaged(passes: Passes, decision: Tensor, clip: Tensor) -> None:
        passes.decide_averaged(squares / unscale**2, local, decision, clip, True)

    def exchanged(passes: Passes, decision: Tensor, clip: Tensor) -> None:
        passes.clip_local(local, clip)

    _, clip = agree(averaged, new_decision(), new_clip(max_norm, unscale=unscale))
    assert clip[Clip.GRAD_SCALE].item() == pytest.approx(min(1.0, max_norm) * unscale, rel=RTOL)
    assert (clip[Clip.RHO] / clip[Clip.RHO_WEIGHT]).item() == pytest.approx(2**0.5, rel=RTOL)
    _, clip = agree(exchanged, new_decision(), new_clip(max_norm, 1.0, 1.0, unscale))
    assert clip[Clip.GRAD_SCALE].item() == pytest.approx(min(1.0, max_norm / 2**0.5) * unscale, rel=RTOL)


@pytest.mark.parametrize(("local", "scale"), [([NAN, 1.0], 1.0), ([INF, 1.0], 1.0), ([0.0, 0.0], 1.0)])
def test_local_clipping_of_odd_norms(local: list[float], scale: float) -> None:
    def run(passes: Passes, decision: Tensor, clip: Tensor) -> None:
        passes.clip_local(torch.tensor(local), clip)

    _, clip = agree(run, new_decision(), new_clip(1.0, 0.6, 0.3))
    assert clip[Clip.GRAD_SCALE] == scale


class Mail:
    """Received messages of several buckets, in one buffer with garbage between them."""

    def __init__(self, buckets: int, ranks: int, payload: int = 24) -> None:
        self.buckets, self.ranks, size = buckets, ranks, 16 + payload
        self.received = torch.full((buckets * (ranks * size + 32) + 32,), 0x5A, dtype=torch.uint8)
        starts = [32 + bucket * (ranks * size + 32) for bucket in range(buckets)]
        self.headers = torch.tensor([[start + rank * size for rank in range(ranks)] for start in starts])
        self.messages = [self.received[at : at + ranks * size].view(ranks, size) for at in starts]
        self.tags = torch.tensor([TAG + bucket for bucket in range(buckets)], dtype=torch.int32)
        for bucket, messages in enumerate(self.messages):
            header(messages, 0).fill_(0.5)
            header(messages, 1).zero_()
            header(messages, 2).copy_(torch.arange(1.0, ranks + 1))
            header(messages, 3).fill_(self.tags[bucket])

    def decide(self, decision: Tensor) -> Tensor:
        def run(passes: Passes, decision: Tensor, clip: Tensor) -> None:
            before = self.received.clone()
            passes.decide_exchanged(self.received, self.headers, self.tags, decision)
            assert torch.equal(self.received, before)

        return agree(run, decision, new_clip())[0]


@pytest.mark.parametrize("buckets", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_exchanged_step_is_taken(ranks: int, buckets: int) -> None:
    before = torch.tensor([1, 7, 2, 2, 1, 0, 0, 3], dtype=torch.int32)
    decision = Mail(buckets, ranks).decide(before)
    assert decision.tolist() == [0, 8, 2, 0, 1, 0, *([1, 4] if ranks == 1 else [0, 0])]


@pytest.mark.parametrize(("ranks", "buckets"), [(1, 1), (2, 1), (3, 2), (4, 3), (5, 2)])
def test_one_flag_skips_the_step(ranks: int, buckets: int) -> None:
    for bucket in range(buckets):
        for rank in range(ranks):
            mail = Mail(buckets, ranks)
            header(mail.messages[bucket], 1)[rank] = FLAG_NONFINITE
            decision = mail.decide(new_decision())
            assert decision.tolist()[:6] == [1, 0, 1, 1, rank, 0]


def test_first_of_several_bad_ranks_is_named() -> None:
    mail = Mail(2, 5)
    header(mail.messages[0], 1)[4] = FLAG_NONFINITE
    header(mail.messages[1], 1)[2] = FLAG_NONFINITE
    assert mail.decide(new_decision())[Decision.BAD_RANK] == 2


def test_skipped_steps_in_a_row_are_counted() -> None:
    mail = Mail(1, 3)
    bad = Mail(1, 3)
    header(bad.messages[0], 1)[1] = FLAG_NONFINITE
    decision = new_decision()
    seen = []
    for step in (mail, bad, bad, mail, bad):
        decision = step.decide(decision)
        seen.append(decision[[Decision.SKIP, Decision.COUNTED, Decision.SKIPPED, Decision.STREAK]].tolist())
    assert seen == [[0, 1, 0, 0], [1, 1, 1, 1], [1, 1, 2, 2], [0, 2, 2, 0], [1, 2, 3, 1]]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_message_of_another_layout_skips_and_is_remembered(rank: int) -> None:
    mail = Mail(2, 3)
    header(mail.messages[1], 3)[rank] = TAG
    decision = mail.decide(new_decision())
    assert decision.tolist()[:6] == [1, 0, 1, 1, rank, 1]
    assert Mail(2, 3).decide(decision).tolist()[:6] == [0, 1, 1, 0, rank, 1]


def test_steps_with_equal_gradients_in_a_row_are_counted() -> None:
    decision = new_decision()
    seen = []
    for squares in ([2.0, 2.0, 2.0], [3.0, 3.0, 3.0], [3.0, 3.0, 2.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0], [NAN] * 3):
        mail = Mail(2, 3)
        for messages in mail.messages:
            header(messages, 2).copy_(torch.tensor(squares))
        decision = mail.decide(decision)
        seen.append(decision[Decision.EQUAL].item())
    assert seen == [1, 2, 0, 1, 0, 0]


def test_steps_with_gradients_of_one_norm_in_a_row_are_counted() -> None:
    """Of one norm over all buckets, while those of single buckets differ."""
    decision = new_decision()
    seen = []
    for first, second in (
        ([1.0, 1.5, 2.0], [3.0, 2.5, 2.0]),
        ([1.0, 1.5, 2.0], [3.0, 2.50001, 1.99999]),
        ([1.0, 1.5, 2.0], [3.0, 2.5, 2.0001]),
        ([4.0, 4.0, 4.0], [2.0, 2.0, 2.0]),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        ([1.0, 2.0, 2.0], [2.0, 1.0, 1.0]),
        ([INF, INF, 2.0], [INF, INF, INF]),
    ):
        mail = Mail(2, 3)
        for messages, squares in zip(mail.messages, (first, second), strict=True):
            header(messages, 2).copy_(torch.tensor(squares))
        decision = mail.decide(decision)
        seen.append(decision[Decision.ONE_NORM].item())
    assert seen == [1, 2, 0, 1, 0, 1, 0]


def test_one_unequal_bucket_is_enough() -> None:
    mail = Mail(2, 3)
    for messages in mail.messages:
        header(messages, 2).fill_(2.0)
    header(mail.messages[1], 2)[2] = 2.5
    assert mail.decide(new_decision())[Decision.EQUAL] == 0


def test_refuses_wrong_vectors() -> None:
    mail, values = Mail(1, 2), torch.ones(3)
    with pytest.raises(ValueError, match=r"Invalid decision: must be contiguous torch.int32 with 8 elements on cpu"):
        TRITON.decide_averaged(values, values, new_decision().long(), new_clip(), False)
    with pytest.raises(ValueError, match="Invalid clip"):
        TRITON.decide_averaged(values, values, new_decision(), new_clip()[:3], False)
    with pytest.raises(ValueError, match="Invalid clip"):
        TRITON.clip_local(values, new_clip().to("meta"))
    with pytest.raises(ValueError, match="Invalid decision"):
        TRITON.decide_exchanged(mail.received, mail.headers, mail.tags, new_decision()[:6])
