"""The releases of a run of central training: where it stands, and what happens between a round's sum and its noised sum."""

import hashlib
import secrets
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedcgd.central.ranks import Ranks
from fedcgd.ledger import Ledger
from fedcgd.noise import NoiseStream
from fedcgd.noise.keys import NoiseKey
from fedcgd.noise.tensors import TensorNormals
from fedcgd.participation.samplings import Rows
from fedcgd.plan import Plan
from fedcgd.release import NoiseMode, RunNoise, lattice_of
from fedcgd.release.run_noise import LatticeNormals
from fedcgd.support.numbers import plural

GRID_LOSS = 2.0**-17
"""Rounding to the lattice moves an example's term by at most this part of the clip norm."""

Value = TypeVar("Value")


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
        ranks: the processes that release together; None is this one alone.
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
        ranks: Ranks | None = None,
        mode: NoiseMode | None = None,
    ) -> None:
        lattice = lattice_of(plan, size, relative_loss=GRID_LOSS)
        self.grid = None if plan.noiseless else lattice
        """What sums are whole steps of; None without noise."""
        self.step = 1.0 if plan.noiseless else lattice.step
        self.recorded = record is not None
        self._size, self._ranks = size, ranks
        self._ledger: Ledger | None = None
        self._nonces: list[int] = []
        self._digests: dict[int, str] = {}
        self._share: slice | None = slice(0, 0) if plan.noiseless else None if ranks is None else ranks.share(size)

        def opened() -> str:
            if record is None:
                return "" if key.simulated else secrets.token_hex(16)
            self._ledger = Ledger.open(record, plan=plan, configuration=configuration, key=key)
            if others := self._ledger.other_runs():
                warnings.warn(
                    f"{plural(len(others), 'earlier run has', 'earlier runs have')} released rounds by this key's register: for "
                    "everybody in one of them and in this one ε composes; fedcgd ledger compose with their ledgers says to what",
                    stacklevel=6,
                )
            return self._ledger.stream_id

        def begin(run: str, device: torch.device) -> None:
            self.run, self._secret, self._device = run, key.noise_of(run), device
            kind = LatticeNormals if device.type == "cpu" else TensorNormals
            normals = kind(NoiseStream(self._secret), lattice, self._share.start if self._share else 0)
            self._noise = RunNoise(plan, key, run, normals, mode, self._share)

        self._begin = begin
        begin(self._from_first(opened), device)
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

        self._nonces, self._digests = self._from_first(read)

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
        ranks, digest = self._ranks, ""
        if ranks is not None:
            ranks.add_up(total)
        steps = total.numpy() if total.device.type == "cpu" else total
        if self.recorded or ranks is not None:
            digest = self._digest(steps, round)
        if ranks is not None:  # so the nonce of one rank is bound to what every one has
            ranks.agree({"the round": round, "its sum": digest})
        if round < self.count:
            if digest != self._digests.get(round):
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
        if ranks is None or self.grid is None:
            return total
        noised = torch.zeros_like(total)  # each rank's own slice has its noise
        noised[self._share] = total[self._share]
        ranks.add_up(noised)
        return noised

    def _release_first(self, steps: Any, rows: Rows, digest: str) -> None:
        ledger: Any = self._ledger  # of rank 0
        round, attempt = self.count, 0

        def on_record(nonce: int) -> int:
            """That of rank 0, once it is on record."""

            def recorded() -> int:
                if ledger is not None:
                    ledger.record_aggregated(round, attempt, nonce)
                return nonce

            return self._from_first(recorded)

        try:
            if self.recorded:
                attempt = self._from_first(lambda: ledger.plan_round(round, [str(i) for i in rows]))
            join = on_record if self.recorded or self._ranks is not None else None
            nonce = self._noise.add(steps, earlier=self._nonces, attempt=attempt, join=join)
            if self.recorded:
                self._from_first(lambda: ledger.record_released(round, attempt, b"", metrics={"sum": digest}))
                self._digests[round] = digest
            self._nonces.append(nonce)
        except BaseException as error:
            if ledger is not None:
                with suppress(Exception):  # the first error is the one to show
                    ledger.skip(round, f"the release failed: {type(error).__name__}")
            if self._ranks is None:
                self._read_ledger()
            raise

    def _from_first(self, make: Callable[[], Value]) -> Value:
        """What `make` returns on rank 0."""
        return make() if self._ranks is None else self._ranks.from_first(make)

    def _digest(self, steps: Any, round: int) -> str:
        """What tells the sum of a round from others to anyone who knows the key, and says nothing to anybody else."""
        name = hashlib.sha256(f"sum of round {round}".encode() + self._secret).digest()
        return hashlib.blake2b(self._noise.digest(steps).tobytes(), key=name, digest_size=16).hexdigest()
