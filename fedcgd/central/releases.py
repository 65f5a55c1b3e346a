"""The releases of a run of central training: where it stands, and what happens between a round's sum and its noised sum."""

import hashlib
import secrets
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcgd.central.ranks import Ranks
from fedcgd.ledger import Ledger
from fedcgd.noise.keys import NoiseKey
from fedcgd.noise.tensors import sum_digest
from fedcgd.participation.samplings import Rows
from fedcgd.plan import Plan
from fedcgd.release import array_noise, lattice_of
from fedcgd.release.tensors import tensor_noise
from fedcgd.support.numbers import plural

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
        record: the path of the ledger, which rank 0 keeps; None keeps what is released in memory alone.
        configuration: what else defines the run, for the ledger.
        device: where sums are.
        ranks: the processes that release together.

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
        ranks: Ranks,
    ) -> None:
        self._ranks, self.recorded = ranks, record is not None
        self.lattice = lattice_of(plan, size, relative_loss=GRID_LOSS)
        self._ledger: Ledger | None = None

        def opened() -> str:
            if record is None:
                return "" if key.simulated else secrets.token_hex(16)
            self._ledger = Ledger.open(record, plan=plan, configuration=configuration, key=key)
            if others := self._ledger.other_runs():
                warnings.warn(
                    f"{plural(len(others), 'earlier run has', 'earlier runs have')} released rounds by this key's register: for "
                    "everybody in one of them and in this one ε composes; fedcgd ledger compose with their ledgers says to what",
                    stacklevel=5,
                )
            return self._ledger.stream_id

        self.run = ranks.from_first(opened)
        self._nonces: list[int] = []
        self._digests: dict[int, str] = {}
        self._read_ledger()
        self._share = slice(0, 0) if plan.noiseless else ranks.share(size)
        self._gathers = ranks.count > 1 and not plan.noiseless
        self._as_array = device.type == "cpu" and self._share is None
        if self._as_array:
            self._noise = array_noise(plan, key, self.run, self.lattice)
        else:
            self._noise = tensor_noise(plan, key, self.run, self.lattice, share=self._share)
        self._secret = key.noise_of(self.run)

    def _read_ledger(self) -> None:
        def read() -> tuple[list[int], dict[int, str]]:
            ledger = self._ledger
            if ledger is None:
                return self._nonces, self._digests
            digests = {release - 1: one["sum"] for release, one in ledger.metrics("train").items()}
            return list(ledger.resume().nonces), digests

        self._nonces, self._digests = self._ranks.from_first(read)

    @property
    def count(self) -> int:
        """How many rounds are released."""
        return len(self._nonces)

    def release(self, total: Tensor, round: int, rows: Rows) -> Tensor | None:
        """`total` of all ranks with the noise of `round`; None, and no noise, if the round is on record with another sum.

        Args:
            total: this rank's sum in steps of the lattice, int64; it is changed. Without noise (σ = 0) any float64 numbers.
            round: from 0, at most `count`.
            rows: the examples in it.

        Returns:
            The noised sum, in steps of the lattice; on record before it is here.

        Raises:
            ValueError: as the ledger does.
        """
        self._ranks.add_up(total)
        digest = self._digest(total, round) if self.recorded else ""
        steps: Any = total.numpy() if self._as_array else total.double()
        if round < self.count:
            if not self._ranks.from_first(lambda: digest != "" and digest == self._digests[round]):
                return None
            self._noise.add(steps, earlier=self._nonces[:round], attempt=0, join=lambda _: self._nonces[round])
        else:
            self._release_first(steps, rows, digest)
        noised: Tensor = torch.from_numpy(steps) if self._as_array else steps
        if self._gathers:  # each rank's own slice has its noise
            parts = torch.zeros_like(noised)
            parts[self._share] = noised[self._share]
            self._ranks.add_up(parts)
            return parts
        return noised

    def _release_first(self, steps: Any, rows: Rows, digest: str) -> None:
        ledger: Any = self._ledger  # of rank 0
        round, together = self.count, self._ranks.from_first
        if not self.recorded:
            nonce = self._noise.add(steps, earlier=self._nonces, attempt=0, join=lambda nonce: together(lambda: nonce))
            self._nonces.append(nonce)
            return

        def record(nonce: int) -> int:
            ledger.record_aggregated(round, attempt, nonce)
            return nonce

        try:
            attempt = together(lambda: ledger.plan_round(round, [str(i) for i in rows]))
            nonce = self._noise.add(
                steps, earlier=self._nonces, attempt=attempt, join=lambda nonce: together(lambda: record(nonce))
            )
            together(lambda: ledger.record_released(round, attempt, b"", metrics={"sum": digest}))
            self._nonces.append(nonce)
            self._digests[round] = digest
        except BaseException as error:
            if ledger is not None:
                with suppress(Exception):  # the first error is the one to show
                    ledger.skip(round, f"the release failed: {type(error).__name__}")
            if self._ranks.count == 1:
                self._read_ledger()
            raise

    def _digest(self, total: Tensor, round: int) -> str:
        """What tells the sum of a round from others to whoever knows the key, and says nothing to anybody else."""
        name = hashlib.sha256(f"sum of round {round}".encode() + self._secret).digest()
        return hashlib.blake2b(sum_digest(total, self._secret).tobytes(), key=name, digest_size=16).hexdigest()
