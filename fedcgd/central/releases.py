"""The releases of a run of central training: where it stands, and what happens between a round's sum and its noised sum."""

import hashlib
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcgd.central.batches import Rows
from fedcgd.ledger import Ledger
from fedcgd.noise.keys import NoiseKey
from fedcgd.noise.tensors import sum_digest
from fedcgd.plan import Plan
from fedcgd.release import array_noise, lattice_of
from fedcgd.release.tensors import tensor_noise

GRID_LOSS = 2.0**-17
"""Rounding to the lattice moves an example's term by at most this part of the clip norm."""


class Releases:
    """The rounds of a run that are released, in memory or on a ledger; sums get their noise here and nowhere else.

    A round that is on the ledger may be computed again, as after a crash: of the same sum, bit by bit, it is the same release,
    noise included, and nothing new is released. Another sum never gets that noise.

    Args:
        plan: what runs.
        key: where the noise comes from.
        size: how many numbers are trained.
        record: the path of the ledger; None keeps what is released in memory alone.
        configuration: what else defines the run, for the ledger.
        device: where sums are.

    Raises:
        ValueError: as `Ledger.open` does.
    """

    def __init__(
        self,
        plan: Plan,
        key: NoiseKey,
        size: int,
        *,
        record: Path | str | None,
        configuration: dict[str, Any],
        device: torch.device,
    ) -> None:
        self._plan, self._key = plan, key
        self.lattice = lattice_of(plan, size, relative_loss=GRID_LOSS)
        self._ledger = None if record is None else Ledger.open(record, plan=plan, configuration=configuration, key=key)
        self._nonces: list[int] = []
        self._digests: dict[int, str] = {}
        self.run = secrets.token_hex(16) if self._ledger is None else self._ledger.stream_id
        if self._ledger is None and key.simulated:
            self.run = ""
        self._read_ledger()
        self._as_array = device.type == "cpu" and not plan.noiseless
        if self._as_array:
            self._noise = array_noise(plan, key, self.run, self.lattice)
        else:
            self._noise = tensor_noise(plan, key, self.run, self.lattice, share=slice(0, 0) if plan.noiseless else None)
        self._secret = key.noise_of(self.run)

    def _read_ledger(self) -> None:
        if self._ledger is not None:
            self._nonces = list(self._ledger.resume().nonces)
            self._digests = {release - 1: one["sum"] for release, one in self._ledger.metrics("train").items()}

    @property
    def count(self) -> int:
        """How many rounds are released."""
        return len(self._nonces)

    @property
    def unrecorded(self) -> bool:
        """Whether nothing outlives the process."""
        return self._ledger is None

    def release(self, total: Tensor, round: int, rows: Rows) -> Tensor | None:
        """`total` with the noise of `round`; None, and no noise, if the round is on record with another sum.

        Args:
            total: the sum of the round in steps of the lattice, int64; it is changed. Without noise (σ = 0) any float64 numbers.
            round: from 0, at most `count`.
            rows: the examples in it.

        Returns:
            The noised sum, in steps of the lattice; on record before it is here.

        Raises:
            ValueError: as the ledger does.
        """
        steps: Any = total.numpy() if self._as_array else total.double()
        digest = "" if self._ledger is None else self._digest(steps, round)
        if round < self.count:
            if not digest or digest != self._digests[round]:
                return None
            self._add_noise(steps, round, join=lambda _: self._nonces[round])
        else:
            self._nonces.append(self._release_first(steps, rows, digest))
            self._digests[round] = digest
        return torch.from_numpy(steps) if isinstance(steps, np.ndarray) else steps

    def _release_first(self, steps: Any, rows: Rows, digest: str) -> int:
        ledger, round = self._ledger, self.count
        if ledger is None:
            return self._add_noise(steps, round)
        attempt = ledger.plan_round(round, [str(i) for i in rows])
        try:
            record = partial(ledger.record_aggregated, round, attempt)
            nonce = self._add_noise(steps, round, attempt=attempt, record=record)
            ledger.record_released(round, attempt, b"", metrics={"sum": digest})
        except BaseException as error:
            with suppress(Exception):  # the first error is the one to show
                ledger.skip(round, f"the release failed: {type(error).__name__}")
            self._read_ledger()
            raise
        return nonce

    def _add_noise(self, steps: Any, round: int, *, attempt: int = 0, **options: Any) -> int:
        return self._noise.add(steps, earlier=self._nonces[:round], attempt=attempt, **options)

    def _digest(self, steps: Any, round: int) -> str:
        """What tells the sum of a round from others to whoever knows the key, and says nothing to anybody else."""
        whole = sum_digest(steps, self._secret) if isinstance(steps, Tensor) else steps
        name = hashlib.sha256(f"sum of round {round}".encode() + self._secret).digest()
        return hashlib.blake2b(np.ascontiguousarray(whole).tobytes(), key=name, digest_size=16).hexdigest()
