"""What is chosen by its name, on the command line too: apart from what it chooses, so that help loads no accountant."""

from typing import Literal

Method = Literal["monte-carlo", "deterministic"]
"""How Balls-in-Bins is bounded: by draws, in seconds, with a failure probability; or without any, in minutes, a little higher.
Other samplings ignore it. If none is asked for, it is the second where C = I, since there it is about as
tight and as fast, and the first elsewhere."""

LambdaObjective = Literal["rmse", "max-se", "amplified-rmse", "practical", "excess", "curvature"]
"""What the λ of λ-CGD makes least."""
