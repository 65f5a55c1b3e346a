"""The chain of reasoning behind an ε, in words and numbers, for the person who has to sign it."""

from dataclasses import dataclass

from fedcgd.accounting import Guarantee, calibrate, compute_epsilon
from fedcgd.accounting.coverage import column_norm, most_bands
from fedcgd.accounting.guarantee import rounded_up
from fedcgd.mechanisms import Mechanism, Normalized
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.optimisation.mechanism_json import describe
from fedcgd.participation import Participation
from fedcgd.support.numbers import as_clip_norm

NOT_COVERED = (
    "Metrics that nodes report and that are forwarded, counts of answers, timing, traffic and logs.",
    "Settings that were chosen by looking at the data, and other runs on the same users: each has an ε of its own "
    "(fedcgd ledger compose adds them up).",
    "The server's operator, and anyone who had the key before it was deleted: they can remove the noise.",
    "Anyone who reads what nodes send before the noise is added. Flower's SuperLink keeps it in its database and journal until "
    "these files are deleted, also after the run.",
    "A node that hosts many users and clips wrongly, or answers in their name.",
    "Copies of the run's ledger that were restored or run side by side.",
    "What a program kept of a round's noised sum that was not released (fedcgd ledger verify counts such sums).",
)
"""What no ε says anything about, a sentence each."""


@dataclass(frozen=True)
class Step:
    """One link: what it is about, what is claimed or assumed, and its number if it has one."""

    title: str
    statement: str
    value: float | None = None


def explain(
    mechanism: Mechanism,
    participation: Participation,
    *,
    clip_norm: float,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    rho: float = 1.0,
) -> tuple[Step, ...]:
    """Every assumption and every number between the updates of one user and the ε of the run, in order.

    Give `epsilon` (then σ is calibrated) or `noise_multiplier`, one of the two. `rho` below 1 says that the mechanism was damped
    by so much for the sampling (`fedcgd.optimisation.damping`). Raises ValueError for both, neither, or a configuration that is
    not accounted for.
    """
    clip_norm = as_clip_norm(clip_norm)
    if epsilon is not None and noise_multiplier is None:
        guarantee = calibrate(mechanism, participation, epsilon=epsilon, delta=delta)
    elif noise_multiplier is not None and epsilon is None:
        guarantee = compute_epsilon(mechanism, participation, noise_multiplier=noise_multiplier, delta=delta)
    else:
        raise ValueError(f"give epsilon or noise_multiplier, one of the two; got {epsilon} and {noise_multiplier}")
    return (
        Step(
            "adjacency",
            f"{guarantee.adjacency[0].upper()}{guarantee.adjacency[1:]}: two runs are compared that differ in one user's "
            "updates alone, all of which are zero in one of them; both directions are covered. "
            f"{participation.scheme.absence} Replacing one user's data by other data counts as two such steps.",
        ),
        Step(
            "unit of privacy",
            "What is protected is a user as a whole, in all of its rounds: everything that is trained and clipped "
            "under one name. A person with two names, or with data under another name too, is protected as two users.",
        ),
        Step(
            "clipping",
            f"Each user's update of a round is scaled to L2 norm at most ζ = {clip_norm:g} before it is summed; an "
            "update that is not finite counts as zero. Clipping must be done where it can be trusted, or repeated "
            "where the updates are summed.",
            clip_norm,
        ),
        Step(
            "participation",
            f"{participation}. The scheduler must never break this, even if users drop out or return.",
            participation.sampling_rate or participation.participations,
        ),
        Step("sampling", participation.scheme.assumption),
        _mechanism(mechanism, participation.rounds, rho),
        _sensitivity(mechanism, participation),
        Step(
            "noise",
            f"σ = {rounded_up(guarantee.noise_multiplier, 6)} (it includes the sensitivity): Z has independent coordinates of "
            f"standard deviation 1, and ζσZ of {rounded_up(clip_norm * guarantee.noise_multiplier, 6)}, in units of the update. "
            "Z comes from a secret key by a cryptographic generator: anyone who has the key can remove the noise.",
            guarantee.noise_multiplier,
        ),
        Step(
            "method",
            f"{guarantee.proof.method}; "
            + (
                "exact up to rounding."
                if guarantee.proof.exact
                else "an upper bound: the truth may be better, not worse."
            ),
        ),
        _confidence(guarantee),
        Step(
            "guarantee",
            f"All models that the run releases, together, are ({rounded_up(guarantee.epsilon, 6)}, {delta:g})-differentially "
            "private for each user. An adversary sees every released model, not the key, knows all other users' data, and "
            "chooses updates and models adaptively.",
            guarantee.epsilon,
        ),
        Step("not covered", f"None of these is in ε. {' '.join(NOT_COVERED)}"),
    )


def _mechanism(mechanism: Mechanism, rounds: int, rho: float) -> Step:
    description = {name: value for name, value in describe(mechanism).items() if isinstance(value, str | int | float)}
    parameters = [f"{name} = {value}" for name, value in description.items() if name not in ("name", "normalize")]
    name = mechanism.name + (f" ({', '.join(parameters)})" if parameters else "")
    columns = " with columns of norm 1" if isinstance(mechanism, Normalized) else ""
    damping = (
        f" C was optimised without a sampling, and its coefficients c_t are multiplied by ρ^t, ρ = {rho:.4g}: under this "
        "sampling less correlation has less error. All that follows is about this C."
        if rho != 1
        else ""
    )
    terms = max(len(mechanism.inverse_row(t, rounds)) for t in {0, rounds - 1})
    return Step(
        "mechanism",
        f"{name}{columns}: round t releases x̂_t = x_t + ζσ·(C⁻¹Z)_t, the sum of the clipped updates and up to {terms} "
        "of the noise vectors Z of this and earlier rounds. All releases together are a function of CX + ζσZ: as "
        f"private as that one Gaussian mechanism, also when updates depend on earlier releases.{damping}",
    )


def _sensitivity(mechanism: Mechanism, participation: Participation) -> Step:
    if most_bands(participation) is not None:
        reach = column_norm(mechanism, participation)
        return Step(
            "sensitivity",
            f"One participation moves CX by at most {reach:.6g}·ζ, the largest norm of a column of C; how many there are, and "
            "whether they overlap, enters below.",
            reach,
        )
    found = sensitivity(mechanism, participation)
    statement = (
        f"One user moves CX by at most {found.value:.6g}·ζ in Frobenius norm. Worst case: {_rounds(found.pattern)} "
        f"({'exact' if found.exact else 'an upper bound'}; {found.method})."
    )
    if hidden := participation.scheme.hidden:
        statement += f" This is for an adversary who knows {hidden}; the method below profits from a secret."
    return Step("sensitivity", statement, found.value)


def _rounds(pattern: tuple[int, ...]) -> str:
    """Rounds, which are counted from 0, as people count them: "rounds 1 and 5"."""
    *others, last = [str(t + 1) for t in pattern]
    named = [*others[:4], "…"] if len(others) > 5 else others
    return f"rounds {', '.join(named)} and {last}" if others else f"round {last}"


def _confidence(guarantee: Guarantee) -> Step:
    risk = guarantee.proof.failure_probability
    if not risk:
        return Step("confidence", "Deterministic: no part of the calculation is random.", 1.0)
    return Step(
        "confidence",
        f"The calculation uses Monte Carlo samples, and they mislead it with probability at most {rounded_up(risk)} over the "
        f"seed; this is part of δ = {guarantee.delta:g}. The seed is a hash of the question, so that nobody chooses it.",
        1 - risk,
    )
