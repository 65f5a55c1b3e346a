"""A release consumes the gradients of its round's examples once, whatever clears gradients, and however loops are left."""

import numpy as np
import pytest
import torch
from central_runs import MODES, Run, refused
from opacus.utils.batch_memory_manager import BatchMemoryManager

from fedcgd.noise.keys import NoiseKey


def one_by_one(run, stop=None, clear=True):
    manager = BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=1, optimizer=run.optimizer)
    with manager as batches:
        for number, batch in enumerate(batches):
            if number == stop:
                return
            if clear:
                run.optimizer.zero_grad()
            run.backward(batch)
            run.optimizer.step()


@pytest.mark.parametrize("clear", ["module", "nothing", "model", "both"])
@pytest.mark.parametrize("mode", MODES)
def test_module_zero_grad_or_none_adds_no_earlier_round(mode, clear, monkeypatch):
    run = Run(monkeypatch, size=16, batch=1, epochs=1, mode=mode)
    for batch in run.loader:
        if clear in ("module", "both"):
            run.module.zero_grad()
        if clear == "both":
            run.optimizer.zero_grad()
        if clear == "model":
            run.model.zero_grad()
        run.backward(batch)
        run.optimizer.step()
    assert len(run.sums) == 16
    assert max(run.norms()) <= 1.0


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_a_batch_need_no_zero_grad_between_them(mode, monkeypatch):
    sums = []
    for clear in (True, False):
        run = Run(monkeypatch, size=4, batch=4, epochs=1, mode=mode)
        one_by_one(run, clear=clear)
        sums.append(run.sums[0])
    assert torch.equal(*sums)


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_loop_that_is_left_and_entered_again_starts_its_round_afresh(mode, stop, monkeypatch):
    """Three of four examples are in the sum; then the same cell of a notebook runs again."""
    run = Run(monkeypatch, size=4, batch=4, epochs=1, mode=mode)
    one_by_one(run, stop)
    assert run.sums == []
    one_by_one(run)
    straight = Run(monkeypatch, size=4, batch=4, epochs=1, mode=mode)
    one_by_one(straight)
    assert torch.equal(run.sums[0], straight.sums[0])
    assert run.released == 1


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_anywhere_leaves_nothing_behind(mode, where, monkeypatch):
    straight = Run(monkeypatch, mode=mode)
    straight.train()
    run = Run(monkeypatch, mode=mode)
    interrupted = []

    def interrupt(*_):
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt

    if where == "backward":
        run.model.register_full_backward_hook(interrupt)
    elif where == "forward":
        run.model.register_forward_hook(interrupt)
    else:
        source = run.engine.accountant.rounds.releases._noise._source
        add = source.add
        source.add = lambda *arguments: (interrupt(), add(*arguments))[1]
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.train()
    assert [torch.equal(a, b) for a, b in zip(run.sums[-3:], straight.sums, strict=True)] == [True] * 3


def test_two_loops_at_once_are_refused(monkeypatch):
    run = Run(monkeypatch)
    with refused("another loop"):
        list(zip(run.loader, run.loader, strict=True))
    assert run.sums == []
    run.train()  # and the next loop goes on
    assert run.released == 3


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


@pytest.mark.parametrize("mode", MODES)
def test_a_second_backward_pass_or_a_second_step_is_refused(mode, monkeypatch):
    run = Run(monkeypatch, mode=mode)
    batch = next(iter(run.loader))
    run.step(batch)
    with refused("no batch"):
        run.step(batch)
    assert len(run.sums) == 1
    batch = next(iter(run.loader))
    run.backward(batch)
    run.backward(batch)
    with refused("rows"):
        run.optimizer.step()
    assert len(run.sums) == 1


@pytest.mark.parametrize("physical", [None, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_part_of_a_batch_that_is_left_out_is_refused(mode, physical, monkeypatch):
    """A loop that skips what is not finite: the others' part in the sum would depend on that example."""
    run = Run(monkeypatch, mode=mode)
    manager = BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=physical or 9, optimizer=run.optimizer)

    def loop():
        with manager as batches:
            for number, batch in enumerate(batches):
                if physical is None:
                    run.step([part[1:] for part in batch])
                elif number != 0:
                    run.step(batch)

    with refused("rows", "order"):
        loop()
    assert run.sums == []


def test_a_step_of_the_wrapped_optimizer_is_refused(monkeypatch):
    """A cell that still holds the optimizer under its old name would move the model by raw gradients."""
    run = Run(monkeypatch)
    before = [p.clone() for p in run.model.parameters()]
    run.backward(next(iter(run.loader)))
    with refused("wrapped optimizer"):
        run.base.step()
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), before, strict=True))


def test_an_example_of_several_rows_is_refused(monkeypatch):
    """A model that makes one row of each token clips tokens, not examples."""

    class Flattened(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, inputs):
            return self.layer(inputs.reshape(-1, 3)).reshape(len(inputs), -1)

    run = Run(monkeypatch, model=Flattened())
    with refused("rows"):
        run.train()
    assert run.sums == []


def test_a_failed_step_releases_nothing_and_the_round_can_be_tried_again(monkeypatch):
    run = Run(monkeypatch, key=NoiseKey.generate())
    source = run.engine.accountant.rounds.releases._noise._source
    add, tried = source.add, []

    def failing(total, nonces, stddev):
        tried.append(nonces[-1])
        if len(tried) == 1:
            raise MemoryError
        add(total, nonces, stddev)

    source.add = failing
    with pytest.raises(MemoryError):
        run.train()
    assert run.released == 0
    run.train()
    assert run.released == 3
    assert len(set(tried)) == 4  # the second try of the round has noise of its own


def test_an_interrupted_step_ends_its_round(monkeypatch):
    """Half of the parts may be in the sum: the batch is not good for another try without the loader."""
    run = Run(monkeypatch)
    batch = next(iter(run.loader))
    run.backward(batch)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedcgd.opacus.clipped_sum.add_rows", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.optimizer.step()
    with refused("no batch"):
        run.step(batch)
    assert run.sums == []


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


def test_a_loop_over_the_sampler_hands_out_rounds_after_one_over_the_loader(monkeypatch):
    """The loader takes that over for loops of its own only."""
    run = Run(monkeypatch)
    run.train()
    next(iter(run.loader.batch_sampler))
    assert run.engine.accountant.rounds.pending.examples == 4
