"""The releases of a run that has a ledger, each step on record before the next."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from fedcgd.ledger import Ledger, Run
from fedcgd.noise.keys import NoiseKey
from fedcgd.noise.quantisation import Integers, Lattice
from fedcgd.plan import Plan
from fedcgd.release.run_noise import RunNoise, array_noise


class ReleaseProtocol:
    """The rounds of `plan` on the record of `ledger`: planned, noised and released in turn, or abandoned.

        releases = ReleaseProtocol(ledger, plan, key)
        attempt = releases.plan_round(users)              # users are counted, and only then asked
        total = …                                         # train, sum
        releases.add_noise(total, attempt, lattice)       # the nonce is on record before there is noise of it
        releases.record(attempt, model, state)            # only now may the model leave the process

    Args:
        ledger: open for writing.
        plan: that of the ledger; its clip norm may be another one, where what is summed is in units of it.
        key: that of the run.
    """

    def __init__(self, ledger: Ledger, plan: Plan, key: NoiseKey) -> None:
        self.ledger = ledger
        self._plan, self._key = plan, key
        self._noise: RunNoise | None = None
        self._pending: int | None = None
        self._consumed = False
        self._nonces: tuple[int, ...] = ()
        self.resume()

    @property
    def count(self) -> int:
        """How many rounds are released, and so the number of the round that comes next."""
        return len(self._nonces)

    def resume(self) -> Run:
        """Where the ledger says that the run stands; from here on these releases stand there too."""
        run = self.ledger.resume()
        self._nonces = run.nonces
        self._pending, self._consumed = None, False
        return run

    def plan_round(self, users: Collection[str]) -> int:
        """The attempt under which the next round is tried with these users, whose turn it is now on record.

        Args:
            users: the ids of those who are asked.

        Raises:
            ValueError: as `Ledger.plan_round` does.
        """
        return self.ledger.plan_round(self.count, users)

    def add_noise(self, total: Integers, attempt: int, lattice: Lattice) -> None:
        """Add the round's noise to its sum, in place, under a nonce that is on record before.

        Args:
            total: the sum in steps of `lattice`, int64.
            attempt: what `plan_round` returned.
            lattice: that of `total`.

        Raises:
            ValueError: as `Ledger.record_aggregated` does; nothing is added then.
        """
        if self._noise is None or self._noise.lattice != lattice:
            self._noise = array_noise(self._plan, self._key, self.ledger.stream_id, lattice)
        record = partial(self.ledger.record_aggregated, self.count, attempt)
        self._pending = self._noise.add(total, earlier=self._nonces, attempt=attempt, record=record)

    def leave_noise_to_others(self, nonce: int) -> None:
        """Other parties are about to add the noise. From here on the round is released or consumed: it is not tried again.

        Args:
            nonce: what stands for the round's, and is on record (`Ledger.record_opening`).
        """
        self._pending, self._consumed = nonce, True

    @property
    def is_consumed(self) -> bool:
        """Whether others were asked for the noise of the round in flight, so that it is consumed if it is abandoned."""
        return self._consumed

    def record(
        self,
        attempt: int,
        model: bytes | memoryview,
        state: bytes | memoryview = b"",
        layout: str = "",
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """The round is released, with the model and what else the ledger keeps of it.

        Args:
            attempt: what `plan_round` returned.
            model: as in `Ledger.record_released`.
            state: as in `Ledger.record_released`.
            layout: as in `Ledger.record_released`.
            metrics: as in `Ledger.record_released`.

        Raises:
            ValueError: before the round has its noise, and as `Ledger.record_released` does.
        """
        if self._pending is None:
            raise ValueError(f"round {self.count} has no noise yet: call add_noise first")
        self.ledger.record_released(self.count, attempt, model, state, layout, metrics)
        self._count_round()

    def skip(self, reason: str) -> None:
        """The round is not released this time: its attempt, if one is in flight, is abandoned with its nonce.

        Args:
            reason: for the record.
        """
        self._pending = None
        self.ledger.skip(self.count, reason)

    def abandon(self, reason: str) -> None:
        """As `skip`, after a failure: what is raised is the failure, not that nothing can be recorded either.

        A round for whose noise others were asked is consumed: it counts as released, without a new model.

        Args:
            reason: for the record.
        """
        if not self._consumed:
            with suppress(Exception):
                self.skip(reason)
            return
        with suppress(Exception):
            self.ledger.spend(self.count, reason)
        self._count_round()

    def _count_round(self) -> None:
        assert self._pending is not None  # noqa: S101
        self._nonces = (*self._nonces, self._pending)
        self._pending, self._consumed = None, False
