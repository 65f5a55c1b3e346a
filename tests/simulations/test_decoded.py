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


def test_they_are_decoded_once(tmp_path: Path) -> None:
    source, load = tmp_path / "raw", Loader()
    source.write_text("x")
    first, again = decoded("some", [source], load), decoded("some", [source], load)
    assert load.calls == 1
    for one in (first, again):
        assert torch.equal(one.validation.inputs, torch.arange(24.0).view(4, 2, 3) + 101)
        assert one.test.targets.tolist() == [2, 3, 4, 5]
    decoded("other", [source], load)
    assert load.calls == 2


@pytest.mark.parametrize("change", ["size", "time", "another"])
def test_other_files_are_other_data(tmp_path: Path, change: str) -> None:
    folder, load = tmp_path / "raw", Loader()
    folder.mkdir()
    (folder / "a").write_text("x")
    decoded("some", [folder], load)
    if change == "size":
        (folder / "a").write_text("xy")
    elif change == "time":
        os.utime(folder / "a", ns=(1, 1))
    else:
        (folder / "b").write_text("x")
    decoded("some", [folder], load)
    assert load.calls == 2


def test_other_code_is_other_data_and_another_copy_of_it_is_not(tmp_path: Path) -> None:
    code, copy, load = tmp_path / "code.py", tmp_path / "copy.py", Loader()
    for path in (code, copy):
        path.write_text("MEAN = 0.5")
    decoded("some", [code], load)
    decoded("some", [copy], load)
    assert load.calls == 1
    code.write_text("MEAN = 0.4")
    decoded("some", [code], load)
    assert load.calls == 2


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path, cache: Path) -> None:
    source, load = tmp_path / "raw", Loader()
    source.write_text("x")
    cache.write_text("a file")
    assert len(decoded("some", [source], load).train) == 4
    assert load.calls == 1
