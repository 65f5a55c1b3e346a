"""What the operator reads: one line a round, in Flower's manner. Counts of users are for the operator's log only."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, MetricRecord

from fedcgd.participation import Participation
from fedcgd.participation.cohorts import History
from fedcgd.plan import Plan


@dataclass
class RoundReport:
    """What happened to one try of a round."""

    round: int
    rounds: int
    asked: int = 0
    nodes: int = 0
    answered: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """Users who were asked and are not in the sum, by cause."""
    failure: str = ""
    """Why the round was not released; empty if it was."""
    epsilon: float = 0.0
    evaluated: list[str] = field(default_factory=list)

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
            parts.append(f"ε ≤ {self.epsilon:.4g} so far")
        return f"[ROUND {self.round + 1}/{self.rounds}] " + " | ".join(parts + self.evaluated)


def metrics_text(where: str, metrics: MetricRecord) -> str:
    """One part of a line: what was measured, and where."""
    numbers = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )
    return f"{where}: {', '.join(numbers)}"


def config_text(config: ConfigRecord | None) -> str:
    """A configuration as Flower logs it, without bytes."""
    if not config:
        return "(empty)"
    return ", ".join(f"{name}: {'<bytes>' if isinstance(value, bytes) else value}" for name, value in config.items())


def too_few(
    participation: Participation,
    round: int,
    cohort_size: int,
    nodes: Mapping[str, int],
    history: History,
    silent: int,
    refused: int,
) -> str:
    """Why no cohort could be drawn: who is there, who of them may take part, and what keeps the others."""
    k, b = participation.participations, participation.min_separation
    used_up = sum(history.counts.get(user, 0) >= k and history.last_rounds[user] != round for user in nodes)
    held_back = sum(
        history.counts[user] < k and 0 < round - history.last_rounds[user] < b
        for user in nodes
        if user in history.counts
    )
    parts = [
        f"{len(nodes)} users are there at {len(set(nodes.values()))} nodes and {len(nodes) - used_up - held_back} of them may "
        f"take part, of {cohort_size} for a cohort",
        f"{held_back} took part less than {b} rounds ago" if held_back else "",
        f"{used_up} have taken part {k} times, which is all they may" if used_up else "",
        f"{silent} nodes have not said which users they host" if silent else "",
        f"{refused} users were claimed by a node that may not speak for them" if refused else "",
    ]
    return "; ".join(part for part in parts if part)


def epsilon_text(plan: Plan, released: int) -> str:
    """ε of the planned run and, of a part of it, also the smaller one and the condition under which that holds."""
    whole = plan.guarantee()
    if released >= plan.participation.rounds:
        return str(whole)
    if not released:
        return f"nothing is released; the planned run: {whole}"
    so_far = plan.quick_guarantee(released=released)
    return (
        f"the planned run: {whole}; for the {released} rounds released, ε ≤ {so_far.epsilon:.4g}, provided that nobody looked at "
        "a released model to decide that the run ends here"
    )
