"""The tasks of the convergence benchmark: reproducible, divided among ranks, learnable, and each of its kind."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from torch import Tensor, nn

import benchmarks.convergence
from benchmarks.convergence import tasks
from benchmarks.convergence.tasks import TASKS, Task, digits, digits_cnn, masked_bert, rare_words
from benchmarks.convergence.tasks.task import share
from onebit_triton import OneBitLamb

RANKS = 4


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param]


def make(task: Task) -> nn.Module:
    torch.manual_seed(0)
    return task.model()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_reads_no_data_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    package = digits.__package__
    monkeypatch.setattr(benchmarks.convergence, "tasks", None)  # restored with the modules
    for name in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.delitem(sys.modules, name)
    fresh = importlib.import_module(package)
    for module, data in (("texts", "corpus"), ("rare_words", "texts"), ("digits", "digits")):
        assert getattr(getattr(fresh, module), data).cache_info().misses == 0


def test_names_and_sizes(task: Task) -> None:
    model = make(task)
    assert TASKS[task.name] is task
    assert model.training
    assert 50_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 400_000
    assert same(state(model), state(make(task)))
    assert not same(state(model), state(task.model()))


def test_loss_is_a_function_of_its_arguments(task: Task) -> None:
    model = make(task)
    loss = task.loss(model, 0, 3, 1, RANKS)
    assert loss.shape == ()
    torch.manual_seed(5)  # the global generator takes no part
    assert torch.equal(loss, task.loss(model, 0, 3, 1, RANKS))
    others = [task.loss(model, *arguments, RANKS) for arguments in ((1, 3, 1), (0, 4, 1), (0, 3, 2))]
    assert len({other.item() for other in (loss, *others)}) == 4


def test_shares_make_up_the_batch(task: Task) -> None:
    batch = task.batch(0, 3)
    for ranks in (1, 2, RANKS):
        shares = [share(batch, rank, ranks) for rank in range(ranks)]
        for whole, parts in zip(batch, zip(*shares, strict=True), strict=True):
            assert torch.equal(torch.cat(parts), whole)
    # Hardly an example twice: they are drawn one by one, and which texts there are depends on the Python.
    assert len(batch[0].flatten(1).unique(dim=0)) > 0.98 * len(batch[0])


def test_mean_over_ranks_is_the_mean_over_the_batch(task: Task) -> None:
    model = make(task).eval()  # BatchNorm looks at the whole share in training mode
    mean = torch.stack([task.loss(model, 0, 3, rank, RANKS) for rank in range(RANKS)]).mean()
    torch.testing.assert_close(mean, task.loss(model, 0, 3, 0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rank", "ranks", "wrong"), [(0, 7, "ranks=7"), (0, 0, "ranks=0"), (4, 4, "rank=4")])
def test_shares_that_cannot_be_are_refused(task: Task, rank: int, ranks: int, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"Invalid {wrong}. Must "):
        task.loss(nn.Module(), 0, 0, rank, ranks)


def test_every_parameter_has_a_finite_gradient(task: Task) -> None:
    model = make(task)
    task.loss(model, 0, 0, 0, RANKS).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_repeats_and_leaves_no_trace(task: Task, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = task.held_out()
    assert 200 <= len(held_out[0]) <= 2000
    assert all(torch.equal(*pair) for pair in zip(held_out, task.held_out(), strict=True))
    few = tuple(tensor[:40] for tensor in held_out)
    monkeypatch.setattr(task, "held_out", lambda: few)
    monkeypatch.setattr(tasks.task, "CHUNK", 16)  # the last one is smaller

    model = make(task).train(training)
    before = state(model)
    scores = task.evaluate(model)
    assert scores == task.evaluate(model)
    assert all(module.training == training for module in model.modules())
    assert same(before, state(model))
    assert task.score in scores
    with torch.no_grad():
        whole = task.measure(model.eval(), few)
    assert scores == {name: pytest.approx(mean.item(), rel=1e-5) for name, mean in whole.items()}


def test_lamb_reduces_the_loss(task: Task) -> None:
    model = make(task)
    optimizer = OneBitLamb(model.parameters(), lr=0.03, freeze_step=10**6, betas=(0.9, 0.99))
    losses = []
    for _ in range(12):
        loss = task.loss(model, 0, 0, 0, RANKS)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.05


def test_training_and_held_out_digits_are_apart() -> None:
    images, labels = digits.digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.min() == 0
    assert images.max() == 1
    assert labels.unique().tolist() == list(range(10))
    assert torch.equal(TASKS["digits-vit"].held_out()[1], labels[-450:].repeat_interleave(4))


def test_digits_are_shifted_by_up_to_a_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "NOISE", 0.0)
    image = torch.arange(1.0, 65).view(8, 8)
    padded = nn.functional.pad(image, (1, 1, 1, 1))
    views = [padded[row : row + 8, column : column + 8] for row in range(3) for column in range(3)]
    seen = digits.distort(image.expand(200, 1, 8, 8), torch.Generator().manual_seed(0))[:, 0].unique(dim=0)
    assert len(seen) == len(views) == 9
    assert all(any(torch.equal(view, one) for view in views) for one in seen)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_only_rank_0_moves_the_running_statistics(rank: int) -> None:
    task = TASKS["digits-cnn"]
    model = make(task)
    before = state(model)
    task.loss(model, 0, 0, rank, RANKS)
    moved = {name for name, tensor in model.named_buffers() if not torch.equal(tensor, before[name])}
    assert moved == ({name for name, _ in model.named_buffers()} if rank == 0 else set())
    assert all(module.track_running_stats for module in model.modules() if isinstance(module, nn.BatchNorm2d))


def test_batchnorm_sees_the_share_of_its_rank_alone() -> None:
    task = TASKS["digits-cnn"]
    model = make(task)
    for rank in range(RANKS):
        own = digits_cnn.ConvNet()
        own.load_state_dict(model.state_dict())
        images, labels = share(task.batch(0, 0), rank, RANKS)
        expected = nn.functional.cross_entropy(own(images), labels)
        assert torch.equal(task.loss(model, 0, 0, rank, RANKS), expected)


def test_bytes_are_hidden_as_bert_does() -> None:
    text = torch.randint(256, (2000, masked_bert.CONTEXT), generator=torch.Generator().manual_seed(0))
    tokens, positions, targets = masked_bert.hide(text, torch.Generator().manual_seed(0))
    assert positions.shape == (2000, 10)
    assert all(len(row.unique()) == 10 for row in positions[:50])
    assert torch.equal(targets, text.take_along_dim(positions, 1))
    assert torch.equal(tokens.scatter(1, positions, targets), text)  # nothing else has changed
    shown = tokens.take_along_dim(positions, 1)
    masked, kept = shown == masked_bert.MASK, shown == targets
    assert masked.double().mean().item() == pytest.approx(0.8, abs=0.01)
    assert kept.double().mean().item() == pytest.approx(0.1 + 0.1 / 256, abs=0.01)
    assert shown[~masked & ~kept].unique().numel() > 250  # any byte


def test_most_words_have_no_gradient() -> None:
    task = TASKS["rare-words"]
    model = make(task)
    for rank in range(RANKS):
        task.loss(model, 0, 0, rank, RANKS).backward()
    gradient = model.get_parameter("embedding.weight").grad
    assert gradient is not None
    assert gradient.shape == (rare_words.VOCABULARY + 1, rare_words.EMBEDDED)
    touched = gradient.any(1)
    assert 100 < touched.sum() < len(touched) / 4
    assert touched[task.batch(0, 0)[0]].all()


def test_words_to_be_predicted_are_frequent_ones_and_follow_their_context() -> None:
    train, held_out = rare_words.texts()
    for text in (train, held_out):
        before, word = rare_words.examples(text.words, text.places[:1000])
        assert word.max() < rare_words.FREQUENT
        place = int(text.places[500])
        assert before[500].tolist() == text.words[place - 8 : place].tolist()
        assert word[500] == text.words[place]
    counts = train.words.bincount()
    assert len(counts) == rare_words.VOCABULARY + 1
    assert (counts[:-1].diff() <= 0).all()
