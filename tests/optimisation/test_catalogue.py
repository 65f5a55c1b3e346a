"""One table of mechanisms: a row is all that a new one needs, and every place that names mechanisms reads it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run
from mechanism_table import MECHANISMS

import fedcgd
from fedcgd.optimisation import catalogue
from fedcgd.optimisation.catalogue import TABLE
from fedcgd.participation import Participation

TOY = """
from dataclasses import dataclass
import numpy as np
from fedcgd.mechanisms.toeplitz import Toeplitz
from fedcgd.optimisation.catalogue import TABLE, Parameter, Row, spelling_of

@dataclass(frozen=True)
class Echo(Toeplitz):
    strength: float

    name = "echo"

    def coefficients(self, rounds):
        return np.array([1.0, self.strength] + [0.0] * rounds)[:rounds]

    def inverse_coefficients(self, rounds):
        return (-self.strength) ** np.arange(rounds)

TABLE["echo"] = Row("echo", Echo, "a toy", (Parameter("s", "how loud", float, lambda m: m.strength, least=lambda _: 1e-3),))

import json, sys
from click.testing import CliRunner
from fedcgd.cli import app
from fedcgd.mechanisms import BISR
from fedcgd.participation import Participation
from fedcgd.plan import Plan

run = lambda *words: CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "TERM": "dumb"})
run_words = ["--rounds", "12", "--separation", "4", "--epsilon", "2", "--delta", "1e-5"]
calibrated = lambda text: Plan.calibrated(text, Participation(rounds=12, min_separation=4), clip_norm=1.0, epsilon=2, delta=1e-5)
plan = calibrated("echo:0.5")
print(json.dumps({
    "compare help": run("compare", "--help").stdout,
    "account help": run("account", "--help").stdout,
    "compare": json.loads(run("compare", "--mechanism", "echo:0.5:normalized", *run_words, "--json").stdout),
    "account": json.loads(run("account", "--mechanism", "echo:0.5", *run_words, "--json").stdout),
    "description": plan.to_description()["mechanism"],
    "round trip": Plan.from_description(json.loads(json.dumps(plan.to_description()))) == plan,
    "sigma": plan.noise_multiplier,
    "respelled": [
        calibrated(spelling_of(calibrated(text).mechanism)) == calibrated(text) for text in ("echo", "echo:0.5:normalized")
    ],
}))
"""


def test_a_file_and_a_row_make_a_mechanism() -> None:
    finished = subprocess.run([sys.executable, "-c", TOY], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert "a toy" in found["compare help"]
    assert "echo:s" in found["account help"]
    assert [row["mechanism"] for row in found["compare"]["mechanisms"]] == ["echo"]
    assert found["compare"]["mechanisms"][0]["parameters"] == {"strength": 0.5, "normalize": True}
    assert found["account"]["noise_multiplier"] == found["sigma"]
    assert found["description"] == {"name": "echo", "strength": 0.5}
    assert found["round trip"] is True
    assert found["respelled"] == [True, True]


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
    few = Participation(rounds=12, min_separation=4)
    with pytest.raises(ValueError, match="write 12"):
        catalogue.mechanism(spelling, few)
