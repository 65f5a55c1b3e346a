"""Where a round's noise comes from: generated again from the key each time, or kept in the mechanism's buffers."""

import hashlib
from collections.abc import Sequence
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.streaming import State, correlate, noise_mode, state_before
from fedcgd.noise import NoiseStream, Term, add_correlated

NoiseMode = Literal["replay", "buffer", "cpu-buffer"]


class Normals(Protocol):
    """Z, round by round, for the tensors that together are the model."""

    def add(self, tensors: Sequence[Tensor], terms: Sequence[Term], stddev: float) -> None:
        """x += stddev·Σ weight·Z_(round, attempt) over `terms`, for all x in `tensors`, float32, in place."""
        ...


class StreamNormals:
    """Z from the AES keystream of `NoiseStream(key)`, for tensors on the CPU: the numbers of a federated run."""

    def __init__(self, key: bytes) -> None:
        self._stream = NoiseStream(key)

    def add(self, tensors: Sequence[Tensor], terms: Sequence[Term], stddev: float) -> None:
        start = 0
        for x in tensors:
            add_correlated(x, self._stream, terms, stddev, start=start)
            start += x.numel()


class GeneratorNormals:
    """Z from torch's generator on `device` (Philox on a GPU), seeded by SHA-256 of key, round and attempt.

    Fast, but the seed has 64 bits and Philox is no cipher: what `StreamNormals` promises against an adversary who
    searches for the key does not hold here. The numbers differ between kinds of device.
    """

    def __init__(self, key: bytes, device: torch.device) -> None:
        self._key = key
        self._generator = torch.Generator(device)

    def add(self, tensors: Sequence[Tensor], terms: Sequence[Term], stddev: float) -> None:
        for round, attempt, weight in terms:
            name = b"fedcgd round noise" + round.to_bytes(8, "big") + attempt.to_bytes(8, "big")
            digest = hashlib.sha256(self._key + name).digest()
            self._generator.manual_seed(int.from_bytes(digest[:8], "big"))
            for x in tensors:
                z = torch.randn(x.shape, generator=self._generator, device=x.device, dtype=torch.float32)
                x.add_(z, alpha=stddev * weight)


class NoiseSource(Protocol):
    """Adds the rows of C⁻¹Z to the tensors that together are the model."""

    def add(self, attempts: Sequence[int], tensors: Sequence[Tensor], stddev: float) -> None:
        """x += stddev·(C⁻¹Z)_t for all x in `tensors`, float32, in place, for round t = len(attempts) − 1.

        `attempts[s]` tells the Z of round s from all others that were ever drawn for that round.
        """
        ...


class Replay:
    """Makes every Z that a row combines again; keeps nothing."""

    def __init__(self, normals: Normals, mechanism: Mechanism, rounds: int) -> None:
        self._normals, self._mechanism, self._rounds = normals, mechanism, rounds

    def add(self, attempts: Sequence[int], tensors: Sequence[Tensor], stddev: float) -> None:
        round = len(attempts) - 1
        weights = self._mechanism.inverse_row(round, self._rounds)
        terms = [(round - lag, attempts[round - lag], float(w)) for lag, w in enumerate(weights) if w]
        self._normals.add(tensors, terms, stddev)


class Buffer:
    """Makes one Z a round; keeps, and sums, the mechanism's buffers on `device` (None: where the model is)."""

    def __init__(self, normals: Normals, mechanism: Mechanism, rounds: int, device: torch.device | None) -> None:
        self._normals, self._mechanism, self._rounds, self._device = normals, mechanism, rounds, device
        self._state = State()
        self._attempts: list[int] = []  # of the rounds that are in the buffers

    def add(self, attempts: Sequence[int], tensors: Sequence[Tensor], stddev: float) -> None:
        def z(round: int) -> Tensor:
            return self._make(round, attempts[round], tensors)

        round = len(attempts) - 1
        if self._attempts != list(attempts[:-1]):  # after a restart, or with a checkpoint
            self._state = state_before(self._mechanism, self._rounds, round, z)
        y, self._state = correlate(self._mechanism, self._rounds, z(round), self._state)
        self._attempts = list(attempts)
        y = y.to(tensors[0].device)
        for x, noise in zip(tensors, torch.split(y, [x.numel() for x in tensors]), strict=True):
            x.add_(noise.view_as(x), alpha=stddev)

    def _make(self, round: int, attempt: int, tensors: Sequence[Tensor]) -> Tensor:
        """Z_round of all tensors, one after another, where the buffers are."""
        sizes = [x.numel() for x in tensors]
        z = torch.zeros(sum(sizes), dtype=torch.float32, device=tensors[0].device)
        parts = torch.split(z, sizes)
        views = [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
        self._normals.add(views, [(round, attempt, 1.0)], 1.0)
        return z if self._device is None else z.to(self._device)


def noise_source(
    mode: NoiseMode | None, key: bytes, mechanism: Mechanism, rounds: int, device: torch.device
) -> NoiseSource:
    """The noise for a model on `device`: from the cipher on the CPU, from the device's own generator elsewhere.

    `mode` None is "buffer" where the mechanism keeps fewer vectors than a replay would make again, else "replay".
    """
    if mode is None:
        mode = noise_mode(mechanism, rounds)
    if mode not in get_args(NoiseMode):
        raise ValueError(f"noise must be replay, buffer or cpu-buffer, got {mode!r}")
    normals = StreamNormals(key) if device.type == "cpu" else GeneratorNormals(key, device)
    if mode == "replay":
        return Replay(normals, mechanism, rounds)
    return Buffer(normals, mechanism, rounds, torch.device("cpu") if mode == "cpu-buffer" else None)
