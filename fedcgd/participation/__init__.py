"""Who takes part when: the promise (n, k, b, sampling) that the accounting relies on, and the cohorts that keep it."""

from fedcgd.participation.participation import Participation, Sampling

__all__ = ["Participation", "Sampling"]
