"""The federated counterpart of a central training run, as a `flwr run` command.

Where the steps divide the examples, and without sampling or with Balls-in-Bins, it releases the same models as the central run,
up to rounding: the same examples are in the same rounds, under the same noise. Otherwise other draws say who takes part.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedcgd.participation import SAMPLINGS
from fedcgd_experiments.point import CentralPoint

_OTHERS = ("steps", "epochs", "split")  # the fields of a point that are no setting of the app


def run_config(point: CentralPoint, *, users: int, data_dir: str | None = None) -> dict[str, Any]:
    """The app's settings under which `users` users, one per training example, are trained as `point` trains.

    `data_dir` is the folder of the task's files, if it is not one of the usual ones.

    Raises ValueError if the app's rounds per epoch, ⌊users / cohort⌋, cannot be the point's steps.
    """
    cohort = users // point.steps
    if not SAMPLINGS[point.sampling].takes_rate and users // cohort != point.steps:
        raise ValueError(
            f"{users} users in cohorts of {cohort} make {users // cohort} rounds an epoch, not {point.steps} steps; "
            "sweep with a larger batch"
        )
    same = {name.replace("_", "-"): value for name, value in asdict(point).items() if name not in _OTHERS}
    return same | {
        "data-dir": "" if data_dir is None else str(Path(data_dir).resolve()),  # the app runs in another folder
        "users": "examples",
        "local-epochs": 0,
        "cohort": cohort,
        "participations": point.epochs,
    }


def flower_command(point: CentralPoint, *, users: int, gpus: float, data_dir: str | None = None) -> str:
    """`flwr run` with the settings of `run_config`, and so much of a GPU for each node."""
    config = run_config(point, users=users, data_dir=data_dir)
    settings = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
    resources = f" --federation-config 'client-resources-num-gpus={gpus:g}'" if gpus else ""
    return f"flwr run simulations --stream{resources} --run-config '{settings}'"
