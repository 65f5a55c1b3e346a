"""The plan of a central run, from the arguments that Opacus takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import optim

from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.schedule import Schedule, scheduled_workload
from fedcgd.mechanisms.workload import Workload
from fedcgd.optimisation.catalogue import mechanism as named_mechanism
from fedcgd.participation import Participation, scheme_of
from fedcgd.plan import Plan


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """What `make_private` is told of the run, in a plan or beside it."""

    plan: Plan | None
    mechanism: Mechanism | str | None
    noise_multiplier: float | None
    max_grad_norm: float | None
    epochs: int | None
    target_delta: float | None
    sampling: str | None
    poisson_sampling: bool | None
    groups: int | None

    def plan_for(self, steps: int) -> Plan:
        """The plan of a run whose epochs have `steps` steps.

        Raises:
            ValueError: if something is missing, said twice in different ways, or not accounted for.
            TypeError: if the plan is none.
        """
        if self.plan is not None:
            self._check_only_the_plan(self.plan)
            return self.plan
        mechanism, sigma, clip_norm, delta = (
            self.mechanism,
            self.noise_multiplier,
            self.max_grad_norm,
            self.target_delta,
        )
        if mechanism is None or sigma is None or clip_norm is None or self.epochs is None or delta is None:
            names = ("mechanism", "noise_multiplier", "max_grad_norm", "epochs", "target_delta")
            missing = ", ".join(name for name in names if getattr(self, name) is None)
            raise ValueError(
                f"give plan= (Plan.calibrated makes one), or in its place also {missing}: what is accounted for is a whole run "
                "of one mechanism, and not each step by itself as in Opacus"
            )

        def with_noise(participation: Participation) -> Plan:
            return Plan(
                mechanism=_with_its_number(mechanism, participation) if isinstance(mechanism, str) else mechanism,
                participation=participation,
                clip_norm=clip_norm,
                noise_multiplier=sigma,
                delta=delta,
            )

        sampling = chosen_sampling(self.sampling, self.poisson_sampling)
        return plan_of(with_noise, steps, epochs=self.epochs, sampling=sampling, groups=self.groups)

    def _check_only_the_plan(self, plan: Any) -> None:
        """Raise unless `plan` is a plan, and what is given beside it says the same, or nothing."""
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be a fedcgd.plan.Plan, got {type(plan).__name__}; Plan.calibrated makes one")
        planned = {
            "noise_multiplier": plan.noise_multiplier, "max_grad_norm": plan.clip_norm, "target_delta": plan.delta
        }  # fmt: skip
        for name, value in planned.items():
            if getattr(self, name) not in (None, value):
                raise ValueError(f"{name}={getattr(self, name)} contradicts the plan, which has {value}; leave it out")
        others = ("mechanism", "epochs", "sampling", "poisson_sampling", "groups")
        if given := [name for name in others if getattr(self, name) is not None]:
            raise ValueError(f"the plan says {', '.join(given)} already; leave out the one or the other")


def _with_its_number(name: str, participation: Participation) -> Mechanism:
    try:
        return named_mechanism(name, participation)
    except ValueError as error:
        if ":" in name:
            raise
        raise ValueError(
            f"{error}. Which is best follows from a budget: make_private_with_epsilon(mechanism={name!r}, target_epsilon=…) "
            "chooses it, and engine.accountant.plan says what it chose"
        ) from error


def check_clipping(clipping: str, max_grad_norm: Any) -> None:
    """Raise ValueError for a clipping that no sensitivity is known for."""
    if clipping != "flat":
        raise ValueError(f"clipping must be flat, got {clipping!r}: the sensitivity of no other is accounted for")
    if isinstance(max_grad_norm, list | tuple):
        raise ValueError(  # noqa: TRY004  (Opacus takes a list, with another clipping)
            "max_grad_norm must be one number: several are clipping per layer, and clipping must be flat"
        )


def chosen_sampling(sampling: str | None, poisson_sampling: bool | None) -> str | None:
    """The sampling that was asked for in fedcgd's words or in Opacus'; None if in neither. ValueError if they disagree."""
    if poisson_sampling is None:
        return sampling
    if sampling is not None and poisson_sampling != (sampling == "poisson"):
        raise ValueError(f"poisson_sampling={poisson_sampling} contradicts sampling {sampling!r}; give one of them")
    return sampling or ("poisson" if poisson_sampling else "none")


def workload_of(optimizer: optim.Optimizer, schedule: Schedule, rounds: int) -> Workload:
    """What a mechanism without a number is chosen for: SGD's momentum, and the schedule that the caller will set.

    Other optimizers count as SGD without momentum, and so does one whose groups of parameters have different momentum.

    Raises:
        ValueError: for an unknown schedule.
    """
    momenta = (
        {float(group["momentum"]) for group in optimizer.param_groups} if isinstance(optimizer, optim.SGD) else {0.0}
    )
    momentum = momenta.pop() if len(momenta) == 1 else 0.0
    return scheduled_workload(schedule, rounds, momentum=momentum)


def plan_of(
    make: Callable[[Participation], Plan],
    steps: int,
    *,
    epochs: int,
    sampling: str | None,
    groups: int | None,
) -> Plan:
    """What `make` makes of `epochs` epochs of `steps` steps. Without a `sampling` it is Opacus' default, Poisson.

    Raises ValueError for what is not accounted for.
    """

    def plan(sampling: str) -> Plan:
        return make(participation_of(steps, epochs, sampling, groups))

    try:
        return plan(sampling or "poisson")
    except ValueError as error:
        if sampling is not None:
            raise
        try:
            fixed_split = plan("none")
        except ValueError:  # then it is not the sampling that is wrong
            raise error from None
        raise ValueError(
            f"the default of Opacus is Poisson sampling, and here that cannot be: {error}. Say which sampling to use:\n"
            "  sampling='none' (also poisson_sampling=False), a fixed split, which anybody may know: noise_multiplier "
            f"{fixed_split.noise_multiplier:.4g}\n"
            "  sampling='balls-in-bins', each example in one secret random batch of each epoch: less noise, found in seconds to "
            "minutes\n"
            "  sampling='cyclic-poisson' with groups=, for banded mechanisms; sampling='poisson' for DP-SGD"
        ) from None


def participation_of(steps: int, epochs: int, sampling: str, groups: int | None) -> Participation:
    """What `epochs` epochs of `steps` steps are."""
    if not isinstance(epochs, int):
        raise TypeError(f"epochs must be a whole number, got {epochs!r}")
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    if (groups is not None) != scheme_of(sampling).takes_groups:
        raise ValueError(f"groups goes with cyclic-poisson sampling, got groups={groups} and sampling {sampling!r}")
    if groups is not None and not 1 <= groups <= steps:
        raise ValueError(f"groups must be between 1 and the {steps} steps of an epoch, got {groups}")
    return Participation.for_cohorts(sampling, epochs * steps, users=steps, cohort_size=1, min_separation=groups)
