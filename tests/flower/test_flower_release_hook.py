"""`on_release`: a strategy that overrode `start`, for checkpoints or W&B, does that in a callback, which sees releases alone."""

import re
import textwrap
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from flower_runs import SIZE, make, two_nodes
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg
from shared import record

from fedcgd.release import to_wandb
from fedcgd_flower import ReleaseEvent


def test_the_hook_is_told_of_every_release_once_with_what_was_measured(tmp_path: Path) -> None:
    events: list[ReleaseEvent] = []
    models = []

    def keep(event: ReleaseEvent) -> None:
        events.append(event)
        assert strategy.releases == event.release  # on record before
        models.append(event.arrays["w"].numpy().copy())
        event.arrays.clear()  # its own: the next round's model is not in its reach

    path = tmp_path / "run.db"
    for rounds in (2, 4):
        strategy = make(ledger=path, on_release=keep)
        result = strategy.start(
            two_nodes(),
            record(np.zeros(SIZE)),
            num_rounds=rounds,
            evaluate_fn=lambda release, arrays: MetricRecord({"accuracy": float(release)}),
        )
    assert [(event.release, event.planned) for event in events] == [(release, 6) for release in range(1, 7)]
    assert [event.evaluate_metrics_serverapp for event in events] == [
        MetricRecord({"accuracy": float(release)}) for release in range(1, 7)
    ]
    assert [event.evaluate_metrics_clientapp for event in events] == [None] * 6
    assert [event.train_metrics for event in events] == [result.train_metrics_clientapp[r] for r in range(1, 7)]
    np.testing.assert_array_equal(models[-1], result.arrays["w"].numpy())
    assert len(np.unique(np.stack(models), axis=0)) == 6


def test_a_hook_that_fails_ends_the_run_which_goes_on_after_that_release(tmp_path: Path) -> None:
    def fails(event: ReleaseEvent) -> None:
        if event.release == 3:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make(ledger=tmp_path / "run.db", on_release=fails).start(two_nodes(), record(np.zeros(SIZE)))
    told = []
    make(ledger=tmp_path / "run.db", on_release=lambda event: told.append(event.release)).start(
        two_nodes(), record(np.zeros(SIZE))
    )
    assert told == [4, 5, 6]


class OwnStart(FedAvg):
    def start(self, *args, **kwargs):
        raise AssertionError("nobody calls it")


def test_a_start_of_its_own_is_refused_unless_a_hook_does_its_work() -> None:
    """Flower's advanced-pytorch lost its checkpoints and its W&B run without a word."""
    with pytest.raises(ValueError, match=r"OwnStart\.start is"):
        make(OwnStart())
    told = []
    make(OwnStart(), on_release=lambda event: told.append(event.release)).start(two_nodes(), record(np.zeros(SIZE)))
    assert told == [1, 2, 3, 4, 5, 6]


def test_the_guides_hook_logs_each_release_to_what_people_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "flower.md").read_text()
    [program] = re.findall(r"^  ```python\n(  def on_release.*?)^  ```$", page, re.MULTILINE | re.DOTALL)
    run = Mock()
    names: dict = {"numpy": np, "run": run, "to_wandb": to_wandb}
    exec(textwrap.dedent(program), names)
    monkeypatch.chdir(tmp_path)
    result = make(on_release=names["on_release"]).start(
        two_nodes(), record(np.zeros(SIZE)), evaluate_fn=lambda release, _: MetricRecord({"accuracy": release / 6})
    )
    told = {call.kwargs["step"]: call.args[0] for call in run.log.call_args_list}
    assert list(told) == [1, 2, 3, 4, 5, 6]
    assert all(isinstance(value, int | float) for metrics in told.values() for value in metrics.values())
    assert told[6] == {**result.train_metrics_clientapp[6], "accuracy": 1.0}
    with np.load("model-6.npz") as saved:
        np.testing.assert_array_equal(saved["w"], result.arrays["w"].numpy())
