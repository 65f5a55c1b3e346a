"""What became of one try of a round: for the operator's log, and the metrics that go with a release."""

import math
from collections import Counter
from dataclasses import dataclass, field

from flwr.app import MetricRecord

from fedcgd.accounting.guarantee import NO_NOISE
from fedcgd.plan import Plan
from fedcgd_flower.replies import RejectionReason


def guarantee_metrics(plan: Plan, *, released: int) -> MetricRecord:
    """What is told with a release: ε of the whole plan, and of the rounds `released` until then."""
    guarantee = plan.quick_guarantee(released=released)
    whole = plan.guarantee().epsilon
    return MetricRecord(
        {"epsilon": guarantee.epsilon, "epsilon-planned": whole, "delta": guarantee.delta, "releases": released}
    )


@dataclass
class RoundReport:
    """What happened to one try of a round."""

    round: int
    rounds: int
    asked: int = 0
    nodes: int = 0
    answered: int = 0
    lost: Counter[RejectionReason] = field(default_factory=Counter)
    """Users who were asked and are not in the sum, by cause."""
    failure: str = ""
    """Why the round was not released; empty if it was."""
    epsilon: float = 0.0
    delta: float = 0.0
    clipping: str = ""
    """How the clip norm moved, if it adapts."""
    evaluated: list[str] = field(default_factory=list)

    @property
    def noise_alone(self) -> bool:
        """Whether a release has spent ε and learned nothing, because everybody who was asked failed."""
        return bool(self.asked) and not self.answered and not self.failure

    def __str__(self) -> str:
        parts = []
        if self.asked or not self.failure:
            causes = ", ".join(f"{cause}: {count}" for cause, count in sorted(self.lost.items()))
            parts.append(
                f"{self.asked} users asked at {self.nodes} nodes, {self.answered} answered"
                + (f" ({causes})" if causes else "")
            )
        if self.failure:
            parts.append(f"not released: {self.failure}")
        else:
            spent = NO_NOISE if math.isinf(self.epsilon) else f"ε ≤ {self.epsilon:.4g} so far at δ = {self.delta:g}"
            parts.append(spent)
            if self.noise_alone:
                parts.append("nobody answered: what is released is noise alone")
            if self.clipping:
                parts.append(self.clipping)
        return f"[ROUND {self.round + 1}/{self.rounds}] " + " | ".join(parts + self.evaluated)
