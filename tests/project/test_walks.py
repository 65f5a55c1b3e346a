"""CONTRIBUTING's walks name files that are really entered: each walk is run, and what it enters is compared with the page."""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from central_runs import Run, examples
from flower_runs import SIZE, make, two_nodes
from plans import make_plan
from shared import record
from torch.nn.functional import cross_entropy

from fedcgd import LambdaCGD, NoiseKey, Participation
from fedcgd.central import PrivateGradient

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "fedcgd", ROOT / "strategies")
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("walks through the code")[2]


@contextmanager
def traced() -> Iterator[set[str]]:
    """The files of the installed packages that are entered in the block, as their paths in the repository."""
    entered: set[str] = set()
    places = tuple(f"{source}/" for source in SOURCES)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(places):
            entered.add(Path(frame.f_code.co_filename).relative_to(ROOT).as_posix())

    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)


def a_run(_: pytest.MonkeyPatch) -> set[str]:
    with traced() as entered:
        make().start(two_nodes(), record(np.zeros(SIZE)), num_rounds=2)
    return entered


def a_pure_step(_: pytest.MonkeyPatch) -> set[str]:
    plan = make_plan(LambdaCGD(0.5), Participation(rounds=20, min_separation=10))
    step = PrivateGradient(torch.nn.Linear(6, 3), cross_entropy, examples(80), plan, key=NoiseKey.generate())
    step()
    with traced() as entered:
        step()
    return entered


def a_batch_through_opacus(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    run = Run(monkeypatch)
    with traced() as entered:
        run.step(next(iter(run.loader)))
    return entered


WALKS: dict[str, Callable[[pytest.MonkeyPatch], set[str]]] = {
    "A round on a Flower server": a_run,
    "A pure step": a_pure_step,
    "A batch through Opacus": a_batch_through_opacus,
}


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_names_files_that_are_entered(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [walk for walk in PAGE.partition("\n## ")[0].split("\n- **")[1:] if walk.startswith(title)]
    assert len(found) == 1
    named = set(re.findall(r"`([\w/]+\.py)`", found[0]))
    assert len(named) >= 5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entered = WALKS[title](monkeypatch)
    elsewhere = {name for name in named if not any(path.endswith(f"/{name}") for path in entered)}
    assert elsewhere == set(), f"named and not entered; entered are {sorted(entered)}"
