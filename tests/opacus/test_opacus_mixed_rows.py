"""Mixup in the training loop is refused in the first step; what a program does to each example by itself is not."""

import pytest
import torch
from central_runs import Run
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedcgd.opacus import CrossExampleLeakError
from fedcgd.opacus.first_batches import rows_are_mixed

SIZE = (3, 8, 8)


def images(count, *, sparse=False):
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(count, *SIZE, generator=generator)
    return x * (x > 0.7) if sparse else x


def mixup(x, lam=0.7):
    return lam * x + (1 - lam) * x[torch.arange(len(x)).roll(1)]


def noisy(x):
    return x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))


def erased(x):
    return torch.cat([torch.zeros_like(x[..., :4]), x[..., 4:]], -1)


BY_ITSELF = {
    "nothing": lambda x: x,
    "a copy": lambda x: x.double().float(),
    "normalised by channel": lambda x: (x - torch.tensor([0.4, 0.5, 0.6])[:, None, None]) / 0.2,
    "normalised": lambda x: (x - 0.5) / 0.5,
    "scaled, each by itself": lambda x: x / x.amax((1, 2, 3), keepdim=True),
    "each less its mean": lambda x: x - x.mean((1, 2, 3), keepdim=True),
    "noise": noisy,
    "flipped": lambda x: x.flip(-1),
    "erased": erased,
    "mixed with itself": lambda x: 0.7 * x + 0.3 * x.flip(-1),
    "sorted": lambda x: x[torch.argsort(x.sum((1, 2, 3)))],
}


def run_with(change, monkeypatch, data=None, **options):
    data = TensorDataset(images(12), torch.arange(12) % 3) if data is None else data
    run = Run(monkeypatch, data=data, model=nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), **options)

    def step(batch):
        functional.cross_entropy(run.module(change(batch[0])), batch[1]).backward()
        run.optimizer.step()

    return run, step


def test_mixup_in_the_loop_is_refused_before_anything_is_released(monkeypatch):
    run, step = run_with(mixup, monkeypatch)
    with pytest.raises(CrossExampleLeakError, match="mixture of"):
        run.train(step)
    assert run.released == 0


def test_mixup_that_somebody_answers_for_is_a_warning(monkeypatch):
    run, step = run_with(mixup, monkeypatch, assume_independent="ε is for twice the clip norm")
    with pytest.warns(UserWarning, match="assumed to"):
        run.train(step)


@pytest.mark.parametrize("change", BY_ITSELF.values(), ids=BY_ITSELF)
def test_what_is_done_to_each_example_by_itself_trains(change, monkeypatch):
    run, step = run_with(change, monkeypatch)
    run.train(step)
    assert run.released == 3


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("count", [2, 3, 16, 60])
@pytest.mark.parametrize("name", BY_ITSELF)
def test_no_false_alarm(name, count, sparse):
    x = images(count, sparse=sparse)
    assert not rows_are_mixed((BY_ITSELF[name](x),), (x, torch.arange(count)))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("lam", [0.01, 0.3, 0.99])
@pytest.mark.parametrize("count", [2, 3, 16, 60])
def test_mixtures_are_seen(count, lam, sparse):
    x = images(count, sparse=sparse)
    for partner in (x.flip(0), x[torch.randperm(count, generator=torch.Generator().manual_seed(count))], x.roll(1, 0)):
        pairs = sum(not torch.equal(*pair) for pair in zip(x, partner, strict=True))
        assert rows_are_mixed((lam * x + (1 - lam) * partner,), (x,)) == (2 * pairs > count)


def test_rows_that_tell_nothing_are_not_refused():
    x = images(4)
    x[3] = x[0] + x[1]
    constant = torch.cat([x[:3], torch.ones(1, *SIZE)])
    few = torch.rand(8, 4)
    assert not rows_are_mixed((mixup(x),), (x,))
    for kept in (constant, constant[1:], constant[2:]):
        assert not rows_are_mixed((kept - 0.5,), (kept,))
    assert not rows_are_mixed((mixup(few),), (few,))
    assert not rows_are_mixed((torch.zeros(4, *SIZE),), (torch.zeros(4, *SIZE),))
    assert not rows_are_mixed((images(4).round().long(),), (images(4),))
