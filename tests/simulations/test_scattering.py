"""Scattering features against their definition, by plain sums over pixels."""

import numpy as np
import pytest
import torch
from scipy.ndimage import convolve

from fedcgd_simulations.scattering import features, scattering

ANGLES, SIZE = 4, 16


def around(picture: np.ndarray, filter: np.ndarray) -> np.ndarray:
    """Their convolution on a torus; the filter's origin is in its middle."""
    return convolve(picture, filter.real, mode="wrap") + 1j * convolve(picture, filter.imag, mode="wrap")


def wavelet(side: int, scale: int, angle: float) -> np.ndarray:
    """A wave of frequency 3π/4·2^−scale under a Gaussian of deviation 0.8·2^scale, L/4 times as long across, of mean zero."""
    y, x = np.mgrid[:side, :side] - side // 2
    turned = (x + 1j * y) * np.exp(-1j * angle)
    bell = np.exp(-(turned.real**2 + (turned.imag * 4 / ANGLES) ** 2) / 2 / (0.8 * 2**scale) ** 2)
    bell *= 4 / ANGLES / (2 * np.pi * (0.8 * 2**scale) ** 2)
    wave = bell * np.exp(1j * 0.75 * np.pi / 2**scale * turned.real)
    return wave - bell * wave.sum() / bell.sum()


def smoothed(picture: np.ndarray) -> np.ndarray:
    """Under a Gaussian of deviation 1.6, every fourth pixel without the mirrored border."""
    side = len(picture)
    y, x = np.mgrid[:side, :side] - side // 2
    bell = np.exp(-(x**2 + y**2) / 2 / 1.6**2) / (2 * np.pi * 1.6**2)
    return convolve(picture, bell, mode="wrap")[4:-4:4, 4:-4:4]


def test_they_are_those_of_the_definition() -> None:
    pictures = np.random.default_rng(1).random((2, 3, SIZE, SIZE))
    found = scattering(torch.tensor(pictures, dtype=torch.float32), ANGLES).numpy()
    assert found.shape == (2, 75, 4, 4)
    angles = [np.pi * place / ANGLES for place in range(ANGLES)]
    padded, side = np.pad(pictures[1, 2], 4, mode="reflect"), SIZE + 8
    first = {(j, angle): np.abs(around(padded, wavelet(side, j, angle))) for j in (0, 1) for angle in angles}
    second = [np.abs(around(first[0, angle], wavelet(side, 1, other))) for angle in angles for other in angles]
    expected = np.stack([smoothed(one) for one in [padded, *first.values(), *second]])
    assert found[1, 50:] == pytest.approx(expected, abs=1e-5)
    assert expected[1:].max() > 0.01  # and not all of them zero


def test_features_of_a_picture_are_its_own_and_normalised() -> None:
    pictures = 40 * torch.rand(101, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = features(pictures, ANGLES)
    assert found.shape == (101, 4800)
    assert torch.allclose(features(pictures[:2], ANGLES), found[:2], atol=1e-4)
    groups = found.view(101, 15, -1)
    raw = features(pictures[:2], ANGLES, normalise=False)
    assert torch.equal(raw, scattering(pictures[:2], ANGLES))
    assert torch.allclose(groups.mean(2), torch.zeros(101, 15), atol=1e-4)
    assert torch.allclose(groups.var(2, unbiased=False), torch.ones(101, 15), atol=0.02)
