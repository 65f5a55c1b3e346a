"""A plan in one line: what most tests do not care about has a default."""

from fedcgd import Mechanism, Participation, Plan


def make_plan(
    mechanism: Mechanism,
    participation: Participation,
    *,
    clip_norm: float = 1.0,
    noise_multiplier: float = 2.0,
    delta: float = 1e-5,
) -> Plan:
    return Plan(
        mechanism=mechanism,
        participation=participation,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        delta=delta,
    )
