"""A mechanism in a file: the same one in every place that takes a mechanism, and nothing else passes for one."""

import json
from pathlib import Path

import numpy as np
import pytest
from app_runs import released_by_the_app
from mechanism_table import ONE_OF_EACH

from fedcgd import BISR, BandInvMF, Dense, LambdaCGD, Mechanism, Normalized, Participation, Plan
from fedcgd.ledger import verify
from fedcgd.optimisation import catalogue, mechanism_json
from fedcgd.optimisation.catalogue import MechanismSpec
from fedcgd.optimisation.mechanism_json import describe, read_mechanism, write_mechanism
from fedcgd_experiments.central import claim, mechanism_of
from fedcgd_experiments.point import Setup

RUN = Participation(rounds=6, min_separation=3)
BAND = np.array([[1.0, 0.5], [0.9, 0.1], [0.8, -0.2], [1.0, 0.3], [1.0, 0.4], [1.0, 0.0]])
MADE = [
    Dense("band-mf", BAND),
    Normalized(BISR(2)),
    *(ONE_OF_EACH[name] for name in ("band-inv-mf", "blt", "lambda-cgd", "bifr", "lambda-mu")),
]


@pytest.mark.parametrize("mechanism", MADE, ids=lambda m: m.name)
def test_what_is_written_is_read_and_spelled(mechanism: Mechanism, tmp_path: Path) -> None:
    path = tmp_path / "noise:1.json"
    write_mechanism(mechanism, path)
    assert read_mechanism(path) == mechanism
    spelling = MechanismSpec.parse(f"file:{path}")
    assert str(spelling) == f"file:{path}"
    assert (spelling.row.name, spelling.normalized, spelling.is_open) == (
        mechanism.name, isinstance(mechanism, Normalized), False,
    )  # fmt: skip
    assert catalogue.mechanism(spelling, RUN) == mechanism
    budget = {"clip_norm": 1.0, "epsilon": 2.0, "delta": 1e-5}
    assert Plan.calibrated(f"file:{path}", RUN, **budget) == Plan.calibrated(mechanism, RUN, **budget)


def test_results_can_be_read_where_the_file_of_a_mechanism_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "lambda-cgd.json"
    write_mechanism(LambdaCGD(0.5), path)
    setup = Setup(mechanism=f"file:{path}", epsilon=2.0, delta=1e-5, steps=3, epochs=2)
    assert mechanism_of(setup) == LambdaCGD(0.5)
    gone = Setup(mechanism=f"file:{tmp_path / 'gone.json'}", epsilon=2.0, delta=1e-5, steps=3, epochs=2)
    assert gone.in_file
    with pytest.raises(ValueError, match=r"gone.json cannot"):
        claim(gone)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"name": "unknown"}',
        '{"name": ["lambda-cgd"]}',
        '{"name": "lambda-cgd", "lam": 1.5}',
        '{"name": "lambda-cgd", "lam": "0.5"}',
        '{"name": "lambda-cgd", "lam": 0.5, "nu": 1}',
        '{"name": "band-mf", "shape": [1, 1], "band": "AAAA"}',
        json.dumps(describe(Dense("band-mf", BAND)) | {"shape": [5, 2]}),
        "\udcff",
    ],
)
def test_anything_else_in_a_file_is_refused_by_its_name(content: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"odd.json describes"):
        MechanismSpec.parse(f"file:{path}")


def test_a_matrix_is_for_its_own_number_of_rounds(tmp_path: Path) -> None:
    write_mechanism(Dense("band-mf", BAND), tmp_path / "six.json")
    assert MechanismSpec.parse(f"file:{tmp_path / 'six.json'}").bands == 2
    with pytest.raises(ValueError, match="6 rounds"):
        catalogue.mechanism(f"file:{tmp_path / 'six.json'}", Participation(rounds=7, min_separation=3))


def test_a_flower_run_takes_a_file_and_its_ledger_keeps_what_it_said(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "curve.json"
    write_mechanism(BandInvMF((1.0, -0.6)), path)
    changes = {"rounds": 2, "mechanism": f"file:{path}", "ledger": str(tmp_path / "run.db")}
    _, told = released_by_the_app(changes, tmp_path, monkeypatch)
    path.unlink()
    assert verify(tmp_path / "run.db").problems == ()
    assert mechanism_json.from_description(told["mechanism"]) == BandInvMF((1.0, -0.6))
    assert str(path).encode() not in (tmp_path / "run.db").read_bytes()
