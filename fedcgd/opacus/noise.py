"""Where a round's noise comes from: generated again from the key each time, or kept in a buffer."""

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.mechanism import Vector
from fedcgd.noise import NoiseStream, add_correlated

NoiseMode = Literal["replay", "buffer", "cpu-buffer"]


class NoiseSource(Protocol):
    """Adds one row of C⁻¹Z to the tensors that together are the model."""

    def add(self, round: int, tensors: Sequence[Tensor], weights: Vector, stddev: float) -> None:
        """x += stddev·Σ_i weights[i]·Z_(round − i) for all x in `tensors`, float32, in place."""
        ...


class StreamReplay:
    """Z from the AES keystream of `NoiseStream(key)`, for tensors on the CPU: the numbers of a federated run."""

    def __init__(self, key: bytes) -> None:
        self._stream = NoiseStream(key)

    def add(self, round: int, tensors: Sequence[Tensor], weights: Vector, stddev: float) -> None:
        terms = [(round - lag, 0, float(weight)) for lag, weight in enumerate(weights) if weight]
        start = 0
        for x in tensors:
            add_correlated(x, self._stream, terms, stddev, start=start)
            start += x.numel()


class GeneratorReplay:
    """Z from torch's generator on `device` (Philox on a GPU), seeded by SHA-256 of the key and the round.

    Fast, but the seed has 64 bits and Philox is no cipher: what `StreamReplay` promises against an adversary who
    searches for the key does not hold here. The numbers differ between kinds of device.
    """

    def __init__(self, key: bytes, device: torch.device) -> None:
        self._key = key
        self._generator = torch.Generator(device)

    def add(self, round: int, tensors: Sequence[Tensor], weights: Vector, stddev: float) -> None:
        for lag, weight in enumerate(weights):
            if not weight:
                continue
            digest = hashlib.sha256(self._key + b"fedcgd round noise" + (round - lag).to_bytes(8, "big")).digest()
            self._generator.manual_seed(int.from_bytes(digest[:8], "big"))
            for x in tensors:
                z = torch.randn(x.shape, generator=self._generator, device=x.device, dtype=torch.float32)
                x.add_(z, alpha=stddev * float(weight))


class Buffer:
    """Z made once by `source` and kept for the `lags` rounds after it, on `device` (None: where it was made)."""

    def __init__(self, source: NoiseSource, lags: int, device: torch.device | None) -> None:
        self._source = source
        self._device = device
        self._past: deque[tuple[int, list[Tensor]]] = deque(maxlen=lags)

    def add(self, round: int, tensors: Sequence[Tensor], weights: Vector, stddev: float) -> None:
        fresh = self._make(round, tensors)
        for x, z in zip(tensors, fresh, strict=True):
            x.add_(z, alpha=stddev * float(weights[0]))
        held = dict(self._past)
        for lag in range(1, len(weights)):
            # After a restart the buffer is empty, and what it held is made again.
            past = held.get(round - lag) or self._make(round - lag, tensors)
            for x, z in zip(tensors, past, strict=True):
                x.add_(z.to(x.device, non_blocking=True), alpha=stddev * float(weights[lag]))
        self._past.appendleft((round, [self._store(z) for z in fresh] if self._past.maxlen else fresh))

    def _make(self, round: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        fresh = [torch.zeros_like(x) for x in tensors]
        self._source.add(round, fresh, _ONE, 1.0)
        return fresh

    def _store(self, z: Tensor) -> Tensor:
        if self._device is None or self._device == z.device:
            return z
        held = torch.empty(z.shape, dtype=z.dtype, device=self._device, pin_memory=z.is_cuda)
        return held.copy_(z, non_blocking=False)


_ONE: Vector = torch.ones(1, dtype=torch.float64).numpy()


def noise_source(mode: NoiseMode, key: bytes, mechanism: Mechanism, rounds: int, device: torch.device) -> NoiseSource:
    """The source of Z for a model on `device`: the cipher on the CPU, the device's own generator elsewhere."""
    replay = StreamReplay(key) if device.type == "cpu" else GeneratorReplay(key, device)
    if mode == "replay":
        return replay
    if mode not in ("buffer", "cpu-buffer"):
        raise ValueError(f"noise must be replay, buffer or cpu-buffer, got {mode!r}")
    lags = len(mechanism.inverse_row(rounds - 1, rounds)) - 1
    return Buffer(replay, lags, torch.device("cpu") if mode == "cpu-buffer" else None)
