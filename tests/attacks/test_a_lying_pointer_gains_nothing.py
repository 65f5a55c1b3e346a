"""A server that lies to keepers about what to cancel, or to anybody about which keepers are there."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flower_runs import names
from keeper_runs import RealKeepers, node
from oracles_accounting import worst_squared_mu
from shared import record

from fedcgd import LambdaCGD, Participation, sensitivity
from fedcgd.keepers import Keeper
from fedcgd.keepers.record import read, record_file
from fedcgd_flower.keepers.openings import Openings

ROUNDS, SIZE = 12, 20_000
MECHANISM, PARTICIPATION = LambdaCGD(0.9), Participation(rounds=ROUNDS, min_separation=6)
TERMS = {"mechanism": MECHANISM, "participation": PARTICIPATION, "cohort_size": 2}

_honest = Openings._requests


def lying_about_what_to_cancel(monkeypatch, pointer) -> None:
    """Keeper `name` is told in round t to cancel the share of `pointer(name, t)`."""

    def requests(self, masking, round, attempt, members):
        honest = _honest(self, masking, round, attempt, members)
        return {name: replace(asked, after=pointer(name, round)) for name, asked in honest.items()}

    monkeypatch.setattr(Openings, "_requests", requests)


def noise_seen(real: RealKeepers, monkeypatch, *, stolen: int) -> np.ndarray:
    """Each round's noise less the shares of keepers whose keys are stolen, for unit standard deviation of a planned round."""
    sums: list[np.ndarray] = []
    opened = Openings.add_noise

    def keeping(self, total, releases, attempt, masking, grid):
        noised, round = opened(self, total, releases, attempt, masking, grid), releases.count
        seen = noised.copy()
        for path in real.files[:stolen]:
            with Keeper.open(path, real.keepers) as keeper:
                share = np.zeros_like(seen)
                keeper._add_share(share, masking.agreement, read(record_file(path)).openings[round])
                seen -= share
        sums.append(seen * masking.agreement.step / masking.agreement.plan.stddev)
        return noised

    monkeypatch.setattr(Openings, "add_noise", keeping)
    grid = real.grid()
    for number in (1, 2):  # users whose updates are zeros, so that sums are noise alone
        grid.nodes[number] = node(names(12)[number - 1 :: 2], real.keepers, amount=0.0)
    assert real.make(**TERMS).start(grid, record(np.zeros(SIZE))).complete
    return np.array(sums)


def honest(name: str, round: int) -> int | None:
    return round - 1 if round else None


def two_histories(name: str, round: int) -> int | None:
    """The worst of small cases for cancelling late with λ itself, μ² 1.16 times the planned one."""
    return {0: None, 1: None, 6: 0}.get(round, round - 1)


def nothing(name: str, round: int) -> int | None:
    return None


def anything(name: str, round: int) -> int | None:
    generator = np.random.default_rng([round, int(name[1:])])
    return None if round == 0 else [None, *range(round)][generator.integers(round + 1)]


@pytest.mark.parametrize("pointer", [honest, two_histories, nothing, anything])
def test_whatever_a_server_lets_keepers_cancel_the_user_is_as_private_as_planned(
    pointer, tmp_path: Path, monkeypatch
) -> None:
    """μ of the noise that was released, with the keys of t = 1 keepers: measured, so 3 % above the plan's are chance."""
    lying_about_what_to_cancel(monkeypatch, pointer)
    seen = noise_seen(RealKeepers(tmp_path), monkeypatch, stolen=1)
    found = worst_squared_mu(seen @ seen.T / SIZE, PARTICIPATION, np.random.default_rng(0))
    planned = sensitivity(MECHANISM, PARTICIPATION).value ** 2
    assert found <= 1.03 * planned
    assert pointer is not honest or found >= 0.97 * planned  # the measure is not blind


def test_with_more_keys_than_planned_the_measure_sees_it(tmp_path: Path, monkeypatch) -> None:
    seen = noise_seen(RealKeepers(tmp_path), monkeypatch, stolen=2)
    found = worst_squared_mu(seen @ seen.T / SIZE, PARTICIPATION, np.random.default_rng(0))
    assert found == pytest.approx(2 * sensitivity(MECHANISM, PARTICIPATION).value ** 2, rel=0.03)
