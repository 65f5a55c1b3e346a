"""Gradients accumulated over batches are one clipped sum, released once: no part is left out, and none counts twice."""

import pytest
import torch
from central_runs import MODES, Run, refused

PARTS = 3


def run(monkeypatch, **options):
    """Two rounds an epoch of 6 examples each, in three parts of 2."""
    return Run(monkeypatch, **{"size": 12, "batch": 2, "accumulation": PARTS} | options)


def whole(monkeypatch, **options):
    """The same rounds, each in one part."""
    return Run(monkeypatch, size=12, batch=6, **options)


def every_part(run):
    """A step after every part, as with BatchMemoryManager."""
    for batch in run.loader:
        run.step(batch)


def only_the_last(run):
    """Backward passes add up, and one step follows, as programs without BatchMemoryManager do it."""
    for i, batch in enumerate(run.loader):
        run.backward(batch)
        if (i + 1) % PARTS == 0:
            run.optimizer.step()
            run.optimizer.zero_grad()


def zero_first(run):
    """As some programs have it: zero_grad at the top of the loop, and a step after the last part."""
    for i, batch in enumerate(run.loader):
        run.optimizer.zero_grad()
        run.backward(batch)
        if (i + 1) % PARTS == 0:
            run.optimizer.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", [every_part, only_the_last, zero_first])
def test_the_sums_are_those_of_whole_batches(loop, mode, monkeypatch):
    expected = whole(monkeypatch, mode=mode)
    for _ in range(2):
        expected.train()
    accumulated = run(monkeypatch, mode=mode)
    for _ in range(2):
        loop(accumulated)
    assert accumulated.released == expected.released == 4
    assert len(accumulated.sums) == len(expected.sums) == 4
    for one, other in zip(accumulated.sums, expected.sums, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)
    assert max(accumulated.norms()) <= 6
    for mine, its in zip(accumulated.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-4)


@pytest.mark.parametrize("uses", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (2, 1, 1), (1, 1, 2)])
def test_a_part_that_is_left_out_or_used_twice_stops_the_round(uses, monkeypatch):
    accumulated = run(monkeypatch)

    def loop():
        for i, batch in enumerate(accumulated.loader):
            for _ in range(uses[i % PARTS]):
                accumulated.backward(batch)
            if i % PARTS == PARTS - 1:
                accumulated.optimizer.step()

    with refused("rows", "no gradients"):
        loop()
    assert (accumulated.released, accumulated.sums) == (0, [])
