"""What tests of several packages make: a model of one array."""

import numpy as np
from flwr.app import Array, ArrayRecord


def record(values) -> ArrayRecord:
    """A model of one array, float32."""
    return ArrayRecord({"w": Array(np.asarray(values, np.float32))})
