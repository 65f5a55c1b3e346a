"""Digests of tensors, which say whether values are still what they were.

A digest has Σ_i w_i·v_i mod 2⁶⁴ for each block of values, v_i their 32-bit words and w_i secret and random. A change that does
not depend on w is missed with probability at most 2⁻³³: words differ by at most 2³¹ times an odd number, so that at least 33
random bits of one product have to cancel all others. It is the same on all devices, and is made where the tensor is, without
waiting for it.
"""

import hashlib
import secrets
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

_BLOCK = 2**18
"""Words, 1 MiB: with their weights they stay in a cache."""
_BLOCKS_AT_ONCE_ON_A_GPU = 32  # each part costs some launches


class Digests:
    """The digests under one set of secret weights."""

    def __init__(self, secret: bytes | None = None) -> None:
        """The weights come from `secret`; by default from one of its own."""
        weights = secrets.token_bytes(8 * _BLOCK) if secret is None else hashlib.shake_256(secret).digest(8 * _BLOCK)
        host = torch.frombuffer(bytearray(weights), dtype=torch.int64)
        self._weights = {host.device: host}
        self._joined: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        """Of small tensors that were looked at together: lengths → (their weights, where each of them ends)."""

    def of(self, value: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """The digest of `value`, of its blocks from `first` on and before `last` if these are given: a sum for each block."""
        octets = _octets(value)[4 * _BLOCK * first : None if last is None else 4 * _BLOCK * last]
        words = _words(octets)
        at_once = _BLOCK if words.device.type == "cpu" else _BLOCK * _BLOCKS_AT_ONCE_ON_A_GPU
        parts = [self._sums(part) for part in torch.split(words, at_once)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def of_all(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The digest of each of `values`; many small ones are quicker together."""
        made: dict[int, Tensor] = {}
        small = [i for i, value in enumerate(values) if 0 < _size(value) <= 4 * _BLOCK]
        joined: set[tuple[int, ...]] = set()
        for group in _groups(small, values):
            words = [_words(_octets(values[i])) for i in group]
            lengths = tuple(len(part) for part in words)
            joined.add(lengths)
            made |= zip(group, torch.split(self._sums_of_joined(words, lengths), 1), strict=True)
        self._joined = {lengths: kept for lengths, kept in self._joined.items() if lengths in joined}
        return [made[i] if i in made else self.of(value) for i, value in enumerate(values)]

    def _sums(self, words: Tensor) -> Tensor:
        """A sum for each block of `words`."""
        weights = self._weights_on(words.device)
        whole = len(words) // _BLOCK
        blocks = [words[: whole * _BLOCK].view(whole, _BLOCK)] if whole else []
        if rest := words[whole * _BLOCK :].numel():
            blocks.append(words[whole * _BLOCK :].view(1, rest))
        sums = [_products(block, weights[: block.shape[1]]) for block in blocks]
        if not sums:
            return weights.new_zeros(0)
        return torch.cat(sums) if len(sums) > 1 else sums[0]

    def _sums_of_joined(self, words: list[Tensor], lengths: tuple[int, ...]) -> Tensor:
        device = words[0].device
        if lengths not in self._joined or self._joined[lengths][0].device != device:
            all_weights = self._weights_on(device)
            ends = torch.tensor(lengths).cumsum(0).sub_(1).to(device)
            self._joined[lengths] = torch.cat([all_weights[:length] for length in lengths]), ends
        weights, ends = self._joined[lengths]
        sums = torch.cat(words).long().mul_(weights).cumsum(0)[ends]
        sums[1:] -= sums[:-1].clone()
        return sums

    def _weights_on(self, device: torch.device) -> Tensor:
        if device not in self._weights:
            self._weights[device] = next(iter(self._weights.values())).to(device)
        return self._weights[device]


def _products(block: Tensor, weights: Tensor) -> Tensor:
    """Σ_j w_j·v_ij mod 2⁶⁴ of each row i."""
    if type(block) is Tensor and block.device.type == "cpu":  # in one pass: three times as fast as torch
        return torch.from_numpy(np.einsum("ij,j->i", block.numpy(), weights.numpy()))
    return block.long().mul_(weights).sum(1)


def blocks_of(value: Tensor) -> int:
    """How many blocks `value` has."""
    return -(-_size(value) // (4 * _BLOCK))


def _size(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _groups(small: Sequence[int], values: Sequence[Tensor]) -> Iterator[list[int]]:
    """Those of `small` in parts on one device, of at most a block."""
    group: list[int] = []
    octets = 0
    for i in small:
        size = _size(values[i]) + 3  # which is rounded to words
        if group and (octets + size > 4 * _BLOCK or values[i].device != values[group[0]].device):
            yield group
            group, octets = [], 0
        group.append(i)
        octets += size
    if group:
        yield group


def _words(octets: Tensor) -> Tensor:
    if len(octets) % 4:
        octets = torch.cat([octets, octets.new_zeros(-len(octets) % 4)])
    return octets.view(torch.int32)


def _octets(value: Tensor) -> Tensor:
    """The bytes of a tensor, flat; a view where it lies together and begins at a word."""
    flat = value.detach().contiguous().reshape(-1)
    octets = flat.view(torch.uint8)
    return octets if octets.storage_offset() % 4 == 0 else octets.clone()
