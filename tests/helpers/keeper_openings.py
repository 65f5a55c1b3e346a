"""Keepers in memory, what they agree on, and openings of a round."""

import numpy as np
from plans import make_plan

from fedcgd import LambdaCGD, Participation, Plan
from fedcgd.keepers import Agreement, Keeper, Keepers, Opening, agree

SIZE = 300
PLAN = make_plan(LambdaCGD(0.9), Participation(rounds=12, min_separation=3))


def agreement_of(keepers: Keepers, plan: Plan = PLAN, *, run: str = "", size: int = SIZE) -> Agreement:
    return agree(plan, size=size, keepers=keepers, run=run, users=60)


def opening_for(keeper, sent, round=0, attempt=0, present=None, after=None) -> Opening:
    """What `keeper`, or the one of that name, is asked to open."""
    name = keeper if isinstance(keeper, str) else keeper.card.name
    return Opening(
        round=round,
        attempt=attempt,
        present=present or tuple(sent[0].sealed),
        tickets=tuple(one.ticket for one in sent),
        sealed=tuple(one.sealed[name] for one in sent),
        after=after,
    )


def updates(count: int, seed: int = 0, size: int = SIZE) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(-(2**20), 2**20, (count, size)))


def simulated(count: int = 3, colluding: int = 1, away: int = 0) -> tuple[Keepers, list[Keeper]]:
    keepers = Keepers.simulation(7, count, colluding=colluding, away=away, nodes=1)
    return keepers, [Keeper.simulation(keepers, number) for number in range(count)]
