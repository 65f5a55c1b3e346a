"""The releases of a run of central training: where it stands, and what happens between a round's sum and its noised sum."""

import hashlib
import secrets
import warnings
from collections.abc import Sequence
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
from fedcgd.release import NoiseMode, array_noise, lattice_of
from fedcgd.release.tensors import joint_nonce, tensor_noise
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
        device: where sums are at first; noise follows one that is elsewhere (a module that was moved).
        ranks: the processes that release together.
        mode: where earlier noise comes from, as in `NoiseSource`.

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
        mode: NoiseMode | None = None,
    ) -> None:
        self._ranks, self.recorded = ranks, record is not None
        lattice = lattice_of(plan, size, relative_loss=GRID_LOSS)
        self.grid = None if plan.noiseless else lattice
        """What sums are whole steps of; None without noise."""
        self.step = 1.0 if plan.noiseless else lattice.step
        self._size = size
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

        self._nonces: list[int] = []
        self._digests: dict[int, str] = {}
        share = slice(0, 0) if plan.noiseless else ranks.share(size)
        self._share, self._gathers = share, ranks.count > 1 and not plan.noiseless

        def begin(run: str, device: torch.device) -> None:
            self.run, self._secret, self._device = run, key.noise_of(run), device
            self._as_array = device.type == "cpu" and share is None
            if self._as_array:
                self._noise = array_noise(plan, key, run, lattice, mode)
            else:
                self._noise = tensor_noise(plan, key, run, lattice, mode, share)

        def joint(nonce: int, attempt: int) -> int:
            """A nonce that is bound to what every rank has summed."""
            parts = ranks.all_of(nonce)
            return (
                nonce if len(parts) == 1 else joint_nonce(key, self.run, parts, earlier=self._nonces, attempt=attempt)
            )

        self._begin, self._joint = begin, joint
        begin(ranks.from_first(opened), device)
        self._read_ledger()

    def resume(self, run: str, nonces: Sequence[int]) -> None:
        """Go on with the run of a checkpoint, whose first rounds had these `nonces`.

        Raises:
            ValueError: if this is another run, which has a record or has released rounds, or its record lacks some of the rounds.
        """
        if not self.recorded and not self.count:
            self._begin(run, self._device)
            self._nonces = [*nonces]
        elif run != self.run:
            raise ValueError("the checkpoint is of another run than the record: give the record= of its run")
        elif self._nonces[: len(nonces)] != [*nonces]:
            raise ValueError(
                f"the checkpoint is of round {len(nonces)}, and the record has {self.count} rounds: it is an older copy. Put the "
                "latest one back"
            )

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

    @property
    def nonces(self) -> tuple[int, ...]:
        """Of each released round: which of its noises was used."""
        return tuple(self._nonces)

    def zeros(self, device: torch.device) -> Tensor:
        """An empty sum: in steps of the grid, int64, or float64 without noise."""
        return torch.zeros(self._size, dtype=torch.float64 if self.grid is None else torch.int64, device=device)

    def release(self, total: Tensor, round: int, rows: Rows) -> Tensor | None:
        """`total` of all ranks with the noise of `round`; None, and no noise, if the round is on record with another sum.

        Args:
            total: this rank's sum, begun with `zeros`; it is changed.
            round: from 0, at most `count`.
            rows: the examples in it.

        Returns:
            The noised sum, in units of `step`; on record before it is here.

        Raises:
            ValueError: as the ledger does.
        """
        if total.device != self._device:
            self._begin(self.run, total.device)  # the same noise, and buffers are made again
        self._ranks.add_up(total)
        steps: Any = total.to(torch.int64).numpy() if self._as_array else total.double()
        digest = "".join(dict.fromkeys(self._ranks.all_of(self._digest(total, round)))) if self.recorded else ""
        if round < self.count:
            if not self._ranks.from_first(lambda: digest != "" and digest == self._digests[round]):
                warnings.warn(
                    f"round {round} is released already, and computing it again gave another sum (another model or data set, or "
                    f"an operation that is not deterministic): rounds {round} … {self.count - 1} stay released, with their part "
                    "of ε, and training goes on after them",
                    stacklevel=4,
                )
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
        round, attempt, together = self.count, 0, self._ranks.from_first

        def join(nonce: int) -> int:
            """The nonce of the round, which is bound to what every rank has summed, once it is on record."""
            joint = self._joint(nonce, attempt)

            def recorded() -> int:
                if ledger is not None:
                    ledger.record_aggregated(round, attempt, joint)
                return joint

            return together(recorded)

        if not self.recorded:
            self._nonces.append(self._noise.add(steps, earlier=self._nonces, attempt=0, join=join))
            return
        try:
            attempt = together(lambda: ledger.plan_round(round, [str(i) for i in rows]))
            nonce = self._noise.add(steps, earlier=self._nonces, attempt=attempt, join=join)
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
