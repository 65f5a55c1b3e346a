"""One table of mechanisms: a row is all that a new one needs, and every place that names mechanisms reads it."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from command_line import figures, run
from mechanism_table import MECHANISMS

import fedcgd
from fedcgd import Participation, Plan
from fedcgd.mechanisms import Toeplitz
from fedcgd.optimisation import catalogue
from fedcgd.optimisation.table import TABLE, Parameter, Row

RUN = Participation(rounds=12, min_separation=4)
WORDS = ("--rounds", "12", "--separation", "4", "--epsilon", "2", "--delta", "1e-5")


@dataclass(frozen=True)
class Echo(Toeplitz):
    """All that a new mechanism of one number is, but for its row."""

    strength: float

    name = "echo"

    def coefficients(self, rounds: int) -> np.ndarray:
        return np.array([1.0, self.strength] + [0.0] * rounds)[:rounds]

    def inverse_coefficients(self, rounds: int) -> np.ndarray:
        return (-self.strength) ** np.arange(rounds)


def planned(text: str) -> Plan:
    return Plan.calibrated(text, RUN, clip_norm=1.0, epsilon=2, delta=1e-5)


def test_a_file_and_a_row_make_a_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    strength = Parameter("s", "how loud", float, lambda mechanism: mechanism.strength, least=lambda _: 1e-3)
    monkeypatch.setitem(TABLE, "echo", Row("echo", Echo, "a toy", (strength,)))
    plan = planned("echo:0.5")
    assert plan.to_description()["mechanism"] == {"name": "echo", "strength": 0.5}
    assert Plan.from_description(json.loads(json.dumps(plan.to_description()))) == plan
    assert figures("account", "--mechanism", "echo:0.5", *WORDS)["noise_multiplier"] == plan.noise_multiplier
    [row] = figures("compare", "--mechanism", "echo:0.5:normalized", *WORDS)["mechanisms"]
    assert row["mechanism"] == "echo"
    assert row["parameters"] == {"strength": 0.5, "normalize": True}
    for text in ("echo", "echo:0.5:normalized"):
        assert planned(catalogue.spelling_of(planned(text).mechanism)) == planned(text)


def test_help_lists_every_row() -> None:
    shown = run("compare", "--help").stdout
    assert [row.name for row in TABLE.values() if f"{row.spelling} — {row.help}" not in shown] == []


def test_the_docs_name_every_mechanism_as_it_is_spelled() -> None:
    page = (Path(__file__).parents[2] / "docs" / "mechanisms.md").read_text()
    assert [row.spelling for row in TABLE.values() if f"`{row.spelling}`" not in page] == []


def test_every_row_is_in_the_table_that_tests_of_all_mechanisms_take() -> None:
    classes = {row.cls for row in TABLE.values()}
    assert classes - {type(mechanism) for mechanism in MECHANISMS} == set()
    assert {cls.__name__ for cls in classes} <= set(fedcgd.__all__), "export them from fedcgd/__init__.py"


@pytest.mark.parametrize("spelling", ["bisr:13", "bsr:100:normalized", "bifr:13:0.5"])
def test_more_bands_than_rounds_are_refused_where_a_mechanism_is_spelled(spelling: str) -> None:
    with pytest.raises(ValueError, match="write 12"):
        catalogue.mechanism(spelling, RUN)
