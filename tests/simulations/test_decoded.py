"""Data that are decoded once: another process finds them, changed files are read anew, and no more is read than is taken."""

import os
from pathlib import Path

import pytest
import torch

from fedcgd_simulations.decoded import decoded
from fedcgd_simulations.task import Data, Examples


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDCGD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Loader:
    """Makes data of so many examples, and counts how often."""

    def __init__(self, count: int = 4) -> None:
        self.count, self.calls = count, 0

    def __call__(self) -> Data:
        self.calls += 1
        inputs = torch.arange(self.count * 6.0).view(self.count, 2, 3) + self.calls
        return Data(*(Examples(inputs + 100 * part, torch.arange(self.count) + part) for part in range(3)))


def test_they_are_decoded_once_for_the_same_files_and_code(tmp_path: Path) -> None:
    folder, code, copy, load = tmp_path / "raw", tmp_path / "code.py", tmp_path / "copy.py", Loader()
    folder.mkdir()
    (folder / "a").write_text("x")
    for path in (code, copy):
        path.write_text("MEAN = 0.5")
    for one in (decoded("some", [folder, code], load), decoded("some", [folder, copy], load)):
        assert torch.equal(one.validation.inputs, torch.arange(24.0).view(4, 2, 3) + 101)
        assert one.test.targets.tolist() == [2, 3, 4, 5]
    assert load.calls == 1
    decoded("other", [folder, code], load)
    for calls, change in enumerate(
        (
            lambda: (folder / "a").write_text("xy"),
            lambda: os.utime(folder / "a", ns=(1, 1)),
            lambda: (folder / "b").write_text("x"),
            lambda: code.write_text("MEAN = 0.4"),
        ),
        start=2,
    ):
        assert load.calls == calls
        change()
        decoded("some", [folder, code], load)
    assert load.calls == 6


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path, cache: Path) -> None:
    source, load = tmp_path / "raw", Loader()
    source.write_text("x")
    cache.write_text("a file")
    assert len(decoded("some", [source], load).train) == 4
    assert load.calls == 1
