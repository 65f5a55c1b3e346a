"""The plan of a central run, from the arguments that Opacus takes."""

from collections.abc import Callable
from typing import Any

from fedcgd.mechanisms import Mechanism
from fedcgd.optimisation.catalogue import mechanism as spelled
from fedcgd.participation import Participation, Sampling
from fedcgd.plan import Plan


def check_clipping(clipping: str, max_grad_norm: Any) -> None:
    """Raise ValueError for a clipping that no sensitivity is known for."""
    if clipping != "flat":
        raise ValueError(f"clipping must be flat, got {clipping!r}: the sensitivity of no other is accounted for")
    if isinstance(max_grad_norm, list | tuple):
        raise ValueError(  # noqa: TRY004  (Opacus takes a list, with another clipping)
            "max_grad_norm must be one number: several are clipping per layer, and clipping must be flat"
        )


def chosen_sampling(sampling: Sampling | None, poisson_sampling: bool | None) -> Sampling | None:
    """The sampling that was asked for in fedcgd's words or in Opacus'; None if in neither. ValueError if they disagree."""
    if poisson_sampling is None:
        return sampling
    if sampling is not None and poisson_sampling != (sampling == "poisson"):
        raise ValueError(f"poisson_sampling={poisson_sampling} contradicts sampling {sampling!r}; give one of them")
    return sampling or ("poisson" if poisson_sampling else "none")


def plan_for_budget(
    steps: int,
    *,
    mechanism: Mechanism | str,
    sampling: Sampling | None,
    groups: int | None,
    epochs: int,
    clip_norm: float,
    epsilon: float,
    delta: float,
) -> Plan:
    """The plan with the smallest σ for `epochs` epochs of `steps` steps within (`epsilon`, `delta`).

    Without a `sampling` it is Opacus' default, Poisson. Raises ValueError for what is not accounted for.
    """

    def plan(sampling: Sampling) -> Plan:
        return Plan.calibrated(
            mechanism=mechanism,
            participation=participation_of(steps, epochs, sampling, groups),
            clip_norm=clip_norm,
            epsilon=epsilon,
            delta=delta,
        )

    return _by_default_poisson(plan, sampling)


def plan_with_noise(
    steps: int,
    *,
    mechanism: Mechanism | str,
    sampling: Sampling | None,
    groups: int | None,
    epochs: int,
    clip_norm: float,
    noise_multiplier: float,
    delta: float,
) -> Plan:
    """The plan of `epochs` epochs of `steps` steps with σ = `noise_multiplier`, whose ε is at `delta`.

    Without a `sampling` it is Opacus' default, Poisson. Raises ValueError for what is not accounted for.
    """

    def plan(sampling: Sampling) -> Plan:
        participation = participation_of(steps, epochs, sampling, groups)
        made = spelled(mechanism, participation) if isinstance(mechanism, str) else mechanism
        return Plan(
            mechanism=made,
            participation=participation,
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            delta=delta,
        )

    return _by_default_poisson(plan, sampling)


def participation_of(steps: int, epochs: int, sampling: Sampling, groups: int | None) -> Participation:
    """What `epochs` epochs of `steps` steps are."""
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    if (groups is not None) != (sampling == "cyclic-poisson"):
        raise ValueError(f"groups goes with cyclic-poisson sampling, got groups={groups} and sampling {sampling!r}")
    rounds = epochs * steps
    if sampling == "poisson":
        return Participation(rounds=rounds, sampling=sampling, sampling_rate=1 / steps)
    if groups is None:
        return Participation(rounds=rounds, min_separation=steps, sampling=sampling)
    if not 1 <= groups <= steps:
        raise ValueError(f"groups must be between 1 and the {steps} steps of an epoch, got {groups}")
    return Participation(rounds=rounds, min_separation=groups, sampling=sampling, sampling_rate=groups / steps)


def _by_default_poisson(plan: Callable[[Sampling], Plan], sampling: Sampling | None) -> Plan:
    try:
        return plan(sampling or "poisson")
    except ValueError as error:
        if sampling is not None:
            raise
        raise ValueError(_choose_a_sampling(plan, error)) from None


def _choose_a_sampling(plan: Callable[[Sampling], Plan], error: ValueError) -> str:
    """What to tell who left the sampling to Opacus' default, which `error` refused."""
    try:
        sigma = f"noise_multiplier {plan('none').noise_multiplier:.4g}"
    except ValueError as refused:
        sigma = str(refused)
    return (
        f"the default of Opacus is Poisson sampling, and here that cannot be: {error}. Say which sampling to use:\n"
        f"  sampling='none' (also poisson_sampling=False), a fixed split, which anybody may know: {sigma}\n"
        "  sampling='balls-in-bins', each example in one secret random batch of each epoch: less noise, found in seconds to "
        "minutes\n"
        "  sampling='cyclic-poisson' with groups=, for banded mechanisms; sampling='poisson' for DP-SGD"
    )
