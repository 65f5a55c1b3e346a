"""A run whose releases are also evaluated on its users' data has two ledgers, and one ε of both together."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedcgd.accounting import JointGuarantee, PastRun, compose
from fedcgd.accounting.shares import NoiseShares
from fedcgd.plan import Plan

EVALUATION = "evaluation"  # in the training's configuration: the plan of its evaluations, and what is measured
EVALUATION_OF = "evaluation_of"  # in the evaluations' configuration: the stream of the training


def evaluation_ledger(path: Path) -> Path:
    """Where the evaluations of the run recorded at `path` are recorded."""
    return path.with_name(f"{path.name}.evaluation")


def evaluation_plan(configuration: Mapping[str, Any]) -> Plan | None:
    """The plan of the evaluations of a run with this configuration; None if it has none."""
    found = configuration.get(EVALUATION)
    return None if found is None else Plan.from_description(found["plan"])


def with_evaluations(training: Plan, evaluations: Plan) -> JointGuarantee:
    """ε of a whole training and all its planned evaluations, for a user who is in both, at the training's δ."""
    runs = [
        PastRun(mechanism=plan.mechanism, participation=plan.participation, noise_multiplier=plan.noise_multiplier)
        for plan in (training, evaluations)
    ]
    return compose(runs, delta=training.delta)


def with_evaluations_by_collusion(training: Plan, evaluations: Plan, shares: NoiseShares) -> tuple[float, ...]:
    """ε of `with_evaluations` against the server with 0, 1, … all keepers; ∞ where no share of the noise is left."""

    def left(plan: Plan, colluding: int) -> Plan:
        return replace(plan, noise_multiplier=shares.noise_multiplier(plan.noise_multiplier, colluding=colluding))

    found = []
    for colluding in range(shares.keepers + 1):
        plans = left(training, colluding), left(evaluations, colluding)
        found.append(math.inf if any(plan.noiseless for plan in plans) else with_evaluations(*plans).epsilon)
    return tuple(found)
