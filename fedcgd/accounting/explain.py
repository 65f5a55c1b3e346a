"""The chain of reasoning behind an ε, in words and numbers, for whoever has to sign it."""

from dataclasses import dataclass

from fedcgd.accounting import Guarantee, calibrate, compute_epsilon
from fedcgd.accounting.effort import EFFORT
from fedcgd.accounting.guarantee import rounded_up
from fedcgd.mechanisms import Mechanism, Normalized, bandwidth
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.optimisation.catalogue import describe
from fedcgd.participation import Participation
from fedcgd.support.numbers import as_clip_norm

NOT_COVERED = (
    "Metrics that nodes report and that are forwarded, counts of answers, timing, traffic and logs.",
    "Settings that were chosen by looking at the data, and other runs on the same users: each has an ε of its own "
    "(`fedcgd ledger compose` adds them up).",
    "The server's operator, and whoever had the key before it was deleted: they can remove the noise.",
    "Whoever reads what nodes send before the noise is added. Flower's SuperLink keeps it in its database and the journal beside "
    "that, after the run too, until these files are deleted.",
    "A node that hosts many users and clips falsely, or answers in their name.",
    "Copies of the run's ledger that were restored or run side by side.",
    "What a program kept of a round's noised sum that was not released (`fedcgd ledger verify` counts such sums).",
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
            f"{_ADD_OR_REMOVE[participation.sampling]} Replacing one user's data by other data counts as two such steps.",
        ),
        Step(
            "unit of privacy",
            "What is protected is a user as a whole, in all of its rounds: everything that is trained and clipped "
            "under one name. Who has two names, or whose data is also held under another name, is protected as two "
            "users.",
        ),
        Step(
            "clipping",
            f"Each user's update of a round is scaled to L2 norm at most ζ = {clip_norm:g} before it is summed; an "
            "update that is not finite counts as zero. Where the clipping is done must be trusted, or done again by "
            "whoever sums.",
            clip_norm,
        ),
        _participation(participation),
        Step("sampling", _SAMPLING[participation.sampling]),
        _mechanism(mechanism, participation.rounds, rho),
        _sensitivity(mechanism, participation, guarantee),
        Step(
            "noise",
            f"σ = {rounded_up(guarantee.noise_multiplier, 6)} (it includes the sensitivity): Z has independent coordinates of "
            f"standard deviation 1, and ζσZ of {rounded_up(clip_norm * guarantee.noise_multiplier, 6)}, in units of the update. "
            "Z comes from a secret key by a cryptographic generator: whoever has the key can remove the noise.",
            guarantee.noise_multiplier,
        ),
        Step(
            "method",
            f"{guarantee.method}; "
            + ("exact up to rounding." if guarantee.exact else "an upper bound: the truth may be better, not worse."),
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


def _participation(participation: Participation) -> Step:
    n, b, q = participation.rounds, participation.min_separation, participation.sampling_rate
    if participation.sampling == "poisson":
        return Step("participation", f"n = {n} rounds; a user takes part in each with probability q = {q:g}.", q)
    if participation.sampling == "cyclic-poisson":
        return Step(
            "participation",
            f"n = {n} rounds, {b} fixed groups of users; in round t each user of group t mod {b} takes part with "
            f"probability q = {q:g}.",
            q,
        )
    if participation.sampling == "b-min-sep":
        start = (
            "a warm start: the round from which it may is drawn at first, so that cohorts are as large at the start as later"
            if participation.warm_start
            else "all free at the start: every user may take part from the first round"
        )
        return Step(
            "participation",
            f"n = {n} rounds; in each that is at least b = {b} after its last, a user takes part with probability p = {q:g}, in "
            f"{participation.expected_rate:g} of all rounds in the long run; {start}.",
            q,
        )
    k = participation.participations
    if participation.sampling == "random-allocation":
        return Step("participation", f"n = {n} rounds are {k} epochs of {n // k}; in each a user takes part once.", k)
    return Step(
        "participation",
        f"Of n = {n} rounds a user takes part in at most k = {k}, any two of them at least b = {b} rounds apart. The "
        "scheduler must never break this, whoever drops out or returns.",
        k,
    )


_INDEPENDENT_TURNS = (
    "Adding or removing the user altogether has the same ε: nobody else is asked more or less often for it, because each "
    "user's rounds are drawn without regard to the others, and nothing is divided by how many there are."
)

# What zeroing a user's updates says about a user who is not there at all.
_ADD_OR_REMOVE = {
    "none": (
        "A user who is not there at all is another matter where cohorts are filled up: somebody else is asked instead, and "
        "who is asked is not protected here. What a user's data are, and whether they were used, is."
    ),
    "balls-in-bins": _INDEPENDENT_TURNS,
    "poisson": _INDEPENDENT_TURNS,
    "cyclic-poisson": _INDEPENDENT_TURNS,
    "b-min-sep": _INDEPENDENT_TURNS,
    "random-allocation": _INDEPENDENT_TURNS,
}

_SAMPLING = {
    "none": (
        "None is assumed: the adversary may know, and even choose, the rounds in which each user takes part. Nothing "
        "about the cohorts has to be secret or random."
    ),
    "balls-in-bins": (
        "Each user falls in one bin, uniformly at random and independently of the others, before the first round, and "
        "takes part in the rounds of that bin in every epoch: bins are reused, not drawn again. The deployment must "
        "keep the bins secret (nobody who sees a release may see who trained when), must not replace users who are "
        "absent by others (an absent user's update is zero), must not let the number of answers decide whether a "
        "round is released, and must divide by a fixed number."
    ),
    "poisson": (
        "Each user tosses its own coin in each round, independently of everything else. The deployment must keep the "
        "outcomes secret (also the size of the cohort), must not fill up or cut cohorts to a fixed size, must not "
        "replace absent users, and must divide by a fixed number."
    ),
    "cyclic-poisson": (
        "Users are split into groups once, which the adversary may know; in its group's rounds each user tosses its "
        "own coin, independently of everything else. The deployment must keep the outcomes secret (also the size of "
        "the cohort), must not move users between groups, must not fill up or cut cohorts, must not replace absent "
        "users, and must divide by a fixed number."
    ),
    "b-min-sep": (
        "Each user tosses its own coin in each round in which it may take part again, independently of everything else: of other "
        "users, of who is there, and of what was released. The deployment must keep the coins secret (also the size of the "
        "cohort), must let the coin of a user who is drawn but away be spent (it rests as if it had taken part), must "
        "not fill up or cut cohorts, must not replace absent users, and must divide by a fixed number. A limit "
        "to a user's rounds may be kept."
    ),
    "random-allocation": (
        "In each epoch each user draws one of its rounds, uniformly and independently of everything else. The deployment must "
        "keep secret who drew what (also the size of the cohort), must draw anew in each epoch, must not fill up or cut "
        "cohorts to a fixed size, must not replace absent users or give them another round, and must divide by a fixed number."
    ),
}


def _mechanism(mechanism: Mechanism, rounds: int, rho: float) -> Step:
    description = {name: value for name, value in describe(mechanism).items() if isinstance(value, str | int | float)}
    parameters = [f"{name} = {value}" for name, value in description.items() if name not in ("name", "normalize")]
    name = mechanism.name + (f" ({', '.join(parameters)})" if parameters else "")
    columns = " with columns of norm 1" if isinstance(mechanism, Normalized) else ""
    terms = max(len(mechanism.inverse_row(t, rounds)) for t in {0, rounds - 1})
    return Step(
        "mechanism",
        f"{name}{columns}: round t releases x̂_t = x_t + ζσ·(C⁻¹Z)_t, the sum of the clipped updates and up to {terms} "
        "of the noise vectors Z of this and earlier rounds. All releases together are a function of CX + ζσZ: as "
        f"private as that one Gaussian mechanism, also when updates depend on earlier releases.{_damping(rho)}",
    )


def _damping(rho: float) -> str:
    if rho == 1:
        return ""
    return (
        f" C was optimised without a sampling, and its coefficients c_t are multiplied by ρ^t, ρ = {rho:.4g}: under this "
        "sampling less correlation has less error. All that follows is about this C."
    )


def _sensitivity(mechanism: Mechanism, participation: Participation, guarantee: Guarantee) -> Step:
    if participation.sampling in ("poisson", "cyclic-poisson", "random-allocation"):
        reach = guarantee.sensitivity
        bands = bandwidth(mechanism, participation.rounds) if participation.sampling == "random-allocation" else 1
        return Step(
            "sensitivity",
            f"One participation moves CX by at most {'‖C[:, t]‖' if reach is None else f'{reach:.6g}'}·ζ, the largest norm "
            "of a column of C; how many there are enters below"
            + (", and how those of neighbouring epochs overlap." if bands > 1 else "."),
            reach,
        )
    found = sensitivity(mechanism, participation)
    statement = (
        f"One user moves CX by at most {found.value:.6g}·ζ in Frobenius norm. Worst case: {_rounds(found.pattern)} "
        f"({'exact' if found.exact else 'an upper bound'}; {found.method})."
    )
    if participation.sampling == "balls-in-bins":
        statement += " This is for an adversary who knows the bin; the method below profits from the bin being secret."
    if participation.sampling == "b-min-sep":
        statement += (
            " This is for an adversary who knows the coins; the method below profits from the coins being secret."
        )
    return Step("sensitivity", statement, found.value)


def _rounds(pattern: tuple[int, ...]) -> str:
    """Rounds, which are counted from 0, as people count them: "rounds 1 and 5"."""
    numbers = [str(t + 1) for t in pattern]
    if len(numbers) == 1:
        return f"round {numbers[0]}"
    if len(numbers) > EFFORT.answers.named_rounds:
        return f"rounds {', '.join(numbers[:4])}, … and {numbers[-1]}"
    return f"rounds {', '.join(numbers[:-1])} and {numbers[-1]}"


def _confidence(guarantee: Guarantee) -> Step:
    risk = guarantee.failure_probability
    if not risk:
        return Step("confidence", "Deterministic: no part of the calculation is random.", 1.0)
    return Step(
        "confidence",
        f"The calculation draws random numbers, and they mislead it with probability at most {rounded_up(risk)} over their "
        f"seed; this is part of δ = {guarantee.delta:g}. The seed is a hash of the question, so that nobody chooses it"
        + ("; the deterministic method needs none." if guarantee.sampling == "balls-in-bins" else "."),
        1 - risk,
    )
