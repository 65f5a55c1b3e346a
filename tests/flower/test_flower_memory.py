"""A round's large memory: asked for once, given back before the inner strategy needs it, and seen by nobody else."""

import gc
import weakref

import numpy as np
import pytest
from flower_runs import SIZE, make, two_nodes
from flwr.serverapp.strategy import FedAvg
from shared import record

from fedcgd.release import RecordedReleases
from fedcgd_flower import AdaptiveClipping, training_rounds
from fedcgd_flower.run_loop import RunLoop


@pytest.mark.parametrize("adaptive", [None, AdaptiveClipping(count_noise=1.0)])
def test_the_sum_of_every_round_lies_in_the_same_memory(adaptive, monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory for each round cost a third of its time at first, where the kernel had to put large pages together."""
    totals, sums = [], []  # the totals themselves, so that no other can take a place that became free
    add_noise = RecordedReleases.add_noise

    def adding(self, total, *args):
        totals.append(total)
        sums.append(total.copy())
        add_noise(self, total, *args)

    monkeypatch.setattr(RecordedReleases, "add_noise", adding)
    make(adaptive_clipping=adaptive).start(two_nodes(), record(np.zeros(SIZE)))
    assert len(totals) == 6
    assert all(np.shares_memory(total, totals[0]) for total in totals)
    if (
        adaptive is None
    ):  # every user moves by as much in each round, and nothing of the round before is left in the sum
        assert sums[0].any()
        for total in sums:
            np.testing.assert_array_equal(total, sums[0])


def test_replies_are_gone_before_the_inner_strategy_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten models of 40 MB lay there while the inner strategy made its own."""
    seen: list[weakref.ref] = []
    alive: list[int] = []
    receive, step = RunLoop.run.__globals__["send_and_receive"], training_rounds.inner_step

    def receiving(*args):
        replies = receive(*args)
        seen.extend(weakref.ref(reply) for reply in replies)
        return replies

    def stepping(*args):
        gc.collect()
        alive.append(sum(reference() is not None for reference in seen))
        return step(*args)

    monkeypatch.setitem(RunLoop.run.__globals__, "send_and_receive", receiving)
    monkeypatch.setattr(training_rounds, "inner_step", stepping)
    grid = two_nodes()
    make().start(grid, record(np.zeros(SIZE)))
    assert len(seen) >= 6
    assert alive == [0] * 6


def test_what_an_inner_strategy_keeps_of_a_round_stays_as_it_was() -> None:
    class Keeps(FedAvg):
        kept: list = []  # noqa: RUF012
        as_it_was: list = []  # noqa: RUF012

        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            arrays = replies[0].content["arrays"]
            self.kept.append(arrays)
            self.as_it_was.append(arrays["w"].numpy().copy())
            return super().aggregate_train(server_round, replies)

    result = make(Keeps()).start(two_nodes(), record(np.zeros(SIZE)))
    assert len(Keeps.kept) == 6
    for arrays, before in zip(Keeps.kept, Keeps.as_it_was, strict=True):
        np.testing.assert_array_equal(arrays["w"].numpy(), before)
    np.testing.assert_array_equal(result.arrays["w"].numpy(), Keeps.as_it_was[-1])  # FedAvg of one reply
