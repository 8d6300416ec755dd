"""What a step decides, kernel against twin and against the rules in numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from onebit_triton.kernels.backends import Passes
from onebit_triton.kernels.planes_reference import balance, header
from onebit_triton.kernels.tables import HEADER_BYTES, RHO_DECAY, Clip, Decision, Fault, Header, Roll

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


def roll_call(ranks: int) -> Tensor:
    """All ranks answer alike."""
    roll = torch.tensor([7.0, 255.0, 0.0, 1.0]).repeat(ranks, 1)
    return torch.cat((roll, torch.zeros(ranks, 1)), 1)


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
        passes.decide_averaged(partials, local, roll_call(3), decision, clip, track_rho)

    decision, clip = agree(run, new_decision(), new_clip(max_norm, 0.5, 0.25))
    assert decision.tolist() == [0, 1, 0, 0, -1, 0, 0, 0, 0]
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
        passes.decide_averaged(torch.tensor(partials), torch.tensor([1.0, NAN]), roll_call(2), decision, clip, True)

    before = torch.tensor([0, 7, 2, 1, 3, 0, 4, 5, 4], dtype=torch.int32)
    decision, clip = agree(run, before, new_clip(1.0, 0.5, 0.25, -0.125))
    assert decision.tolist() == [1, 7, 3, 2, -1, Fault.NONFINITE, 4, 5, 4]
    assert clip.tolist() == [-0.125, 0.5, 0.25, 1.0, -0.125]


@pytest.mark.parametrize("local", [[0.0, 0.0], [4.0, 1.0], [NAN, 1.0], [INF, 1.0]])
@pytest.mark.parametrize("norm", [0.0, 4.0])
def test_rho_moves_only_by_finite_values(norm: float, local: list[float]) -> None:
    def run(passes: Passes, decision: Tensor, clip: Tensor) -> None:
        passes.decide_averaged(torch.tensor([norm * norm]), torch.tensor(local), roll_call(2), decision, clip, True)

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
            passes.decide_averaged(
                torch.tensor([4.0]), torch.tensor([4 * value**2]), roll_call(1), new_decision(), clip, True
            )
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
        passes.decide_averaged(squares / unscale**2, local, roll_call(2), decision, clip, True)

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


@pytest.mark.parametrize(
    ("rank", "column", "fault"),
    [(1, 0, Fault.SETTINGS), (2, 1, Fault.SETTINGS), (4, 3, Fault.SETTINGS), (0, Roll.FAILED, Fault.FAILED),
     (3, Roll.FAILED, Fault.FAILED)],
)  # fmt: skip
@pytest.mark.parametrize("finite", [True, False])
def test_averaged_step_on_which_ranks_do_not_agree_is_skipped(
    rank: int, column: int, fault: Fault, finite: bool
) -> None:
    roll = roll_call(5)
    roll[rank, column] = 2.0

    def run(passes: Passes, decision: Tensor, clip: Tensor) -> None:
        passes.decide_averaged(torch.tensor([1.0 if finite else INF]), torch.ones(5), roll, decision, clip, False)

    decision, _ = agree(run, new_decision(), new_clip())
    assert decision.tolist() == [1, 0, 1, 1, rank, fault if finite else fault | Fault.NONFINITE, 0, 0, 0]


class Mail:
    """Received messages of several buckets, in one buffer with garbage between them."""

    def __init__(self, buckets: int, ranks: int, payload: int = 24, step: int = 0) -> None:
        self.buckets, self.ranks, size = buckets, ranks, HEADER_BYTES + payload
        self.received = torch.full((buckets * (ranks * size + 32) + 32,), 0x5A, dtype=torch.uint8)
        starts = [32 + bucket * (ranks * size + 32) for bucket in range(buckets)]
        self.headers = torch.tensor([[start + rank * size for rank in range(ranks)] for start in starts])
        self.messages = [self.received[at : at + ranks * size].view(ranks, size) for at in starts]
        self.words = torch.full((buckets,), size // 4, dtype=torch.int32)
        for bucket, messages in enumerate(self.messages):
            header(messages, Header.SCALE).fill_(0.5)
            header(messages, Header.FLAGS).zero_()
            header(messages, Header.SQUARES).copy_(torch.arange(1.0, ranks + 1))
            header(messages, Header.TAG).fill_(TAG + bucket)
            header(messages, Header.STEP).fill_(step)
            header(messages, Header.SETTINGS).fill_(-77)
            header(messages, Header.SENDER).copy_(torch.arange(ranks))

    def decide(self, decision: Tensor, sealed: bool = True) -> Tensor:
        """Decision after the first exchange; messages are balanced before, unless that is what is tested."""
        if sealed:
            for messages in self.messages:
                balance(messages)

        def run(passes: Passes, decision: Tensor, clip: Tensor) -> None:
            before = self.received.clone()
            passes.decide_exchanged(self.received, self.headers, self.words, decision)
            assert torch.equal(self.received, before)

        return agree(run, decision, new_clip())[0]

    def accept(self, decision: Tensor, bucket: int = 0) -> Tensor:
        """Decision after messages have come back from the servers."""

        def run(passes: Passes, decision: Tensor, clip: Tensor) -> None:
            messages, tag = self.messages[bucket], torch.tensor([TAG + bucket], dtype=torch.int32)
            passes.accept_returned(messages, tag, decision, bucket == 0)

        return agree(run, decision, new_clip())[0]


@pytest.mark.parametrize("buckets", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_exchanged_step_is_taken(ranks: int, buckets: int) -> None:
    before = torch.tensor([1, 7, 2, 2, 1, 8, 0, 3, 0], dtype=torch.int32)
    mail = Mail(buckets, ranks, step=9)
    decision = mail.decide(before)
    assert decision.tolist() == [0, 7, 2, 2, 1, 0, *([1, 4] if ranks == 1 else [0, 0]), 0], "counters come later"
    decision = mail.accept(decision)
    assert decision.tolist()[:6] == [0, 8, 2, 0, 1, 0]
    for bucket in range(1, buckets):
        assert torch.equal(mail.accept(decision, bucket), decision)


@pytest.mark.parametrize(("ranks", "buckets"), [(1, 1), (2, 1), (3, 2), (4, 3), (5, 2)])
def test_one_flag_skips_the_step(ranks: int, buckets: int) -> None:
    for bucket in range(buckets):
        for rank in range(ranks):
            for fault in (Fault.NONFINITE, Fault.FAILED, Fault.DAMAGED):
                mail = Mail(buckets, ranks)
                header(mail.messages[bucket], Header.FLAGS)[rank] = fault
                decision = mail.decide(new_decision())
                assert decision.tolist()[:6] == [1, 0, 0, 0, rank, fault]


def test_first_of_several_bad_ranks_is_named() -> None:
    mail = Mail(2, 5)
    header(mail.messages[0], Header.FLAGS)[4] = Fault.NONFINITE
    header(mail.messages[1], Header.FLAGS)[2] = Fault.NONFINITE
    assert mail.decide(new_decision())[Decision.BAD_RANK] == 2
    header(mail.messages[0], Header.FLAGS)[3] = Fault.FAILED
    decision = mail.decide(new_decision())
    assert decision[[Decision.BAD_RANK, Decision.FAULT]].tolist() == [3, Fault.FAILED | Fault.NONFINITE]


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(
    ("field", "fault"),
    [(Header.TAG, Fault.LAYOUT), (Header.STEP, Fault.STEP), (Header.SETTINGS, Fault.SETTINGS)],
)
def test_what_ranks_do_not_agree_on_skips_the_step(field: Header, fault: Fault, rank: int) -> None:
    mail = Mail(2, 3)
    header(mail.messages[1], field)[rank] += 1
    assert mail.decide(new_decision()).tolist()[:6] == [1, 0, 0, 0, rank, fault]
    for messages in mail.messages:
        header(messages, field)[0] -= 1  # rank 0 is alone: the first of the others is named, alike everywhere
    assert mail.decide(new_decision()).tolist()[4:6] == [1, fault]


@pytest.mark.parametrize("byte", [*range(HEADER_BYTES), HEADER_BYTES, HEADER_BYTES + 23])
def test_any_byte_that_changes_on_the_way_is_noticed(byte: int) -> None:
    mail = Mail(2, 3)
    for messages in mail.messages:
        balance(messages)
    mail.messages[1][2, byte] ^= 0x10
    decision = mail.decide(new_decision(), sealed=False)
    assert decision[[Decision.SKIP, Decision.BAD_RANK, Decision.FAULT]].tolist() == [1, 2, Fault.CORRUPT]


@pytest.mark.parametrize("payload", [8, 24, 224, 4096, 20 * 1024 + 8])
def test_messages_of_any_length_that_are_cut_short_are_noticed(payload: int) -> None:
    """Wherever they are cut: of short ones every word is checked, of long ones words that are spread evenly."""
    mail = Mail(2, 3, payload)
    for messages in mail.messages:
        bytes_of = torch.randint(1, 256, (3, payload), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
        messages[:, HEADER_BYTES:] = bytes_of
        balance(messages)
    assert mail.decide(new_decision(), sealed=False)[Decision.SKIP] == 0
    for cut in (1, payload // 2, payload - 1):
        before = mail.messages[1][2].clone()
        mail.messages[1][2, HEADER_BYTES + cut :] = 0
        assert mail.decide(new_decision(), sealed=False)[Decision.FAULT] == Fault.CORRUPT
        mail.messages[1][2].copy_(before)


def test_messages_cut_short_or_of_another_sender_are_noticed() -> None:
    cut, swapped = Mail(1, 3), Mail(1, 3)
    cut.messages[0][1, HEADER_BYTES:] = torch.arange(24)
    for messages in (cut.messages[0], swapped.messages[0]):
        balance(messages)
    cut.messages[0][1, -8:] = 0
    assert cut.decide(new_decision(), sealed=False)[Decision.FAULT] == Fault.CORRUPT
    swapped.messages[0][1] = swapped.messages[0][2]
    decision = swapped.decide(new_decision(), sealed=False)
    assert decision[[Decision.BAD_RANK, Decision.FAULT]].tolist() == [1, Fault.CORRUPT]


def returned(reports: list[int], step: int = 0) -> Mail:
    """What servers send back, with what each has found."""
    mail = Mail(2, len(reports), step=step)
    header(mail.messages[0], Header.FLAGS).copy_(torch.tensor(reports))
    for messages in mail.messages:
        balance(messages)
    return mail


def test_what_one_server_found_skips_the_step_everywhere() -> None:
    report = Fault.CORRUPT | 2 << 8
    for reports in ([0, report, 0], [0, report, Fault.NONFINITE], [Fault.NONFINITE, report, 0]):
        decision = returned(reports).accept(new_decision())
        assert decision.tolist() == [1, 0, 1, 1, 2, Fault.CORRUPT, 0, 0, 0]
    assert returned([Fault.NONFINITE | 1 << 8] * 3).accept(new_decision()).tolist()[:6] == [1, 0, 1, 1, 1, 1]


def test_skipped_steps_in_a_row_are_counted() -> None:
    decision = new_decision()
    seen = []
    for step, report in enumerate((0, 1, 1, 0, 1)):
        decision = returned([report] * 3, step).accept(decision)
        seen.append(decision[[Decision.SKIP, Decision.COUNTED, Decision.SKIPPED, Decision.STREAK]].tolist())
    assert seen == [[0, 1, 0, 0], [1, 1, 1, 1], [1, 1, 2, 2], [0, 2, 2, 0], [1, 2, 3, 1]]


@pytest.mark.parametrize("bucket", [0, 1])
@pytest.mark.parametrize("field", [None, *Header])
def test_what_comes_back_corrupted_damages_this_rank_alone(field: Header | None, bucket: int) -> None:
    """It skips the rest of the step, which nobody else knows of, and tells in its next messages."""
    decision = new_decision()
    if bucket == 1:
        decision = returned([0, 0, 0]).accept(decision)
    mail = returned([0, 0, 0])
    words = mail.messages[bucket].view(torch.int32)
    words[1, -1 if field is None else field] ^= 1 << 20
    decision = mail.accept(decision, bucket)
    assert decision[[Decision.SKIP, Decision.FAULT, Decision.DAMAGED]].tolist() == [1, 0, Fault.DAMAGED]
    assert decision[[Decision.COUNTED, Decision.SKIPPED]].sum() == 1, "steps stay those of other ranks"
    assert returned([0, 0, 0], step=1).accept(decision)[Decision.DAMAGED] == Fault.DAMAGED, "until it is mended"


@pytest.mark.parametrize("field", [Header.TAG, Header.STEP, Header.SENDER])
def test_whole_messages_of_another_bucket_step_or_server_damage_too(field: Header) -> None:
    mail = returned([0, 0, 0])
    header(mail.messages[0], field)[2] += 1
    balance(mail.messages[0])
    assert mail.accept(new_decision())[Decision.DAMAGED] == Fault.DAMAGED


def test_steps_with_equal_gradients_in_a_row_are_counted() -> None:
    decision = new_decision()
    seen = []
    for squares in ([2.0, 2.0, 2.0], [3.0, 3.0, 3.0], [3.0, 3.0, 2.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0], [NAN] * 3):
        mail = Mail(2, 3)
        for messages in mail.messages:
            header(messages, Header.SQUARES).copy_(torch.tensor(squares))
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
            header(messages, Header.SQUARES).copy_(torch.tensor(squares))
        decision = mail.decide(decision)
        seen.append(decision[Decision.ONE_NORM].item())
    assert seen == [1, 2, 0, 1, 0, 1, 0]


def test_one_unequal_bucket_is_enough() -> None:
    mail = Mail(2, 3)
    for messages in mail.messages:
        header(messages, Header.SQUARES).fill_(2.0)
    header(mail.messages[1], Header.SQUARES)[2] = 2.5
    assert mail.decide(new_decision())[Decision.EQUAL] == 0


def test_refuses_wrong_vectors() -> None:
    mail, values, roll = Mail(1, 2), torch.ones(3), roll_call(3)
    tag = torch.tensor([TAG], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"Invalid decision: must be contiguous torch.int32 with 9 elements on cpu"):
        TRITON.decide_averaged(values, values, roll, new_decision().long(), new_clip(), False)
    with pytest.raises(ValueError, match="Invalid clip"):
        TRITON.decide_averaged(values, values, roll, new_decision(), new_clip()[:3], False)
    with pytest.raises(ValueError, match="Invalid roll"):
        TRITON.decide_averaged(values, values, roll[1:], new_decision(), new_clip(), False)
    with pytest.raises(ValueError, match="Invalid clip"):
        TRITON.clip_local(values, new_clip().to("meta"))
    with pytest.raises(ValueError, match="Invalid decision"):
        TRITON.decide_exchanged(mail.received, mail.headers, mail.words, new_decision()[:6])
    with pytest.raises(ValueError, match="Invalid message_words"):
        TRITON.decide_exchanged(mail.received, mail.headers, mail.words.repeat(2), new_decision())
    with pytest.raises(ValueError, match="Invalid tag"):
        TRITON.accept_returned(mail.messages[0], tag.long(), new_decision(), True)
