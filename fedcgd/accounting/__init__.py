"""Accounting: upper bounds on ε, and the noise multiplier that a budget allows."""

from fedcgd.accounting.accountant import Accountant
from fedcgd.accounting.by_sampling import accountant
from fedcgd.accounting.calibration import calibrate, compute_delta, compute_epsilon
from fedcgd.accounting.compose import JointGuarantee, PastRun, compose
from fedcgd.accounting.guarantee import ADJACENCY, Guarantee

__all__ = [
    "ADJACENCY",
    "Accountant",
    "Guarantee",
    "JointGuarantee",
    "PastRun",
    "accountant",
    "calibrate",
    "compose",
    "compute_delta",
    "compute_epsilon",
]
