"""What is chosen by its name, on the command line too: apart from what it chooses, so that help loads no accountant."""

from typing import Literal

LambdaObjective = Literal["rmse", "max-se", "amplified-rmse", "excess", "curvature"]
"""What the λ of λ-CGD makes least."""
