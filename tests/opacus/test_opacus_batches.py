"""What the loader gives: empty batches of every kind of example, and the copies of an example."""

from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from central_runs import Run, examples, private
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, default_collate

Pair = namedtuple("Pair", ["inputs", "target"])


def numbers(i):
    return torch.full((6,), float(i)), i % 3


def padded(rows):
    return UserDict(
        texts=[text for text, _ in rows],
        lengths=np.array([len(text) for text, _ in rows]),
        targets=torch.tensor([target for _, target in rows]),
    )


def second(rows):
    return torch.stack([torch.stack([x, x]) for x, _ in rows], 1), torch.tensor([[y, y] for _, y in rows]).T


KINDS = {
    "tuples": (numbers, None, lambda batch: (batch[0].shape, batch[1].shape), ((0, 6), (0,))),
    "texts": (lambda i: ("ab" * i, i % 3), None, lambda batch: (list(batch[0]), len(batch[1])), ([], 0)),
    "named tuples": (lambda i: Pair(*numbers(i)), None, lambda batch: (batch.inputs.shape, len(batch.target)), ((0, 6), 0)),
    "rows of NumPy": (lambda i: np.arange(6.0) + i, None, lambda batch: (batch.shape, batch.dtype), ((0, 6), torch.float64)),
    "nested tuples": (
        lambda i: ((torch.ones(6), {"a": torch.ones(2, 3)}), i % 3), None,
        lambda batch: (batch[0][0].shape, batch[0][1]["a"].shape, len(batch[1])), ((0, 6), (0, 2, 3), 0),
    ),
    "numbers": (float, None, len, 0),
    "mappings of its own": (
        lambda i: ("ab" * i, i % 3), padded,
        lambda batch: (type(batch), batch["texts"], batch["lengths"].shape, batch["targets"].shape), (UserDict, [], (0,), (0,)),
    ),
    "examples as they are": (numbers, list, lambda batch: batch, []),
    "examples second": (numbers, second, lambda batch: (batch[0].shape, batch[1].shape), ((2, 0, 6), (2, 0))),
}  # fmt: skip


class Made(Dataset):
    def __init__(self, make, size=8):
        self.make, self.size = make, size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return self.make(i)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_is_one_example_cut_to_nothing(kind):
    """Of Poisson batches of one example on average some are empty; they have the types, names and shapes of the others."""
    make, collate, shape, expected = KINDS[kind]
    model = nn.Linear(6, 3)
    loader = DataLoader(Made(make), batch_size=1, collate_fn=collate)
    _, optimizer, loader = private(model, loader, batch_first=kind != "examples second", sampling="poisson", epochs=4)
    empty = 0
    sampler = loader.batch_sampler
    for epoch in range(4):
        rounds = range(8 * epoch, 8 * epoch + 8)
        for round, batch in zip(rounds, loader, strict=True):
            picked = sampler.rows(round).tolist()
            if not picked:
                empty += 1
                assert shape(batch) == expected
                optimizer.step()  # a round of no examples is a round
            else:
                whole = (collate or default_collate)([make(i) for i in picked])
                assert type(batch) is type(whole)
                for p in model.parameters():
                    p.grad_sample = torch.zeros(len(picked), *p.shape)  # gradients of the examples, all zero
                optimizer._rounds.pending.called = True
                optimizer.step()
    assert empty > 3


class Noisy(Dataset):
    """Images with a number of their own, which a transformation moves by less than one, at random."""

    def __init__(self, size=8):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return i + torch.rand(6), i % 3


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_the_copies_of_an_example_one_after_the_other(workers):
    loader = DataLoader(Noisy(), batch_size=4, num_workers=workers)
    module, optimizer, loader = private(nn.Linear(6, 3), loader, augmentation_multiplicity=3)
    for round, (inputs, targets) in enumerate(loader):
        picked = torch.from_numpy(loader.batch_sampler.rows(round)).repeat_interleave(3)
        assert inputs.floor()[:, 0].tolist() == picked.tolist()
        assert targets.tolist() == (picked % 3).tolist()
        assert len(set(inputs[:, 0].tolist())) == 12  # each copy is drawn anew
        functional.cross_entropy(module(inputs), targets).backward()
        optimizer.step()


def tiled(inputs, targets, copies):
    return torch.cat([inputs + 0.01 * torch.randn_like(inputs) for _ in range(copies)]), targets.repeat(copies)


def interleaved(inputs, targets, copies):
    return inputs.repeat_interleave(copies, 0), targets.repeat_interleave(copies)


@pytest.mark.parametrize("arranged", [tiled, interleaved])
@pytest.mark.parametrize("copies", [2, 4, 8])
def test_copies_cannot_be_arranged_by_the_loop(arranged, copies, monkeypatch):
    """In the order of torch.cat each mean would be of several examples, and the sum would move by up to `copies` times ζ."""
    run = Run(monkeypatch, data=examples(16), batch=16, augmentation_multiplicity=copies)
    inputs, targets = next(iter(run.loader))
    with pytest.raises(RuntimeError, match="gradients of"):
        run.step(arranged(inputs, targets, copies))
    assert not run.sums


@pytest.mark.parametrize("listed", [1, 3])
def test_a_list_of_other_copies_is_refused(listed, monkeypatch):
    data = [[numbers(i)] * listed for i in range(8)]
    run = Run(monkeypatch, data=data, augmentation_multiplicity=2)
    with pytest.raises(ValueError, match="an example"):
        next(iter(run.loader))
