"""A release consumes the gradients of its round's examples once, whatever clears gradients, and however loops are left."""

import numpy as np
import torch
from central_runs import Run, refused


def test_a_batch_of_two_loops_is_no_batch_of_the_round(monkeypatch):
    run = Run(monkeypatch)
    one = next(iter(run.loader))
    other = next(iter(run.loader))
    with refused("rows"):
        run.step([torch.cat(parts) for parts in zip(one, other, strict=True)])
    assert run.sums == []


def test_a_loop_that_another_one_overtook_ends(monkeypatch):
    run = Run(monkeypatch)
    older = iter(run.loader)
    run.step(next(older))
    run.step(next(iter(run.loader)))
    with refused("another loop"):
        next(older)
    assert run.released == 2


def test_steps_are_skipped_in_the_order_in_which_that_was_said(monkeypatch):
    """A loop that says it ahead of its steps: the first adds to the round's sum only, and the second releases it."""
    run = Run(monkeypatch, batch=6)
    inputs, targets = next(iter(run.loader))
    run.optimizer.signal_skip_step(True)
    run.optimizer.signal_skip_step(False)
    run.step((inputs[:2], targets[:2]))
    assert run.sums == []
    run.step((inputs[2:], targets[2:]))
    assert run.released == len(run.sums) == 1


def test_a_batch_of_an_earlier_round_or_after_a_missing_part_is_not_handed_out(monkeypatch):
    """Whatever a loader of somebody's own asks for."""
    run = Run(monkeypatch)
    run.step(next(iter(run.loader)))
    rounds = run.engine.accountant.rounds
    loop, rows = rounds.enter(), np.arange(4)
    with refused("order"):
        rounds.issue(loop, 0, rows, 4)
    rounds.issue(loop, 1, rows, 4, (0, 3))
    with refused("missing part"):
        rounds.issue(loop, 1, rows, 4, (2, 3))
    with refused("no batch"):
        rounds.pending  # noqa: B018
