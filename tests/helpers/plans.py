"""A plan in one line: what most tests do not care about has a default."""

from fedcgd import Mechanism, Participation, Plan

DEFAULTS = {"clip_norm": 1.0, "noise_multiplier": 2.0, "delta": 1e-5}


def make_plan(mechanism: Mechanism, participation: Participation, **numbers: float) -> Plan:
    return Plan(mechanism=mechanism, participation=participation, **DEFAULTS | numbers)
