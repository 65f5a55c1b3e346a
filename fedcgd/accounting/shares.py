"""ε against those who hold a part of the noise: K keepers each add a share of it, and some of them may work with the server.

Each keeper's share has variance (ζσ)² / (K − t − d): t = `colluding` may work with the server and d = `away` may be missing in a
round, and what is left still has the planned variance (ζσ)². Against j colluding keepers, in rounds with r keepers present, at
least r − j shares are unknown: the noise multiplier is σ·√((r − j) / (K − t − d)), and the accounting of the plan applies to it.

That this holds although keepers come and go is Theorem 1 of docs/explanations/keepers.md. It covers mechanisms whose C⁻¹ has no
positive entry off its diagonal and whose keepers cancel their own share by the gap rule (`fedcgd.keepers.keeper.share_terms`).
With all keepers in every round nothing of it is needed: then the unknown noise is the plan's, times √((K − j) / (K − t)).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedcgd.accounting.accountant import Accountant
from fedcgd.accounting.guarantee import Guarantee

LEAST_STEPS = 3.0
"""Standard deviations, in steps of the lattice and per √K, below which shares that are rounded one by one tell too much."""

_NEGLIGIBLE = 2.0**-40  # the part of δ that rounding may take without being added to it


@dataclass(frozen=True, kw_only=True)
class NoiseShares:
    """The noise of K parties, of which t may work with the server and d may miss a round.

    Args:
        keepers: K.
        colluding: t.
        away: d.

    Raises:
        ValueError: if K − t − d < 1, so that no share would be left, or a number is not whole or negative.
    """

    keepers: int
    colluding: int
    away: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be a whole number, at least 0, got {value!r}")
        if self.full < 1:
            raise ValueError(
                f"keepers − colluding − away must be at least 1, got {self.keepers} − {self.colluding} − {self.away}: nobody's "
                "noise would be left; add keepers, or let fewer of them collude or be away"
            )

    @property
    def full(self) -> int:
        """K − t − d: how many shares together have the planned variance."""
        return self.keepers - self.colluding - self.away

    @property
    def louder(self) -> float:
        """√(K / (K − t − d)): the noise of all shares together, in that of a trusted server."""
        return math.sqrt(self.keepers / self.full)

    def share(self, stddev: float) -> float:
        """The standard deviation of one keeper's share.

        Args:
            stddev: that of the plan, ζσ.
        """
        return stddev / math.sqrt(self.full)

    def noise_multiplier(self, planned: float, *, colluding: int, present: int | None = None) -> float:
        """σ that is left against `colluding` keepers in rounds with at least `present` of them; 0 if no share is left.

        Args:
            planned: σ of the plan.
            colluding: j, the keepers whose shares the adversary knows.
            present: r, the fewest keepers of a released round; K − d by default, the fewest that the protocol allows.

        Raises:
            ValueError: for j or r out of range.
        """
        if not 0 <= colluding <= self.keepers:
            raise ValueError(f"colluding must be in 0 … {self.keepers}, got {colluding}")
        least = self.keepers - self.away
        present = least if present is None else present
        if not least <= present <= self.keepers:
            raise ValueError(f"a released round has {least} … {self.keepers} keepers, got {present}")
        return planned * math.sqrt(max(0, present - colluding) / self.full)


@dataclass(frozen=True, kw_only=True)
class KeeperGuarantee:
    """What is promised against the server, any nodes but the user's own, and some of the keepers.

    Attributes:
        keepers: K, all of them.
        colluding: how many of them work with the server.
        epsilon: ε; infinite where no share of the noise is left.
        guarantee: with all that it rests on; None where no share of the noise is left.
    """

    keepers: int
    colluding: int
    epsilon: float
    guarantee: Guarantee | None

    def __str__(self) -> str:
        who = f"the server, all other nodes and {self.colluding} of {self.keepers} keepers"
        if self.guarantee is None:
            return f"against {who}: no guarantee, as against a trusted server that turns out not to be one"
        return f"against {who}: {self.guarantee}"

    def to_description(self) -> dict[str, Any]:
        """All of it as JSON-able values; ε of None is infinite."""
        return {
            "keepers": self.keepers,
            "colluding": self.colluding,
            "epsilon": None if self.guarantee is None else self.epsilon,
            "guarantee": None if self.guarantee is None else self.guarantee.to_description(),
        }


def guarantees_by_collusion(
    accountant: Accountant,
    shares: NoiseShares,
    *,
    noise_multiplier: float,
    delta: float,
    released: int | None = None,
    present: Sequence[int] = (),
) -> list[KeeperGuarantee]:
    """What holds against the server with 0, 1, … K colluding keepers, the largest number last.

    Args:
        accountant: that of the plan.
        shares: how the noise is divided.
        noise_multiplier: σ of the plan.
        delta: δ of each guarantee.
        released: so many rounds are published; all by default.
        present: the number of keepers of each released round, as recorded; by default the fewest that the protocol allows.

    Raises:
        ValueError: for values out of range.
    """
    fewest = min(present, default=None)
    found = []
    for colluding in range(shares.keepers + 1):
        sigma = shares.noise_multiplier(noise_multiplier, colluding=colluding, present=fewest)
        one = accountant.epsilon(noise_multiplier=sigma, delta=delta, released=released) if sigma else None
        epsilon = math.inf if one is None else one.epsilon
        found.append(KeeperGuarantee(keepers=shares.keepers, colluding=colluding, epsilon=epsilon, guarantee=one))
    return found


def log_rounding_distance(*, parties: int, size: int, rounds: int, share_steps: float) -> float:
    """The logarithm of the total variation distance that a run gains because each of m shares is rounded by itself (Lemma 3).

    Given their sum, the fractional parts of m − 1 of the m shares are within this distance of independent uniform numbers, so
    that the sum of the rounded shares is that close to a function of the unrounded sum. It is −∞ for one share.

    Args:
        parties: m, the honest keepers.
        size: coordinates of the sum.
        rounds: of the run.
        share_steps: the standard deviation of a share, in steps of the lattice.
    """
    if parties == 1:
        return -math.inf
    decay = 2 * math.pi**2 * share_steps**2 / parties
    # 2·Σ_j exp(−decay·j²) is below 2·Σ_j exp(−decay·j), a geometric series.
    log_excess = math.log(2) - decay - math.log1p(-math.exp(-decay))
    log_density = math.log((parties - 1) * size) + log_excess
    if log_density > 0:
        return 0.0
    return min(0.0, math.log(rounds) + log_density)  # (e^x − 1)/2 ≤ x for x ≤ 1


def check_rounding(
    shares: NoiseShares, *, size: int, rounds: int, share_steps: float, epsilon: float, delta: float
) -> None:
    """Raise ValueError unless rounding share by share costs a negligible part of δ.

    The distance of Lemma 3 adds (1 + e^ε)·distance to δ; here that must be below 2⁻⁴⁰·δ, so that δ stays what it is.

    Args:
        shares: how the noise is divided.
        size: coordinates of the sum.
        rounds: of the run.
        share_steps: the standard deviation of one share, in steps of the lattice.
        epsilon: the largest ε that is promised.
        delta: its δ.
    """
    least = LEAST_STEPS * math.sqrt(shares.keepers)
    if not share_steps >= least:
        raise ValueError(
            f"a keeper's share of the noise has a standard deviation of {share_steps:.3g} steps of the lattice, and among "
            f"{shares.keepers} keepers at least {least:.3g} are needed; take a smaller ε"
        )
    distance = log_rounding_distance(parties=shares.keepers, size=size, rounds=rounds, share_steps=share_steps)
    added = distance + max(0.0, epsilon) + math.log1p(math.exp(-max(0.0, epsilon)))  # log of (1 + e^ε)·distance
    if added > math.log(_NEGLIGIBLE) + math.log(delta):
        raise ValueError(
            f"rounding {shares.keepers} shares one by one would cost e^{added:.0f} of δ, which is not negligible compared with "
            f"δ = {delta:g} at ε = {epsilon:g}; take a smaller ε or a larger δ"
        )
