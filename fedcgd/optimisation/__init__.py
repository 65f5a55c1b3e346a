"""Optimisation: mechanisms whose numbers are found for a given participation and workload; the table of all mechanisms."""

from collections.abc import Callable
from contextvars import ContextVar

Progress = Callable[[int, float], None]
"""Called with (iterations so far, value of the objective)."""

PROGRESS: ContextVar[Progress] = ContextVar("progress", default=lambda done, value: None)
"""Hears how far the searches of this context are, every 20 iterations and at the end of each."""
