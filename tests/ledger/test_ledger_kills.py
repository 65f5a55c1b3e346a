"""kill -9 at random moments of a run on the ledger: nothing released is lost, and no noise is used for two releases."""

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import ledger_worker as worker
import numpy as np
import pytest

from fedcgd.ledger import Ledger, export, verify
from fedcgd.noise import NoiseStream
from fedcgd.noise.keys import NoiseKey
from fedcgd.release import lattice_of

KILLS = 100


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, worker.__file__, str(folder), str(KILLS), "12345"],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.split() == [str(KILLS), "0"]
    return folder


@pytest.fixture(scope="module")
def world(killed_run):
    """(asked, released): what left the process, in order, a line that a kill cut short left out."""
    lines = [line.split(" ") for line in (killed_run / "world").read_text().splitlines()]
    asked = [(int(line[1]), int(line[2]), line[3:]) for line in lines if line[0] == "asked"]
    released = [(int(line[1]), int(line[2]), line[3]) for line in lines if line[0] == "released"]
    return asked, released


def test_the_kills_hit_rounds_in_every_state(killed_run):
    attempts = export(killed_run / "ledger")["attempts"]
    abandoned = [attempt for attempt in attempts if attempt["state"] == "abandoned"]
    assert len(abandoned) > KILLS / 10
    assert any(attempt["aggregated"] for attempt in abandoned), "no kill came between the sum and the release"
    assert len(attempts) == worker.ROUNDS + len(abandoned)


def test_every_round_is_released_once_and_its_noise_used_once(killed_run, world):
    _, released = world
    on_record = [
        (attempt["round"], attempt["attempt"])
        for attempt in export(killed_run / "ledger")["attempts"]
        if attempt["state"] == "released"
    ]
    assert [round for round, _ in on_record] == list(range(worker.ROUNDS))
    seen = [(round, attempt) for round, attempt, _ in released]
    assert len(set(seen)) == len(seen), "two releases under one noise"
    assert set(seen) <= set(on_record), "something left the process that is not on record"
    assert max(Counter(round for round, _ in seen).values()) == 1


def test_the_records_verify_and_epsilon_is_that_of_a_run_without_kills(killed_run, tmp_path):
    worker.train(tmp_path, lambda: None)
    calm, killed = verify(tmp_path / "ledger"), verify(killed_run / "ledger")
    assert killed.problems == calm.problems == ()
    assert killed.released == calm.released == worker.ROUNDS
    assert killed.guarantee.epsilon == calm.guarantee.epsilon > 0


def test_the_model_is_what_the_releases_on_record_give(killed_run, world):
    """Later rounds cancel the noise that was really released, the inner state is never lost, and no release is missing."""
    asked, released = world
    users = {(round, attempt): who for round, attempt, who in asked}
    key = NoiseKey.from_file(killed_run / "key")
    with Ledger.open(killed_run / "ledger", plan=worker.PLAN, configuration=worker.CONFIGURATION, key=key) as ledger:
        run = ledger.resume()
        stream = NoiseStream(key.noise_of(ledger.stream_id))
    z = [stream.normal(t, nonce, 0, worker.SIZE).astype(float) for t, nonce in enumerate(run.nonces)]
    smoothing = [stream.derive("smoothing").words(t, nonce, 0, worker.SIZE) for t, nonce in enumerate(run.nonces)]
    attempts = [
        (a["round"], a["attempt"]) for a in export(killed_run / "ledger")["attempts"] if a["state"] == "released"
    ]
    grid = lattice_of(worker.PLAN, worker.SIZE)
    few_steps = 12 * grid.step  # where the float32 Z of `normal` falls on the other side of a step

    def rounded(noise):
        return grid.step * np.rint(noise / grid.step)

    model = momentum = np.zeros(worker.SIZE)
    models = []
    for t, attempt in attempts:
        noise = rounded(3.0 * ((z[t] - 0.9 * z[t - 1] if t else z[0]) + smoothing[t] / 2**39))
        momentum = 0.5 * momentum + grid.from_steps(grid.to_steps(worker.summed(t, users[t, attempt]))) + noise
        model = model + momentum
        models.append(model)
    np.testing.assert_allclose(np.frombuffer(run.model), model, rtol=0, atol=few_steps)
    np.testing.assert_allclose(np.frombuffer(run.state), momentum, rtol=0, atol=few_steps)
    for round, _, bits in released:
        np.testing.assert_allclose(np.frombuffer(bytes.fromhex(bits)), models[round], rtol=0, atol=few_steps)


def test_whoever_was_asked_is_on_record(killed_run, world):
    asked, _ = world
    key = NoiseKey.from_file(killed_run / "key")
    with Ledger.open(killed_run / "ledger", plan=worker.PLAN, configuration=worker.CONFIGURATION, key=key) as ledger:
        history = ledger.history(worker.USERS)
    rounds_of = {user: {round for round, _, who in asked if user in who} for user in worker.USERS}
    for user, rounds in rounds_of.items():
        assert history.counts[user] >= len(rounds)  # a kill may come between the record and the asking
        ordered = sorted(rounds)
        assert all(later - earlier >= 4 for earlier, later in pairwise(ordered))
