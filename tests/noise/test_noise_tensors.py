"""Noise for sums that are tensors: what arrays get, and what happens where no kernel can make it."""

import sys
import warnings
from types import SimpleNamespace

import mechanism_table
import numpy as np
import pytest
import torch
from numpy_kernels import numpy_kernels

from fedcgd.mechanisms import LambdaCGD
from fedcgd.noise import NoiseStream, tensors
from fedcgd.noise.quantisation import Lattice
from fedcgd.noise.tensors import TensorNormals, gpu_kernels
from fedcgd.release.run_noise import LatticeNormals, NoiseSource

STREAM, GRID = NoiseStream(bytes(range(32))), Lattice(2.0**-18)
NONCES = [0, 5, 0, 2**128 - 1, 0, 0, 3, 0, 0]
MECHANISMS = [mechanism_table.ONE_OF_EACH[name] for name in ("lambda-cgd", "bisr", "bsr", "blt", "tree")]


@pytest.mark.parametrize("kernels", [None, numpy_kernels()], ids=["in main memory", "by kernels"])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
@pytest.mark.parametrize("mode", ["replay", "buffer", "cpu-buffer"])
def test_a_tensor_gets_what_an_array_gets_also_after_a_restart(mode, mechanism, kernels, monkeypatch) -> None:
    monkeypatch.setattr(tensors, "gpu_kernels", lambda device: kernels)
    arrays = NoiseSource(mechanism, 9, LatticeNormals(STREAM, GRID), mode)
    made = NoiseSource(mechanism, 9, TensorNormals(STREAM, GRID), mode)
    for t in range(9):
        if t == 6:
            made = NoiseSource(mechanism, 9, TensorNormals(STREAM, GRID), mode)
        expected, got = np.arange(11), torch.arange(11)
        arrays.add(expected, NONCES[: t + 1], 3.0)
        made.add(got, NONCES[: t + 1], 3.0)
        # Buffers are combined by torch here, and by NumPy there: some float32 ends differ.
        np.testing.assert_allclose(got.numpy(), expected, atol=0 if mode == "replay" else 2)
        assert np.abs(expected - np.arange(11)).min() > 2**6


@pytest.mark.parametrize("mode", ["replay", "buffer"])
def test_a_sum_whose_numbers_are_apart_is_refused(mode) -> None:
    """One column of a matrix: noise that went into a copy of it would be lost, and the sum released without."""
    whole = torch.zeros(11, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="contiguous"):
        NoiseSource(LambdaCGD(0.8), 9, TensorNormals(STREAM, GRID), mode).add(whole[:, 0], NONCES[:1], 3.0)
    assert not whole.any()


def test_kernels_are_used_only_if_their_bits_are_numpys() -> None:
    assert tensors.same_bits(numpy_kernels(), torch.device("cpu"))
    assert not tensors.same_bits(numpy_kernels(wrong=True), torch.device("cpu"))


@pytest.mark.parametrize("case", ["no Triton", "other bits", "the same bits"])
def test_a_device_is_used_if_its_kernels_give_the_same_bits_and_else_told_of_once(case: str, monkeypatch) -> None:
    gpu_kernels.cache_clear()
    if case == "no Triton":
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, "fedcgd.noise.gpu_code", raising=False)
    else:
        code = SimpleNamespace(**numpy_kernels()._asdict())
        monkeypatch.setitem(sys.modules, "fedcgd.noise.gpu_code", code)
        monkeypatch.setattr("fedcgd.noise.gpu_code", code, raising=False)
    monkeypatch.setattr(tensors, "same_bits", lambda kernels, device: case == "the same bits")
    device = torch.device("cuda", 7)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [gpu_kernels(device) for _ in range(2)]
    assert all((each is not None) == (case == "the same bits") for each in found)
    words = {"no Triton": "fedcgd[gpu]", "other bits": "other bits"}.get(case, "")
    assert [words in str(each.message) and "cuda:7" in str(each.message) for each in told] == [True] * bool(words)
    gpu_kernels.cache_clear()


def test_what_does_not_fit_is_refused_before_the_sum_changes(monkeypatch) -> None:
    for kernels in (None, numpy_kernels()):
        monkeypatch.setattr(tensors, "gpu_kernels", lambda device, kernels=kernels: kernels)
        normals, total = TensorNormals(STREAM, Lattice(1.0)), torch.zeros(3, dtype=torch.int64)
        for row in (torch.full((3,), np.nan), torch.full((3,), 2.0**50), torch.zeros(2)):
            with pytest.raises(ValueError, match=r"shape \(3,\)"):
                normals.add_row(total, row, (0, 0, 1.0), 1.0)
        with pytest.raises(ValueError, match="one term"):
            normals.add(total, [], 1.0)
        with pytest.raises(ValueError, match="larger steps"):
            normals.add(total, [(0, 0, 1.0)], 1e15)
        assert not total.any()
