"""Scattering features of pictures: what wavelets see of them, without anything learned.

With x a channel, ψ_{j,l} a Morlet wavelet of scale 2^j and angle πl/L, φ a Gaussian of scale 2^J, and every 2^J-th pixel kept:
φ∗x, φ∗|ψ_{j,l}∗x| and φ∗|ψ_{k,m}∗|ψ_{j,l}∗x|| for j < k. Bruna and Mallat, "Invariant Scattering Convolution Networks", 2013,
arXiv:1203.1513. As features for private training: Tramèr and Boneh, "Differentially Private Learning Needs Better Features (or
Much More Data)", 2021, arXiv:2011.11660.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

SCALES = 2
GROUPS = {8: 27, 4: 15}
"""Channels of 32 × 32 colour pictures are normalised in so many groups, by the number of angles."""


def features(images: Tensor, angles: int, *, normalise: bool = True) -> Tensor:
    """Scattering features of each picture by itself, so that they cost no privacy.

    Args:
        images: shape (pictures, channels, height, width).
        angles: L, one of GROUPS.
        normalise: groups of channels, within each picture.

    Returns:
        Shape (pictures, channels·(1 + 2L + L²), height/4, width/4), flat but for the first if they are normalised.
    """
    parts = []
    for batch in torch.split(images, 100):  # at a time: memory
        found = scattering(batch, angles)
        parts.append(functional.group_norm(found, GROUPS[angles]).flatten(1) if normalise else found)
    return torch.cat(parts)


def scattering(images: Tensor, angles: int) -> Tensor:
    """Scattering coefficients of two orders, for J = SCALES.

    Args:
        images: shape (pictures, channels, height, width), mirrored at their borders; height = width, a multiple of 4.
        angles: L.

    Returns:
        Shape (pictures, channels·(1 + 2L + L²), height/4, width/4), a channel's coefficients side by side.
    """
    step = 2**SCALES
    x = functional.pad(images, (step,) * 4, mode="reflect")
    smooth, wavelets = (each.to(x.device) for each in _filters(x.shape[-1], angles))

    def smoothed(rows: Tensor) -> Tensor:
        spectrum = torch.fft.fft2(rows) * smooth  # to keep every fourth pixel is to fold its frequencies
        folded = spectrum.unflatten(-1, (step, -1)).unflatten(-3, (step, -1)).mean((-2, -4))
        pixels: Tensor = torch.fft.ifft2(folded).real
        return pixels[..., 1:-1, 1:-1]

    first = torch.fft.ifft2(torch.fft.fft2(x)[:, :, None, None] * wavelets).abs()  # …, J, L, height, width
    orders = [x[:, :, None], first.flatten(2, 3)]
    for j in range(SCALES - 1):
        second = torch.fft.ifft2(torch.fft.fft2(first[:, :, j])[:, :, :, None, None] * wavelets[j + 1 :]).abs()
        orders.append(second.flatten(2, 4))
    return torch.cat([smoothed(order) for order in orders], dim=2).flatten(1, 2)


def _filters(size: int, angles: int) -> tuple[Tensor, Tensor]:
    """Fourier transforms of φ, shape (size, size), and of all ψ, shape (J, L, size, size); both are real."""
    place = torch.arange(size) - size // 2
    y, x = torch.meshgrid(place, place, indexing="ij")

    def gaussian(deviation: float, angle: float, slant: float) -> tuple[Tensor, Tensor]:
        along, across = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
        weight = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2))
        return weight * slant / (2 * math.pi * deviation**2), along

    wavelets = []
    for j in range(SCALES):
        for angle in torch.arange(angles) * math.pi / angles:
            envelope, along = gaussian(0.8 * 2**j, float(angle), 4 / angles)
            wave = envelope * torch.exp(0.75j * math.pi / 2**j * along)
            wavelets.append(wave - envelope * (wave.sum() / envelope.sum()))  # of mean zero
    smooth, _ = gaussian(0.8 * 2 ** (SCALES - 1), 0.0, 1.0)
    transformed = torch.fft.fft2(torch.fft.ifftshift(torch.stack([smooth, *wavelets]), dim=(-2, -1))).real
    return transformed[0], transformed[1:].view(SCALES, angles, size, size)
