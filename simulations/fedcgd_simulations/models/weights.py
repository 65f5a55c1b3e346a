"""Pretrained weights: from a local folder when there is one, and random, said loudly, when there is none."""

import os
import warnings
from pathlib import Path

WEIGHTS_VARIABLE = "FEDCGD_WEIGHTS"


class RandomWeightsWarning(UserWarning):
    """A model that is usually pretrained starts from random weights."""


def weights_path(name: str) -> Path | None:
    """$FEDCGD_WEIGHTS/`name` if it is there; else None, with a warning that the model starts from random weights."""
    folder = os.environ.get(WEIGHTS_VARIABLE)
    path = Path(folder) / name if folder else None
    if path is not None and path.exists():
        return path
    where = path or f"a folder named by ${WEIGHTS_VARIABLE}"
    warnings.warn(
        f"NO PRETRAINED WEIGHTS for {name}: not found as {where}. The model starts from RANDOM weights, and its accuracy "
        "says nothing about fine-tuning",
        RandomWeightsWarning,
        stacklevel=3,
    )
    return None
