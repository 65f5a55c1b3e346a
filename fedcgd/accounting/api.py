"""Entry points: σ from a budget, ε from σ, δ from both, for every sampling."""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal, get_args

from fedcgd.accounting import gaussian, poisson
from fedcgd.accounting.balls_in_bins import deterministic, monte_carlo
from fedcgd.accounting.balls_in_bins.draws import Bins
from fedcgd.accounting.guarantee import Guarantee, rounded_up
from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.sensitivity import Sensitivity, sensitivity
from fedcgd.participation import Participation

Method = Literal["monte-carlo", "deterministic"]
"""How Balls-in-Bins is bounded: by draws, in seconds, with a failure probability; or without any, in minutes, a little higher.
The other samplings draw nothing either way. If none is asked for, it is the second where C = I, since there it is about as
tight and as fast, and the first elsewhere."""

_POISSON = ("poisson", "cyclic-poisson")


def _silent(_: str) -> None:
    pass


def calibrate(
    mechanism: Mechanism,
    participation: Participation,
    *,
    epsilon: float,
    delta: float,
    method: Method | None = None,
    progress: Callable[[str], None] = _silent,
) -> Guarantee:
    """The smallest noise multiplier σ that is proven to keep the whole run within (ε, δ).

    Adjacency: add or remove one user. `progress` hears of the steps of a search under Balls-in-Bins. Raises ValueError for
    impossible targets, and for mechanisms that the sampling is not accounted for.
    """
    gaussian.check_epsilon(epsilon)
    gaussian.check_delta(delta)
    _check_method(method)
    if participation.sampling in _POISSON:
        norm = poisson.column_norm(mechanism, participation)
        found = poisson.poisson_noise_multiplier(epsilon, delta, participation) * norm
        return _poisson_guarantee(participation, norm, epsilon=epsilon, delta=delta, sigma=found)
    if participation.sampling == "balls-in-bins":
        bins = monte_carlo.bins_of(mechanism, participation, participation.rounds)
        method = method or _default_method(bins)
        if method == "deterministic":
            sigma = deterministic.calibrate(bins.gram, epsilon=epsilon, delta=delta, progress=progress)
        else:
            sigma = monte_carlo.calibrate(bins, epsilon=epsilon, delta=delta, progress=progress)
        # Processors differ in the last digits, and a run that goes on elsewhere must find the same σ.
        sigma = float(rounded_up(sigma * (1 + 2e-9), 6))
        return _bins_guarantee(method, epsilon=epsilon, delta=delta, sigma=sigma)
    reach = sensitivity(mechanism, participation)
    sigma = gaussian.sigma(epsilon=epsilon, delta=delta) * reach.value
    return _gaussian_guarantee(participation, reach, epsilon=epsilon, delta=delta, sigma=sigma)


def compute_epsilon(
    mechanism: Mechanism,
    participation: Participation,
    *,
    noise_multiplier: float,
    delta: float,
    released: int | None = None,
    method: Method | None = None,
    progress: Callable[[str], None] = _silent,
) -> Guarantee:
    """An upper bound on ε for the whole run, or when only the first `released` rounds have been published.

    The number of rounds must not depend on what they released. Under Balls-in-Bins a part of a run is a calculation of its own,
    in seconds. Raises ValueError for δ or σ out of range, and for mechanisms that the sampling is not accounted for.
    """
    gaussian.check_delta(delta)
    _check_noise_multiplier(noise_multiplier)
    released = participation.rounds_released(released)
    _check_method(method)
    if participation.sampling in _POISSON:
        norm = poisson.column_norm(mechanism, participation)
        found = 0.0
        if released != 0:
            found = poisson.poisson_epsilon(delta, noise_multiplier / norm, participation, released=released)
        return _poisson_guarantee(participation, norm, epsilon=found, delta=delta, sigma=noise_multiplier)
    if participation.sampling == "balls-in-bins" and released != 0:
        method = method or _default_method(monte_carlo.bins_of(mechanism, participation, released))
        found = _bins_epsilon(mechanism, participation, noise_multiplier, delta, method, progress, released)
        return _bins_guarantee(method, epsilon=found, delta=delta, sigma=noise_multiplier)
    reach = sensitivity(mechanism, participation, released=released)
    found = gaussian.epsilon(sigma=noise_multiplier / reach.value, delta=delta) if reach.value else 0.0
    return _gaussian_guarantee(participation, reach, epsilon=found, delta=delta, sigma=noise_multiplier)


def compute_delta(
    mechanism: Mechanism,
    participation: Participation,
    *,
    noise_multiplier: float,
    epsilon: float,
    released: int | None = None,
    method: Method | None = None,
    progress: Callable[[str], None] = _silent,
) -> Guarantee:
    """An upper bound on δ at `epsilon` ≥ 0, for the whole run, or when only the first `released` rounds have been published.

    The number of rounds must not depend on what they released. Never 0 once a round is released: no noise with tails gives that.
    Raises ValueError for ε or σ out of range, and for mechanisms that the sampling is not accounted for.
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be at least 0, got {epsilon}")
    _check_noise_multiplier(noise_multiplier)
    released = participation.rounds_released(released)
    _check_method(method)
    if participation.sampling in _POISSON:
        norm = poisson.column_norm(mechanism, participation)
        found = 0.0
        if released != 0:
            found = poisson.poisson_delta(epsilon, noise_multiplier / norm, participation, released=released)
            found = max(found, gaussian.LEAST_DELTA)
        return _poisson_guarantee(participation, norm, epsilon=epsilon, delta=found, sigma=noise_multiplier)
    if participation.sampling == "balls-in-bins" and released != 0:
        bins = monte_carlo.bins_of(mechanism, participation, released)
        method = method or _default_method(bins)
        if method == "deterministic":
            found = deterministic.delta(bins.gram, sigma=noise_multiplier, epsilon=epsilon, progress=progress)
        else:
            found = monte_carlo.delta(bins, sigma=noise_multiplier, epsilon=epsilon)
        found = max(found, gaussian.LEAST_DELTA)
        return _bins_guarantee(method, epsilon=epsilon, delta=found, sigma=noise_multiplier)
    reach = sensitivity(mechanism, participation, released=released)
    found = 0.0
    if reach.value:
        found = max(gaussian.delta(epsilon=epsilon, sigma=noise_multiplier / reach.value), gaussian.LEAST_DELTA)
    return _gaussian_guarantee(participation, reach, epsilon=epsilon, delta=found, sigma=noise_multiplier)


def _gaussian_guarantee(
    participation: Participation, reach: Sensitivity, *, epsilon: float, delta: float, sigma: float
) -> Guarantee:
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=sigma,
        sampling=participation.sampling,
        method="exact Gaussian mechanism" + ("" if reach.exact else " on an upper bound of the sensitivity"),
        sensitivity=reach.value,
        exact=reach.exact and participation.sampling == "none",
    )


def _default_method(bins: Bins) -> Method:
    return "deterministic" if bins.are_independent else "monte-carlo"


@lru_cache(maxsize=16)  # every round of a run asks for that of the whole
def _bins_epsilon(
    mechanism: Mechanism,
    participation: Participation,
    noise_multiplier: float,
    delta: float,
    method: Method,
    progress: Callable[[str], None],
    released: int,
) -> float:
    bins = monte_carlo.bins_of(mechanism, participation, released)
    if method == "deterministic":
        return deterministic.epsilon(bins.gram, sigma=noise_multiplier, delta=delta, progress=progress)
    return monte_carlo.epsilon(bins, sigma=noise_multiplier, delta=delta, progress=progress)


def _bins_guarantee(method: Method, *, epsilon: float, delta: float, sigma: float) -> Guarantee:
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=sigma,
        sampling="balls-in-bins",
        method=monte_carlo.METHOD if method == "monte-carlo" else deterministic.METHOD,
        failure_probability=monte_carlo.FAILURE if method == "monte-carlo" else 0.0,
    )


def _poisson_guarantee(
    participation: Participation, norm: float, *, epsilon: float, delta: float, sigma: float
) -> Guarantee:
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=sigma,
        sampling=participation.sampling,
        method=poisson.METHOD,
        sensitivity=norm,
    )


def _check_noise_multiplier(noise_multiplier: float) -> None:
    if not 0 < noise_multiplier < float("inf"):
        raise ValueError(
            f"noise_multiplier must be positive and finite, got {noise_multiplier}; without noise there is no privacy"
        )


def _check_method(method: str | None) -> None:
    if method is not None and method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
