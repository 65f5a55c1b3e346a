"""What nodes, keepers and server must agree on before anything opens: who disagrees on any of it opens nothing."""

import hashlib
import json
import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from fedcgd.accounting.shares import NoiseShares, check_rounding
from fedcgd.keepers.identities import SUITE_NAME, Keepers
from fedcgd.ledger.verification import with_evaluations
from fedcgd.mechanisms import Mechanism, Normalized, Toeplitz
from fedcgd.noise import STREAM
from fedcgd.plan import Plan
from fedcgd.release import lattice_of
from fedcgd.support.untrusted import Optional, clean, conform

PROTOCOL = "fedcgd keepers 2"

Kind = Literal["training", "evaluation"]
"""What is summed: updates, or what users measure of a released model."""

TRAINING: Kind = "training"
EVALUATION: Kind = "evaluation"

_RUN = re.compile(r"[A-Za-z0-9._-]{0,64}")  # it is in logs of keepers, who look there for what the server asks


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What is summed in the rounds of one kind, and how. `sums_of` chooses it.

    Args:
        plan: of what is summed. Its `clip_norm` is the bound on one user's vector on the wire.
        size: coordinates of the sum.
        bits: 32 or 64, the length of the residues that updates, masks and shares are sent as.

    Raises:
        ValueError: for a plan that keepers cannot make noise for, and for numbers out of range.
    """

    plan: Plan
    size: int
    bits: int

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or self.bits not in (32, 64):
            raise ValueError(f"bits must be 32 or 64, got {self.bits!r}")
        if not isinstance(self.size, int) or not 1 <= self.size <= 2**32:
            raise ValueError(f"size must be at least 1 and at most 2³², got {self.size!r}")
        check_plan(self.plan)


@dataclass(frozen=True, kw_only=True)
class Agreement(Sums):
    """One run, as all parties must see it, and one kind of its sums: both are bound to every sealed seed.

    The context of a run is the same for both kinds, so that a party which keeps to one context keeps to one run.

    Args:
        plan: as in `Sums`, like `size` and `bits`: those of this kind.
        keepers: who adds noise.
        run: the run's id, one word. Two runs with one id would have the same noise.
        kind: which sums.
        other: those of the other kind; None in a run whose models are not evaluated by users, and so has training sums only.

    Raises:
        ValueError: for a plan that keepers cannot make noise for, for plans that together cost more than they allow, and if no
            lattice is right for their shares.
    """

    keepers: Keepers
    run: str
    kind: Kind = TRAINING
    other: Sums | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.run, str) or not _RUN.fullmatch(self.run):
            raise ValueError(
                f"a run's id has at most 64 letters, digits, dots, dashes and underscores; got {self.run!r}"
            )
        if self.kind not in get_args(Kind):
            raise ValueError(f"sums are of one of {list(get_args(Kind))}, got {self.kind!r}")
        if self.kind == EVALUATION and self.other is None:
            raise ValueError("evaluations belong to a training: without its plan nobody can say what both cost")
        training, *evaluations = self._sums
        plans = training.plan, *(sums.plan for sums in evaluations)
        most, delta = self.keepers.epsilon, self.keepers.delta
        if most is not None and delta is not None and (cost := _epsilon(plans, delta)) > most:
            costs = "the plans of training and evaluations together have" if evaluations else "the plan has"
            raise ValueError(
                f"{costs} ε = {cost:.6g} at δ = {delta:g}, and the keepers' file allows {most:g}: plan with more noise or "
                "fewer rounds, or agree on another file with all parties"
            )
        shares = self.keepers.shares
        for sums in (training, *evaluations):
            check_rounding(
                shares,
                size=sums.size,
                rounds=sums.plan.participation.rounds,
                share_steps=shares.share(sums.plan.stddev) / step_of(sums.plan, sums.size, shares),
                epsilon=_epsilon(plans, training.plan.delta),
                delta=training.plan.delta,
            )

    @property
    def _sums(self) -> tuple[Sums, ...]:
        """Those of the training, and then those of the evaluations if there are any."""
        if self.other is None:
            return (self,)
        return (self, self.other) if self.kind == TRAINING else (self.other, self)

    def of(self, kind: Kind) -> "Agreement":
        """The same run for its sums of this kind.

        Args:
            kind: which sums.

        Raises:
            ValueError: if the run has none of this kind.
        """
        if kind == self.kind:
            return self
        if self.other is None:
            raise ValueError(f"this run has no sums of kind {kind!r}, and nothing of that kind is masked or opened")
        own = Sums(plan=self.plan, size=self.size, bits=self.bits)
        return replace(self, **_fields(self.other), kind=kind, other=own)

    @property
    def stream(self) -> str:
        """What a keeper's noise for this kind is drawn from, under its key: the two kinds share none.

        It is a function of the run and the kind, and of nothing else that anybody says: an id of its own for the evaluations
        could be that of the training.
        """
        return self.run if self.kind == TRAINING else f"{self.run}{self.kind}"

    @property
    def step(self) -> float:
        """The step of the lattice, in units of the update."""
        return step_of(self.plan, self.size, self.keepers.shares)

    @property
    def share_stddev(self) -> float:
        """The standard deviation of Z in one keeper's share, in units of the update."""
        return self.keepers.shares.share(self.plan.stddev)

    @property
    def context(self) -> bytes:
        """SHA-256 of the protocol, the run and everything that decides how private it is."""
        return hashlib.sha256(_text(self.to_description()).encode()).digest()

    def info(self, round: int, attempt: int, present: tuple[str, ...]) -> bytes:
        """What a seed is bound to when it is sealed: context, kind, round, attempt and the keepers of this round.

        Args:
            round: the round, from 0.
            attempt: the try of the round, from 0.
            present: the names of the round's keepers, sorted.

        Raises:
            ValueError: for a round after the plan's last, and for keepers that may not do a round.
        """
        if not 0 <= round < self.plan.participation.rounds:
            raise ValueError(f"round must be in 0 … {self.plan.participation.rounds - 1}, got {round}")
        if not 0 <= attempt < 2**32:
            raise ValueError(f"attempt must be at least 0 and below 2³², got {attempt}")
        self.keepers.check_present(present)
        return self.context + json.dumps([self.kind, round, attempt, *present]).encode()

    def to_description(self) -> dict[str, Any]:
        """The run as JSON-able values, whatever the kind; of the keepers the digest, because everybody has their file."""
        training, *evaluations = self._sums
        described = {
            "protocol": PROTOCOL,
            "seal": SUITE_NAME,
            "noise": STREAM,
            **self._described(training),
            "keepers": self.keepers.digest,
            "run": self.run,
        }
        for sums in evaluations:  # one at most
            described[EVALUATION] = self._described(sums)
        return described

    def _described(self, sums: Sums) -> dict[str, Any]:
        step = step_of(sums.plan, sums.size, self.keepers.shares)
        return {"plan": sums.plan.to_description(), "size": sums.size, "step": step, "bits": sums.bits}

    @staticmethod
    def from_description(description: dict[str, Any], keepers: Keepers, kind: Kind = TRAINING) -> "Agreement":
        """The agreement that `to_description` described, for one kind of sums.

        Args:
            description: what another party says.
            keepers: those that this party knows of.
            kind: which sums this party is asked for.

        Raises:
            ValueError: for another protocol or other keepers, for what describes no agreement, and for a kind that it has not.
        """
        other_version = ValueError(
            f"this party speaks {PROTOCOL} ({SUITE_NAME}, noise {STREAM}), and the other another version; the same version of "
            "fedcgd has to be installed everywhere"
        )
        if conform(description, {"protocol": str, str: object}, "the agreement")["protocol"] != PROTOCOL:
            raise other_version
        described = conform(description, _DESCRIPTION, "the agreement")
        if described["keepers"] != keepers.digest:
            raise ValueError(
                f"the server's keepers have digest {clean(described['keepers'], 16)}, and those here {keepers.digest[:16]}: "
                "all parties need the same keepers.toml"
            )
        training = Agreement(
            **_fields(_described_sums(described)),
            keepers=keepers,
            run=described["run"],
            other=_described_sums(described[EVALUATION]) if EVALUATION in described else None,
        )
        agreement = training.of(kind)
        if _text(agreement.to_description()) != _text(description):
            raise other_version
        return agreement


def _text(description: dict[str, Any]) -> str:
    """The same for a description before and after its way through JSON, which knows no tuples."""
    return json.dumps(description, sort_keys=True)


_SUMS = {"plan": dict, "size": int, "bits": int, "step": float}
_DESCRIPTION = {
    **_SUMS, "protocol": str, "seal": str, "noise": str, "keepers": str, "run": str, EVALUATION: Optional(_SUMS)
}  # fmt: skip


def _described_sums(described: dict[str, Any]) -> Sums:
    return Sums(plan=Plan.from_description(described["plan"]), size=described["size"], bits=described["bits"])


def _fields(sums: Sums) -> dict[str, Any]:
    return {"plan": sums.plan, "size": sums.size, "bits": sums.bits}


def agree(
    plan: Plan, *, size: int, keepers: Keepers, run: str, users: int, evaluation: Sums | None = None
) -> Agreement:
    """The agreement for a run's training.

    Args:
        plan: of what is summed.
        size: coordinates of the sum.
        keepers: who adds noise.
        run: the run's id, one word. Two runs with one id would have the same noise.
        users: the most users in a round.
        evaluation: the sums of its evaluations on users' data, by `sums_of`; None if there are none.

    Raises:
        ValueError: as `Agreement`, and if no lattice holds the noise.
    """
    training = sums_of(plan, size=size, keepers=keepers, users=users)
    return Agreement(**_fields(training), keepers=keepers, run=run, other=evaluation)


def sums_of(plan: Plan, *, size: int, keepers: Keepers, users: int) -> Sums:
    """How vectors are summed under `plan`.

    Residues have 32 bits if the largest sum and its noise fit, else 64; what does not fit spoils a release, never its privacy.

    Args:
        plan: of what is summed.
        size: coordinates of the sum.
        keepers: who adds noise.
        users: the most users in a round.

    Raises:
        ValueError: as `Sums`, and if no lattice holds the noise.
    """
    check_plan(plan)
    row = longest_row(plan.mechanism, plan.participation.rounds)
    # Twelve standard deviations of the released row: 10⁻³² of a normal's draws are beyond.
    reach = users * plan.clip_norm + 12 * plan.stddev * keepers.shares.louder * row
    return Sums(plan=plan, size=size, bits=32 if reach < 2**31 * step_of(plan, size, keepers.shares) else 64)


@lru_cache(maxsize=8)
def step_of(plan: Plan, size: int, shares: NoiseShares) -> float:
    """The step of the lattice, in units of the update: that which a trusted server would take for as much noise.

    Every party finds it by itself. On a far finer lattice noise would be coarser than the sums, on a far coarser one rounding
    would show.

    Args:
        plan: of what is summed.
        size: coordinates of the sum.
        shares: how the noise is divided.

    Raises:
        ValueError: if no lattice holds the noise.
    """
    return lattice_of(replace(plan, noise_multiplier=plan.noise_multiplier * shares.louder), size).step


def check_plan(plan: Plan) -> None:
    """Raise ValueError, with the remedy, unless keepers can make the noise of `plan`."""
    if plan.noiseless:
        raise ValueError("keepers add noise, and this plan has none (σ = 0): leave keepers= out while you debug")
    if plan.participation.is_secret:
        raise ValueError(
            f"keepers are for sampling 'none', got {plan.participation.sampling!r}: the server draws the rounds of users, and so "
            "nothing is hidden from it that amplification could count on"
        )
    if not math.isfinite(longest_row(plan.mechanism, plan.participation.rounds)):
        raise ValueError(
            f"keepers make the noise of mechanisms whose C⁻¹ has no positive entry off its diagonal (dp-sgd, lambda-cgd, bisr, "
            f"normalized or not); got {plan.mechanism}: nothing else is proven for shares that come and go"
        )


@lru_cache(maxsize=8)  # every message of a run asks for the same
def _epsilon(plans: tuple[Plan, ...], delta: float) -> float:
    """ε of all `plans` together at `delta`, for somebody who is in all of them."""
    training, *evaluations = (replace(plan, delta=delta) for plan in plans)
    return with_evaluations(training, *evaluations).epsilon if evaluations else training.guarantee().epsilon


@lru_cache(maxsize=8)
def longest_row(mechanism: Mechanism, rounds: int) -> float:
    """A bound on the norm of the weights of a keeper's share in any round, whichever rounds it was in; ∞ if there is no proof.

    To leave out rounds moves the weight of one to earlier ones, so that their sum does not grow where rows of C⁻¹ have sums of at
    least 0. The bound decides what fits and what is called too long, never how private it is.

    Args:
        mechanism: the matrix C.
        rounds: n, the releases of the run.
    """
    inner = mechanism.mechanism if isinstance(mechanism, Normalized) else mechanism
    if not isinstance(inner, Toeplitz):  # every row would have to be looked at, which takes O(n³)
        return math.inf
    with np.errstate(all="ignore"):  # numbers of others may overflow, and are refused then
        row = inner.inverse_coefficients(rounds)  # the others are shorter
    if not np.isfinite(row).all() or (row[1:] > 0).any():
        return math.inf
    longest = math.hypot(float(row[0]), float(row[1:].sum()))
    return longest * float(mechanism.column_norms(rounds).max()) if isinstance(mechanism, Normalized) else longest
