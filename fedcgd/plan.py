"""What runs is what is accounted: one value holds the mechanism, the participation, the noise and the promise."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedcgd.accounting import Accountant, Guarantee, accountant, calibrate
from fedcgd.accounting.guarantee import Proof, check_delta, check_noise_multiplier, rounded_up
from fedcgd.accounting.selection import select_mechanism
from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.own import check_own
from fedcgd.mechanisms.workload import PREFIX_SUMS, Workload
from fedcgd.optimisation.mechanism_json import describe, from_description
from fedcgd.participation import Participation
from fedcgd.quadratic import Quadratic
from fedcgd.support.html import table
from fedcgd.support.numbers import as_clip_norm, as_float
from fedcgd.support.untrusted import MalformedError, Optional, conform


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole run: n releases x̂_t = x_t + ζσ·(C⁻¹Z)_t of sums of updates clipped to ζ = `clip_norm`, at failure probability δ.

    Make one with `calibrated` (σ from a budget), or give σ and read ε from `guarantee`.

    Args:
        mechanism: the matrix C, such as `LambdaCGD(0.9)`.
        participation: who takes part when, over how many rounds.
        clip_norm: ζ, the largest L2 norm of one user's update in one round, in units of the update; 1e-20 to 1e20.
        noise_multiplier: σ, noise per unit of clip norm. With 0 the plan is `noiseless`, for debugging: updates are clipped and
            summed, no noise is added, ε = ∞, and every record says so.
        delta: δ of the whole run, in [1e-300, 1); well below 1 / number of users.

    Raises:
        ValueError: for a number out of range; for a mechanism that the participation's sampling is not accounted for, also
            without noise; and for a mechanism of yours whose noise is not that of its C (`fedcgd.mechanisms.own`).
        TypeError: for what is no mechanism, no participation or no number.

    >>> from fedcgd.mechanisms import DPSGD
    >>> participation = Participation(rounds=100)
    >>> plan = Plan(mechanism=DPSGD(), participation=participation, clip_norm=2.0, noise_multiplier=20, delta=1e-5)
    >>> plan.stddev
    40.0
    >>> f"{plan.guarantee().epsilon:.2f}"
    '1.99'
    """

    mechanism: Mechanism
    participation: Participation
    clip_norm: float
    noise_multiplier: float
    delta: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip_norm", as_clip_norm(self.clip_norm))
        object.__setattr__(self, "noise_multiplier", as_float("noise_multiplier", self.noise_multiplier))
        object.__setattr__(self, "delta", check_delta(self.delta))
        if not 1e-20 <= self.clip_norm <= 1e20:
            raise ValueError(
                f"clip_norm must be between 1e-20 and 1e20, got {self.clip_norm}: beyond, float32 cannot hold the updates; scale "
                "them to a norm near 1"
            )
        if not self.noiseless:
            check_noise_multiplier(self.noise_multiplier)
            if not self.stddev:  # the product can vanish where its factors do not
                raise ValueError(
                    f"clip_norm · noise_multiplier must not vanish, got {self.clip_norm} · {self.noise_multiplier}; take a "
                    "smaller ε"
                )
        self.accountant.check()
        check_own(self.mechanism, self.participation.rounds)

    @staticmethod
    def calibrated(
        mechanism: Mechanism | str,
        participation: Participation,
        *,
        clip_norm: float,
        epsilon: float,
        delta: float,
        curvature: Quadratic | None = None,
        workload: Workload = PREFIX_SUMS,
    ) -> "Plan":
        """The plan with the smallest σ that keeps the whole run within (ε, δ); adjacency: zero out one user.

        Args:
            mechanism: a value such as `LambdaCGD(0.9)`, or a text as on the command line: "lambda-cgd:0.9", "bisr:16", or
                "lambda-cgd" alone, which chooses λ for this participation and budget
                (`fedcgd.accounting.selection.select_mechanism`).
            participation: who takes part when, over how many rounds.
            clip_norm: ζ, the largest L2 norm of one user's update in one round, in units of the update.
            epsilon: the budget ε of the whole run.
            delta: the budget δ of the whole run; well below 1 / number of users.
            curvature: what a mechanism given as text is fitted to, for example "noise-curve:8", "blt:2" or "lambda-cgd". It must
                come from public data.
            workload: the momentum and the schedule of SGD that a mechanism given as text is chosen for
                (`fedcgd.mechanisms.schedule.scheduled_workload`).

        Raises:
            ValueError: if no σ keeps the budget, the text names no mechanism, or the sampling is not accounted for with it.

        >>> participation = Participation(rounds=210, min_separation=21)
        >>> plan = Plan.calibrated("lambda-cgd:0.9", participation, clip_norm=1.0, epsilon=8, delta=1e-5)
        >>> f"{plan.noise_multiplier:.3f}"
        '4.803'
        """
        if isinstance(mechanism, str):
            mechanism = select_mechanism(
                mechanism, participation, epsilon=epsilon, delta=delta, workload=workload, curvature=curvature
            )
        guarantee = calibrate(mechanism, participation, epsilon=epsilon, delta=delta)
        return Plan(
            mechanism=mechanism,
            participation=participation,
            clip_norm=clip_norm,
            noise_multiplier=guarantee.noise_multiplier,
            delta=delta,
        )

    @property
    def noiseless(self) -> bool:
        """Whether σ is 0: a run for debugging, in which nothing is private."""
        return self.noise_multiplier == 0

    @property
    def stddev(self) -> float:
        """ζσ: the standard deviation, in units of the update, that one coordinate of Z has on the wire."""
        return self.clip_norm * self.noise_multiplier

    @property
    def accountant(self) -> Accountant:
        """What answers for ε, δ and σ of this mechanism and participation."""
        return accountant(self.mechanism, self.participation)

    def _repr_html_(self) -> str:
        """What runs, and its guarantee, as two tables, for notebooks."""
        runs = {
            "mechanism": self.mechanism,
            "participation": self.participation,
            "clip norm ζ": self.clip_norm,
            "noise multiplier σ": self.noise_multiplier,
        }
        return table(runs) + self.guarantee()._repr_html_()

    def guarantee(self, *, released: int | None = None) -> Guarantee:
        """An upper bound on ε, for the whole run or for its first `released` rounds; adjacency: zero out one user.

        Args:
            released: how many rounds have been published; None for all.

        Returns:
            The guarantee at the plan's δ. That of a part of a run holds under its `condition` only; where that may be false,
            that of the whole run holds. Without noise ε is ∞.

        Raises:
            ValueError: if `released` is not in 0 … n.
        """
        return self._whole if released in (None, self.participation.rounds) else self._guarantee(released)

    @cached_property
    def _whole(self) -> Guarantee:
        """That of the whole run, which every round asks for."""
        return self._guarantee(None)

    def _guarantee(self, released: int | None) -> Guarantee:
        if self.noiseless:
            return self._nothing_promised(self.participation.rounds_released(released))
        return self.accountant.epsilon(noise_multiplier=self.noise_multiplier, delta=self.delta, released=released)

    def quick_guarantee(self, *, released: int) -> Guarantee:
        """As `guarantee`, in no time once that of the whole run is known, and less tight: for what is said in every round.

        Args:
            released: how many rounds have been published.

        Raises:
            ValueError: if `released` is not in 0 … n.
        """
        if self.noiseless:
            return self.guarantee(released=released)
        return self.accountant.quick_epsilon(self._whole, released)

    def _nothing_promised(self, released: int) -> Guarantee:
        return Guarantee(
            epsilon=float("inf"),
            delta=self.delta,
            noise_multiplier=0.0,
            sampling=self.participation.sampling,
            rounds=self.participation.rounds,
            released=released,
            proof=Proof("no noise is added"),
        )

    def to_description(self) -> dict[str, Any]:
        """This plan as JSON-able values, from which `from_description` makes it again."""
        participation = self.participation
        return {
            "mechanism": describe(self.mechanism),
            "participation": {
                "rounds": participation.rounds,
                "min_separation": participation.min_separation,
                "max_participations": participation.max_participations,
                "sampling": participation.sampling,
                "sampling_rate": participation.sampling_rate,
                **(
                    {} if participation.warm_start else {"warm_start": False}
                ),  # records of other runs stay as they were
            },
            "clip_norm": self.clip_norm,
            "noise_multiplier": self.noise_multiplier,
            "delta": self.delta,
        }

    @staticmethod
    def from_description(description: dict[str, Any]) -> "Plan":
        """The plan that `to_description` described.

        Args:
            description: what `to_description` returned, perhaps after a way through JSON.

        Raises:
            ValueError: for what it cannot have written, and for more rounds than a run of others may have here.
        """
        described = conform(description, PLAN_FORM, "a plan")
        if (rounds := described["participation"]["rounds"]) > _MOST_ROUNDS:
            raise MalformedError(f"rounds must be at most {_MOST_ROUNDS} in a description of a plan, got {rounds}")
        return Plan(
            mechanism=from_description(described["mechanism"]),
            participation=Participation(**described["participation"]),
            clip_norm=described["clip_norm"],
            noise_multiplier=described["noise_multiplier"],
            delta=described["delta"],
        )


_MOST_ROUNDS = 1_000_000
PLAN_FORM: dict[Any, Any] = {
    "mechanism": {"name": str, str: object},
    "participation": {
        "rounds": int,
        "min_separation": Optional(int),
        "max_participations": Optional((int, None)),
        "sampling": Optional(str),
        "sampling_rate": Optional((float, None)),
        "warm_start": Optional(bool),
    },
    "clip_norm": float,
    "noise_multiplier": float,
    "delta": float,
}
"""What a plan's description has, for `fedcgd.support.untrusted.conform`."""


def plan_differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """`differences` of two plans' descriptions, and the ε of both where the noise is not the same: what people plan with.

    Args:
        before: the description of a plan.
        after: that of another one.
    """
    lines = differences(before, after)
    if before.get("noise_multiplier") != after.get("noise_multiplier"):
        epsilons = [rounded_up(Plan.from_description(each).guarantee().epsilon) for each in (before, after)]
        lines.append(f"so that ε is: {epsilons[0]} → {epsilons[1]}")
    return lines


def differences(before: Any, after: Any, name: str = "") -> list[str]:
    """The settings, nested in dicts, that are not the same, as "name: before → after".

    Args:
        before: a description, such as that of a plan.
        after: another one.
        name: what comes before the names of the settings.

    >>> differences({"clip_norm": 1.0, "delta": 1e-5}, {"clip_norm": 2.0, "delta": 1e-5})
    ['clip_norm: 1.0 → 2.0']
    """
    if before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in sorted(before.keys() | after.keys())
            for line in differences(before.get(key, "nothing"), after.get(key, "nothing"), f"{name}.{key}".lstrip("."))
        ]
    before, after = ("there" if isinstance(value, dict) else value for value in (before, after))
    return [f"{name}: {before} → {after}"]
