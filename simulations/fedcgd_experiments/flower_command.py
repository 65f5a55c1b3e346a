"""The federated counterpart of a central training run, as a `flwr run` command.

Where the steps divide the examples, and without sampling or with Balls-in-Bins, it releases the same models as the central run,
up to rounding: the same examples are in the same rounds, under the same noise. Otherwise other draws say who takes part.
"""

import json
from pathlib import Path
from typing import Any

from fedcgd_experiments.point import CentralPoint


def run_config(point: CentralPoint, *, users: int, data_dir: str | None = None) -> dict[str, Any]:
    """The app's settings under which `users` users, one per training example, are trained as `point` trains.

    `data_dir` is the folder of the task's files, if it is not one of the usual ones.

    Raises ValueError if the app's rounds per epoch, ⌊users / cohort⌋, cannot be the point's steps, and for an
    optimiser whose numbers differ in Flower.
    """
    if point.optimizer != "sgd":
        raise ValueError(f"Flower's {point.optimizer} is not PyTorch's: there is no federated run with the same models")
    cohort = users // point.steps
    if point.sampling in ("none", "balls-in-bins") and users // cohort != point.steps:
        raise ValueError(
            f"{users} users in cohorts of {cohort} make {users // cohort} rounds an epoch, not {point.steps} steps; "
            "sweep with a larger batch"
        )
    return {
        "task": point.task,
        "model": point.model,
        "data-dir": "" if data_dir is None else str(Path(data_dir).resolve()),  # the app runs in another folder
        "users": "examples",
        "local-epochs": 0,
        "mechanism": point.mechanism,
        "sampling": point.sampling,
        "epsilon": point.epsilon,
        "delta": point.delta,
        "clip-norm": point.clip_norm,
        "cohort": cohort,
        "participations": point.epochs,
        "learning-rate": point.learning_rate,
        "optimizer": point.optimizer,
        "momentum": point.momentum,
        "schedule": point.schedule,
        "seed": point.seed,
    }


def flower_command(point: CentralPoint, *, users: int, gpus: float, data_dir: str | None = None) -> str:
    """`flwr run` with the settings of `run_config`, and so much of a GPU for each node."""
    config = run_config(point, users=users, data_dir=data_dir)
    settings = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
    resources = f" --federation-config 'client-resources-num-gpus={gpus:g}'" if gpus else ""
    return f"flwr run simulations --stream{resources} --run-config '{settings}'"
