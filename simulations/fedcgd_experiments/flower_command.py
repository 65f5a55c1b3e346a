"""The federated counterpart of a central training run: the same task, plan and learning rate as a `flwr run` command."""

import json
from typing import Any

from fedcgd_experiments.experiment import Point


def run_config(point: Point, *, users: int) -> dict[str, Any]:
    """The app's settings under which `users` users, one per training example, are trained as `point` trains.

    Raises ValueError if the app's rounds per epoch, ⌊users / cohort⌋, cannot be the point's steps.
    """
    setup = point.setup
    cohort = users // setup.steps
    if setup.sampling in ("none", "balls-in-bins") and users // cohort != setup.steps:
        raise ValueError(
            f"{users} users in cohorts of {cohort} make {users // cohort} rounds an epoch, not {setup.steps} steps; "
            "sweep with a larger batch"
        )
    return {
        "task": point.task,
        "model": point.model or "",
        "mechanism": setup.mechanism,
        "sampling": setup.sampling,
        "epsilon": setup.epsilon,
        "delta": setup.delta,
        "clip-norm": point.clip_norm,
        "cohort": cohort,
        "participations": setup.epochs,
        "learning-rate": point.learning_rate,
        "seed": point.seed,
    }


def flower_command(point: Point, *, users: int, gpus: float) -> str:
    """`flwr run` with the settings of `run_config`, and so much of a GPU for each node."""
    settings = " ".join(f"{name}={json.dumps(value)}" for name, value in run_config(point, users=users).items())
    resources = f" --federation-config 'client-resources-num-gpus={gpus:g}'" if gpus else ""
    return f"flwr run simulations --stream{resources} --run-config '{settings}'"
