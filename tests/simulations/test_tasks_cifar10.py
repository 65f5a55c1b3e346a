"""CIFAR-10 from files in its authors' two formats, and the error without files or network."""

import pickle

import numpy as np
import pytest
import torch
from cifar10_files import BATCHES, write_python

from fedcgd_simulations.local_softmax import is_softmax
from fedcgd_simulations.tasks import cifar10, get_task
from fedcgd_simulations.tasks.cifar10 import find_files, load, read_files

pytestmark = pytest.mark.usefixtures("own_cache")


def write_binary(folder):
    """Records of one label byte and 3072 pixels."""
    folder.mkdir(parents=True)
    for name, (images, labels) in BATCHES.items():
        records = np.concatenate([np.array(labels, np.uint8)[:, None], images.reshape(10, 3072)], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())


@pytest.mark.parametrize("write", [write_python, write_binary])
@pytest.mark.parametrize("inside", [True, False])
def test_both_formats_give_the_images(tmp_path, write, inside):
    name = "cifar-10-batches-py" if write is write_python else "cifar-10-batches-bin"
    write(tmp_path / name)
    data = get_task("cifar10", data_dir=tmp_path / name if inside else tmp_path).load()
    assert [len(part) for part in (data.train, data.validation, data.test)] == [45, 5, 10]
    images, labels = BATCHES["test_batch"]
    assert np.allclose(data.test.inputs.numpy(), (images / 255 - 0.47) / 0.25, atol=1e-5)
    assert data.test.targets.tolist() == labels
    known = sorted(data.train.targets.tolist() + data.validation.targets.tolist())
    assert known == sorted(label for name, (_, labels) in BATCHES.items() if name != "test_batch" for label in labels)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    write_python(tmp_path / "data")

    class Harm:
        def __reduce__(self):
            return (print, ("harm",))

    (tmp_path / "data" / "test_batch").write_bytes(pickle.dumps({b"data": Harm()}, protocol=2))
    with pytest.raises(pickle.UnpicklingError, match="no place"):
        read_files(find_files(tmp_path / "data"))


def test_without_files_and_network_the_error_says_what_to_do(tmp_path):
    def no_network(folder):
        raise OSError("network is unreachable")

    with pytest.raises(ValueError, match=r"unreachable.*cifar-10-batches-py.*\$FEDCGD_DATA"):
        load(tmp_path, fetch=no_network)


@pytest.mark.parametrize("model", ["cnn", "scattering-4"])
def test_pictures_are_decoded_once_and_then_mapped(tmp_path, monkeypatch, model):
    """So that each node of a simulation need not hold them all."""
    write_binary(tmp_path / "data")
    first = get_task("cifar10", model=model, data_dir=tmp_path / "data").load()
    monkeypatch.setattr(cifar10, "read_files", lambda files: pytest.fail("decoded again"))
    again = get_task("cifar10", model=model, data_dir=tmp_path / "data").load()
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert again.train.inputs.shape[1:] == ((3, 32, 32) if model == "cnn" else (4800,))
    assert first.test.targets.tolist() == again.test.targets.tolist()


def test_a_linear_model_of_scattering_features_is_trained_as_softmax_regression_is(tmp_path):
    write_binary(tmp_path / "data")
    for model, size in (("scattering", (15_552,)), ("scattering-4", (4800,)), ("scattering-4-raw", (75, 8, 8))):
        task = get_task("cifar10", model=model, data_dir=tmp_path / "data")
        assert is_softmax(task.model(0), task.loss)
        assert task.model(0)(task.load().test.inputs).shape == (10, 10)
        assert task.load().train.inputs.shape == (45, *size)


def test_a_truncated_binary_file_is_refused(tmp_path):
    write_binary(tmp_path / "data")
    path = tmp_path / "data" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"3073 .*30729"):
        read_files(find_files(tmp_path / "data"))


def test_what_is_fetched_is_used(tmp_path):
    assert len(load(tmp_path, fetch=lambda folder: write_binary(folder / "cifar-10-batches-bin")).test) == 10


def test_pictures_are_shifted_and_mirrored_and_features_are_not():
    pictures = torch.rand(64, 3, 32, 32)
    found = get_task("cifar10").augmented(pictures, 2)
    assert found.shape == (128, 3, 32, 32)
    wide = np.pad(pictures.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)), mode="reflect")
    seen = set()
    for place, picture in enumerate(found.numpy()):
        [(y, x, way)] = [
            (y, x, way)
            for y in range(9)
            for x in range(9)
            for way in (1, -1)
            if np.array_equal(picture, wide[place // 2, :, y : y + 32, x : x + 32][:, :, ::way])
        ]
        seen.add((y, x, way))
    assert len(seen) > 60  # of 162
    with pytest.raises(ValueError, match="no augmentation"):
        get_task("cifar10", model="scattering").augmented(pictures, 2)
