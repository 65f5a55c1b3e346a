"""The plan of a central run, from the arguments that Opacus takes."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import optim

from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.schedule import Schedule, scheduled_workload
from fedcgd.mechanisms.workload import Workload
from fedcgd.optimisation.catalogue import mechanism as named_mechanism
from fedcgd.participation import Participation, scheme_of
from fedcgd.plan import Plan


def plan_from(plan: Plan | None, given: Mapping[str, Any], steps: int) -> Plan:
    """The plan of a run whose epochs have `steps` steps: `plan`, or what the arguments of `make_private` say in its place.

    Args:
        plan: of the caller, or None.
        given: `mechanism`, `noise_multiplier`, `max_grad_norm`, `epochs`, `target_delta`, `sampling`, `poisson_sampling` and
            `groups`; None where they are not given.
        steps: of an epoch.

    Raises:
        ValueError: if something is missing, said twice in different ways, or not accounted for.
        TypeError: if the plan is none.
    """
    if plan is not None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be a fedcgd.plan.Plan, got {type(plan).__name__}; Plan.calibrated makes one")
        planned = {
            "noise_multiplier": plan.noise_multiplier, "max_grad_norm": plan.clip_norm, "target_delta": plan.delta
        }  # fmt: skip
        for name, value in planned.items():
            if given[name] not in (None, value):
                raise ValueError(f"{name}={given[name]} contradicts the plan, which has {value}; leave it out")
        if others := [name for name, value in given.items() if value is not None and name not in planned]:
            raise ValueError(f"the plan says {', '.join(others)} already; leave out the one or the other")
        return plan
    names = ("mechanism", "noise_multiplier", "max_grad_norm", "epochs", "target_delta")
    if missing := [name for name in names if given[name] is None]:
        raise ValueError(
            f"give plan= (Plan.calibrated makes one), or in its place also {', '.join(missing)}: what is accounted for is a "
            "whole run of one mechanism, and not each step by itself as in Opacus"
        )

    def with_noise(participation: Participation) -> Plan:
        mechanism = given["mechanism"]
        return Plan(
            mechanism=_with_its_number(mechanism, participation) if isinstance(mechanism, str) else mechanism,
            participation=participation,
            clip_norm=given["max_grad_norm"],
            noise_multiplier=given["noise_multiplier"],
            delta=given["target_delta"],
        )

    sampling = chosen_sampling(given["sampling"], given["poisson_sampling"])
    return plan_of(with_noise, steps, epochs=given["epochs"], sampling=sampling, groups=given["groups"])


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
    """What `make` makes of `epochs` epochs of `steps` steps. Without a `sampling` it is Opacus' default, Poisson."""
    return make(participation_of(steps, epochs, sampling or "poisson", groups))


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
