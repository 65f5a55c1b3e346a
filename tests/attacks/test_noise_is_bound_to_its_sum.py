"""Noise of one (round, nonce) is used for one sum only, whatever is copied: memory, disk, and the source of random numbers.

Whoever gets two releases of different sums under one noise subtracts them, and has a user's clipped update.
"""

import os
import pickle
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from fake_grid import FakeGrid
from flower_runs import hosting
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg
from plans import make_plan
from shared import record

from fedcgd import LambdaCGD, NoiseKey, Participation
from fedcgd.noise import NoiseStream
from fedcgd.release import lattice_of
from fedcgd.release.run_noise import LatticeNormals, NoiseSource
from fedcgd_flower import CorrelatedNoise, sequential_training

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)  # from Python 3.12

SIZE = 40
KEY = NoiseKey(bytes(range(32)))
PLAN = make_plan(LambdaCGD(0.8), Participation(rounds=6, min_separation=1), clip_norm=0.5)
NOISE = PLAN.stddev


@pytest.fixture(params=["random numbers differ", "random numbers repeat"])
def snapshot(request, monkeypatch):
    """A virtual machine that is resumed twice may have the same random numbers both times."""
    if request.param == "random numbers repeat":
        monkeypatch.setattr(os, "urandom", lambda count: bytes(count))
    return request.param


def in_two_copies(work: Callable[[bool], np.ndarray]) -> list[np.ndarray]:
    """What `work` gives in this process, and in a copy of all of its memory; it is told which one it runs in."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(work(True), pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        copy = pickle.load(pipe)
    os.waitpid(child, 0)
    return [work(False), copy]


def assert_tells_nothing(released: Sequence[np.ndarray], difference: np.ndarray) -> None:
    """Two releases whose sums differ by `difference` still differ by noise of the size of two fresh ones."""
    left = released[0] - released[1] - difference
    assert np.abs(left).std() > 0.3 * NOISE


def training(model, user, config, context):
    update = np.zeros(SIZE, np.float32)
    update[int(user)] = 10.0
    return record(model["w"].numpy() + update)


def test_a_server_that_is_resumed_twice_in_mid_round(snapshot) -> None:
    grid = FakeGrid({i + 1: hosting([str(i)], sequential_training(training)) for i in range(4)})
    initial = record(np.zeros(SIZE))
    with CorrelatedNoise(FedAvg(), PLAN, key=KEY, cohort_size=4, patience=0.0) as strategy:
        messages = strategy.configure_train(1, initial, ConfigRecord(), grid)
        replies = list(grid.send_and_receive(messages))

        def resumed(copy: bool) -> np.ndarray:
            arrays, _ = strategy.aggregate_train(1, replies[: 3 if copy else 4])
            return 4 * arrays["w"].numpy().astype(np.float64)

        released = in_two_copies(resumed)
    missing = np.zeros(SIZE)
    missing[int(messages[3].content["fedcgd"]["users"][0])] = 0.5
    assert_tells_nothing(released, missing)


def test_equal_sums_after_different_rounds_have_different_noise(snapshot) -> None:
    """Two copies that released other sums in round 0, and the same one (of nobody, say) in round 1: if round 1 had one noise,
    the difference of its releases would be that of round 0's noise, which unmasks round 0.
    """
    grid = lattice_of(PLAN, SIZE)
    rng = np.random.default_rng(2)
    first = [grid.to_steps(rng.uniform(-0.1, 0.1, SIZE)) for _ in range(2)]
    released, sums = [], [x.copy() for x in first]
    for total in first:
        source = NoiseSource(PLAN.mechanism, 6, LatticeNormals(NoiseStream(KEY.noise), grid))
        nonces, out = [], []
        for x in (total, np.zeros(SIZE, np.int64)):
            nonces.append(KEY.nonce_of("", x, earlier=nonces, attempt=0))
            source.add(x, nonces, PLAN.stddev)
            out.append(grid.from_steps(x))
        released.append(out)
    unmasked = (released[0][0] - released[1][0]) + (released[0][1] - released[1][1]) / 0.8
    assert_tells_nothing([unmasked, np.zeros(SIZE)], grid.from_steps(sums[0] - sums[1]))
