"""Who takes part when: the promise (n, k, b, sampling) that the accounting relies on, and the cohorts that keep it."""

from fedcgd.participation.participation import Participation
from fedcgd.participation.samplings import SAMPLINGS, scheme_of

__all__ = ["SAMPLINGS", "Participation", "scheme_of"]
