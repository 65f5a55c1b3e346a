"""What one `CorrelatedNoise` was told, checked and with its defaults filled in: the rounds, the loop and the logs read it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import Strategy

from fedcgd.keepers import Keepers
from fedcgd.ledger import JointBudget
from fedcgd.ledger.client_metrics import FORWARDED
from fedcgd.ledger.evaluations import EVALUATION
from fedcgd.ledger.openings import KEEPERS
from fedcgd.noise.keys import NoiseKey
from fedcgd.plan import Plan
from fedcgd_flower.adaptive_clipping import AdaptiveClipping
from fedcgd_flower.cohort import CohortSettings
from fedcgd_flower.evaluation import PrivateEvaluation
from fedcgd_flower.keepers.openings import keepers_description
from fedcgd_flower.layout import BatchNorm
from fedcgd_flower.users import Identity


@dataclass(frozen=True, kw_only=True, repr=False)
class RunSettings:
    """The arguments of `CorrelatedNoise`, by their names there."""

    inner: Strategy
    plan: Plan
    key: NoiseKey
    ledger: Path | None
    cohort: CohortSettings
    budget: JointBudget | None
    identity: Identity
    hosts: Mapping[str, str] | None
    trusted_nodes: bool
    patience: float
    trainable: Collection[str] | None
    batch_norm: BatchNorm
    adaptive_clipping: AdaptiveClipping | None
    evaluation: PrivateEvaluation | None
    forward_client_metrics: bool
    keepers: Keepers | None

    @property
    def evaluation_plan(self) -> Plan | None:
        """That of the private evaluations, if there are any."""
        return None if self.evaluation is None else self.evaluation.plan

    @property
    def indicator_norm(self) -> float:
        """With adaptive clipping, what a user's norm has for the share within the norm; else 0. Raises ValueError as it says."""
        adaptive = self.adaptive_clipping
        return 0.0 if adaptive is None else adaptive.indicator_norm(self.plan.noise_multiplier, self.cohort.size)

    @property
    def wire_plan(self) -> Plan:
        """Of what is summed and noised: with adaptive clipping, of vectors of norm at most 1."""
        return self.plan if self.adaptive_clipping is None else replace(self.plan, clip_norm=1.0)

    @property
    def registered_only(self) -> bool:
        """Whether nodes must be registered by name: where rounds are secret, and nodes are not all the operator's own."""
        plans = [self.plan, self.evaluation_plan or self.plan]
        secret = any(plan.participation.is_secret for plan in plans)
        return secret and not self.trusted_nodes and not self.key.simulated

    def configuration(self, inner: Mapping[str, Any]) -> dict[str, Any]:
        """What the ledger compares when the run goes on, beside the plan; `inner` are the settings of the inner strategy."""
        # With another identity, people would get other ids, and turns beyond their k.
        said: dict[str, Any] = {"cohort_size": self.cohort.size, "identity": self.identity, "inner": inner}
        if self.adaptive_clipping is not None:
            said["adaptive_clipping"] = self.adaptive_clipping.to_description()
        if self.evaluation is not None:  # so that later runs over the same people cannot leave it out
            said[EVALUATION] = self.evaluation.to_description(self.cohort.size)
        if self.forward_client_metrics:  # so that every statement about the run says so, and no resume switches it on
            said[FORWARDED] = True
        if self.keepers is not None:
            said[KEEPERS] = keepers_description(self.keepers)
        return said
