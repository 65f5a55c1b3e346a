"""Optimisation: mechanisms whose numbers are found for a given participation and workload; the table of all mechanisms."""

from collections.abc import Callable

Progress = Callable[[int, float], None]
"""Called with (iterations so far, value of the objective)."""
