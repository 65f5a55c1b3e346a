"""Arrays and tables of one's own as a task."""

from pathlib import Path

import numpy as np
import pytest

from fedcgd_simulations.partitions import partition
from fedcgd_simulations.tasks import get_task


def clusters(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Three clusters around corners."""
    labels = np.arange(count) % 3
    return np.eye(3)[labels] * 5 + np.random.default_rng(seed).normal(size=(count, 3)), labels


def write_table(path: Path, inputs: np.ndarray, labels: np.ndarray, users: list[str]) -> None:
    rows = [f"{user},{a},{b},{c},{label}" for user, (a, b, c), label in zip(users, inputs, labels, strict=True)]
    path.write_text("\n".join(["user,a,b,c,label", *rows]))


@pytest.mark.parametrize("kind", ["npy", "csv"])
@pytest.mark.parametrize("own_test", [True, False])
def test_arrays_and_tables_are_tasks(tmp_path: Path, kind: str, own_test: bool) -> None:
    names = [f"person {i % 7}" for i in range(100)]
    for prefix, table, count in (("", "data", 100), ("test-", "test", 30))[: 2 if own_test else 1]:
        inputs, labels = clusters(count, seed=count)
        if kind == "npy":
            np.save(tmp_path / f"{prefix}inputs.npy", inputs)
            np.save(tmp_path / f"{prefix}labels.npy", labels)
        else:
            write_table(tmp_path / f"{table}.csv", inputs, labels, names[:count])
    if kind == "npy":
        np.save(tmp_path / "users.npy", np.array(names))
    data = get_task("arrays", data_dir=tmp_path).load()
    sizes = [len(part) for part in (data.train, data.validation, data.test)]
    assert sizes == ([90, 10, 30] if own_test else [72, 8, 20])
    inputs, labels = clusters(100, seed=100)
    place = int(np.argmin(np.abs(inputs - data.train.inputs[5].numpy()).sum(1)))
    assert data.train.inputs[5].numpy() == pytest.approx(inputs[place], abs=1e-5)
    assert data.train.targets[5] == labels[place]
    assert data.train.users is not None
    assert data.train.users[5] == names[place]
    assert len(partition("natural", data.train, seed=0)) == 7
    for model in ("softmax", "mlp"):
        made = get_task("arrays", model=model, data_dir=tmp_path).model(0)
        assert made(data.test.inputs).shape == (sizes[2], 3)


@pytest.mark.parametrize(
    ("inputs", "labels", "words"),
    [
        (np.ones((10, 2)), np.arange(9), "10 inputs and 9 labels"),
        (np.ones((10, 2)), np.arange(10) / 2, "labels must be whole numbers from 0"),
        (np.ones((10, 2)), np.arange(10) - 1, "labels must be whole numbers from 0"),
        (np.full((10, 2), np.nan), np.arange(10), "inputs must be finite"),
        (np.ones((10, 2)), None, "has no labels.npy"),
    ],
)
def test_what_is_no_data_is_refused(tmp_path: Path, inputs, labels, words: str) -> None:
    for name, array in (("inputs", inputs), ("labels", labels)):
        if array is not None:
            np.save(tmp_path / f"{name}.npy", array)
    with pytest.raises(ValueError, match=words):
        get_task("arrays", data_dir=tmp_path).load()


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "a,label\nx,1\n", "a,label\n1,1.5\n", "a,label\n1\n", ""])
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "data.csv").write_text(text)
    with pytest.raises(ValueError, match=r"data\.csv"):
        get_task("arrays", data_dir=tmp_path).load()
