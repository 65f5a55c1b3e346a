"""Each sampling from the promise to the ledger, a node, a batch of Opacus and the words about it: one row of a table."""

from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from app_runs import DEFAULTS
from command_line import figures
from flower_runs import KEY, SIZE, asked_users, make, names, two_nodes
from plans import make_plan
from sampling_table import ROUNDS, SAMPLINGS, played
from shared import record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedcgd import DPSGD, Participation, Plan, compute_epsilon
from fedcgd.ledger import export, verify
from fedcgd.opacus import CorrelatedPrivacyEngine
from fedcgd.participation import SAMPLINGS as PARTICIPATION_SAMPLINGS
from fedcgd_simulations.settings import Settings

pytestmark = pytest.mark.usefixtures("few_draws_everywhere")
USERS, COHORT = names(24), 8
DOCS = Path(__file__).resolve().parents[2] / "docs"

each_sampling = pytest.mark.parametrize("sampling", SAMPLINGS)


def plan_of(participation: Participation) -> Plan:
    return make_plan(DPSGD(), participation, delta=1e-2)


def check_turns(participation: Participation, cohorts: list[list[str]]) -> None:
    """Nobody exceeds what is promised, and somebody takes part."""
    assert any(cohorts)
    for user in {user for users in cohorts for user in users}:
        rounds = [t for t, users in enumerate(cohorts) if user in users]
        assert len(rounds) <= participation.participations
        assert all(later - earlier >= participation.min_separation for earlier, later in pairwise(rounds))


def test_the_table_has_each_sampling() -> None:
    assert SAMPLINGS.keys() == PARTICIPATION_SAMPLINGS.keys(), "add a row to tests/helpers/sampling_table.py"
    assert [name for name, (participation, _) in SAMPLINGS.items() if participation.sampling != name] == []


@each_sampling
def test_nodes_are_asked_for_whoever_is_drawn_and_the_ledger_counts_them(sampling: str, tmp_path: Path) -> None:
    participation, _ = SAMPLINGS[sampling]
    grid = two_nodes(len(USERS))
    path = tmp_path / "run.db"
    strategy = make(mechanism=DPSGD(), participation=participation, delta=1e-2, cohort_size=COHORT, ledger=path)
    strategy.start(grid, record(np.zeros(SIZE)))
    expected = played(participation, USERS, COHORT, key=KEY.choices_of(export(path)["run"]["stream_id"]))
    check_turns(participation, expected)
    assert asked_users(grid) == [users for users in expected if users]
    turns = Counter(Counter(chain(*expected)).values())
    assert export(path)["users_by_participations"] == turns
    assert verify(path).problems == ()


@each_sampling
def test_batches_of_opacus_are_what_is_promised(sampling: str) -> None:
    participation, _ = SAMPLINGS[sampling]
    model = nn.Linear(2, 2)
    data = TensorDataset(torch.zeros(24, 2), torch.zeros(24, dtype=torch.long))

    def batches(steps: int) -> list[list[str]]:
        *_, loader = CorrelatedPrivacyEngine(KEY).make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(data, batch_size=24 // steps),
            plan=plan_of(participation),
        )
        return [list(map(str, loader.batch_sampler.rows(t))) for t in range(ROUNDS)]

    steps = round(1 / (participation.expected_rate or 1 / participation.min_separation))
    check_turns(participation, batches(steps))
    with pytest.raises(ValueError, match="the plan"):
        batches(steps - 1)


@each_sampling
def test_the_command_line_asks_for_it(sampling: str) -> None:
    participation, words = SAMPLINGS[sampling]
    found = figures(
        *["account", "--mechanism", "dp-sgd", "--rounds", str(ROUNDS), "--sampling", sampling, *words],
        *["--noise-multiplier", "2", "--delta", "1e-2"],
    )
    expected = compute_epsilon(DPSGD(), participation, noise_multiplier=2.0, delta=1e-2)
    assert (found["sampling"], found["epsilon"]) == (sampling, expected.epsilon)
    known = Participation(rounds=ROUNDS, min_separation=participation.min_separation)
    assert found["epsilon"] <= compute_epsilon(DPSGD(), known, noise_multiplier=2.0, delta=1e-2).epsilon


@each_sampling
def test_the_simulations_plan_it(sampling: str) -> None:
    found = Settings.read(DEFAULTS | {"sampling": sampling, "mechanism": "dp-sgd"}).participation(1260)
    assert found.sampling == sampling
    assert found.expected_rate is None or found.expected_rate == pytest.approx(DEFAULTS["cohort"] / 1260)


def test_the_docs_name_it() -> None:
    """Who knows the rounds, for which C, and what ε says of a user who is not there: a row of two tables each."""
    text = (DOCS / "accounting.md").read_text(encoding="utf-8")
    assert {name: text.count(f"\n| `{name}` |") for name in SAMPLINGS} == dict.fromkeys(SAMPLINGS, 2)
