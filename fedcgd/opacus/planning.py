"""The plan of a central run, from the arguments that Opacus takes."""

from collections.abc import Callable
from typing import Any

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


def plan_of(
    make: Callable[[Participation], Plan],
    steps: int,
    *,
    epochs: int,
    sampling: Sampling | None,
    groups: int | None,
) -> Plan:
    """What `make` makes of `epochs` epochs of `steps` steps. Without a `sampling` it is Opacus' default, Poisson.

    Raises ValueError for what is not accounted for.
    """

    def plan(sampling: Sampling) -> Plan:
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


def participation_of(steps: int, epochs: int, sampling: Sampling, groups: int | None) -> Participation:
    """What `epochs` epochs of `steps` steps are."""
    if not isinstance(epochs, int):
        raise TypeError(f"epochs must be a whole number, got {epochs!r}")
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
