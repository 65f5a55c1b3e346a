"""What recorded runs cost the people in them together: ε of any of the runs, and who is counted in which."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fedcgd.accounting import JointGuarantee, PastRun, compose
from fedcgd.ledger.recorded_run import RecordedRun

_ROUNDING = 1e-9


class RunComposition:
    """`runs`, the earliest first, and what any of them cost one user together.

    Whoever was asked in a run is given that run's whole bound. With a secret sampling so is every user that the run might have
    asked: all but those whom its budget refuses. Runs whose secret choices come from the same part of the same key (simulations
    of one seed) count as if their rounds were known: a user's bin is then the same in both, and composition needs independence.
    """

    def __init__(self, runs: Sequence[RecordedRun]) -> None:
        self.runs = sorted(runs, key=lambda run: run.created)
        shared = Counter(run.choices for run in runs)
        self._past = [run.past(known=shared[run.choices] > 1) for run in self.runs]
        self._ids = [run.id for run in self.runs]
        self._alone: dict[tuple[PastRun, float], float] = {}
        self._found: dict[tuple[frozenset[tuple[PastRun, int]], float], JointGuarantee] = {}
        self._groups: dict[tuple[bool, ...], tuple[int, ...]] = {}

    def of(self, user: str | None) -> tuple[int, ...]:
        """The runs, by their places in `runs`, that `user` is counted in; None is somebody who was never asked.

        Users who were asked in the same runs share an answer.
        """
        asked = tuple(user in run.users for run in self.runs)
        if asked not in self._groups:
            inside: list[int] = []
            for i, run in enumerate(self.runs):
                if asked[i] or (run.sampled and self.admits(i, inside)):
                    inside.append(i)
            self._groups[asked] = tuple(inside)
        return self._groups[asked]

    def admits(self, i: int, inside: Sequence[int]) -> bool:
        """Whether a user who was in the runs `inside` may be in run i, by that run's budget, if it has one.

        True if the ledger of a run that the budget counts is not here: then nobody can say.
        """
        budget = self.runs[i].budget
        if budget is None or self.missing(i):
            return True
        return self.within_budget(i, [*(j for j in inside if self._ids[j] in budget["after"]), i])

    def within_budget(self, i: int, inside: Sequence[int]) -> bool:
        """Whether the runs `inside` together are within the budget that run i was begun with, if it has one."""
        budget = self.runs[i].budget
        return budget is None or self.epsilon(inside, budget["delta"]) <= float(budget["epsilon"]) * (1 + _ROUNDING)

    def epsilon(self, inside: Sequence[int], delta: float) -> float:
        """ε at `delta` of the runs `inside` as planned; of one alone, its own, which no composition makes less tight."""
        if len(inside) > 1 or self.runs[inside[0]].plan.noiseless or self.runs[inside[0]].shared:
            return self.guarantee(inside, delta).epsilon
        (past,) = (self._past[i] for i in inside)
        key = past, delta
        if key not in self._alone:
            self._alone[key] = past.accountant.epsilon(
                noise_multiplier=past.noise_multiplier, delta=delta, released=None
            ).epsilon
        return self._alone[key]

    def missing(self, i: int) -> list[str]:
        """The ids of the earlier runs that run i counted and that are not here."""
        budget = self.runs[i].budget
        return [] if budget is None else sorted(set(budget["after"]) - set(self._ids))

    def guarantee(self, inside: Sequence[int], delta: float, *, released: bool = False) -> JointGuarantee:
        """ε at `delta` of the runs `inside` together: of all their planned rounds, or of those `released`."""
        past = [self._past[i] for i in inside]
        if released:
            past = [replace(one, released=self.runs[i].released) for one, i in zip(past, inside, strict=True)]
        if any(self.runs[i].plan.noiseless for i in inside):
            return JointGuarantee(
                epsilon=math.inf,
                delta=delta,
                runs=len(past),
                released=sum(one.rounds_released for one in past),
                method="a run without noise (σ = 0, for debugging) promises nothing",
                exact=True,
            )
        key = (frozenset(Counter(past).items()), delta)
        if key not in self._found:
            self._found[key] = compose(past, delta=delta)
        return self._found[key]
