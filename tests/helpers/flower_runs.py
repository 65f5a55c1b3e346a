"""A model of four numbers, users who shift it, and a strategy for them."""

import numpy as np
from fake_grid import FakeGrid, FakeNode, is_training
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from shared import record

from fedcgd import LambdaCGD, NoiseKey, Participation, Plan
from fedcgd.keepers import Keepers
from fedcgd.noise import NoiseStream
from fedcgd_flower import CorrelatedNoise, clipped_update_mod, host_users, sequential_training

SIZE = 6
KEY = NoiseKey.simulation(7)
STEP = 2.0**-13  # the largest power of two with STEP·√6 ≤ 0.5/1024
UPDATE = STEP * np.floor(np.full(SIZE, 0.5 / np.sqrt(SIZE)) / STEP)  # all ones, clipped to norm 0.5, on the grid


def on_the_grid(noise: np.ndarray, rounds_and_attempts, key: bytes = KEY.noise) -> np.ndarray:
    """Rows of ζσ·C⁻¹Z and the smoothing noise of their rounds and attempts, rounded to the grid, for ζσ = 1."""
    stream = NoiseStream(key).derive("smoothing")
    smoothing = np.stack([stream.words(t, a, 0, SIZE) / 2.0**39 for t, a in rounds_and_attempts])
    return STEP * np.rint((noise + smoothing) / STEP)


def shifting(amount: float):
    """Local training that moves every coordinate by `amount`."""

    def train(model, user, config, context):
        return record(model["w"].numpy() + np.float32(amount))

    return sequential_training(train)


def hosting(users, training, *, evaluate=None, shared=False, keepers: Keepers | None = None, **options) -> FakeNode:
    """A node of these users, who are trained by `training`, a ClippedSum."""
    app = ClientApp()
    host_users(app, lambda context: list(users), training, evaluate=evaluate, shared=shared, keepers=keepers)
    return FakeNode(app, **options)


def one_user(user: str, trained, mod=clipped_update_mod, **config) -> FakeNode:
    """A node that is one user, whose train function makes `trained` of the model's numbers."""
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context) -> Message:
        new = record(trained(message.content["arrays"]["w"].numpy()))
        return Message(RecordDict({"arrays": new, "metrics": MetricRecord({"num-examples": 3})}), reply_to=message)

    return FakeNode(app, config={"user-id": user} | config)


def node(users, amount: float = 1.0, **options) -> FakeNode:
    return hosting(users, shifting(amount), **options)


def names(count: int, prefix: str = "u") -> list[str]:
    return [f"{prefix}{i:03d}" for i in range(count)]


def two_nodes(count: int = 12) -> FakeGrid:
    users = names(count)
    return FakeGrid({1: node(users[::2]), 2: node(users[1::2])})


PLAN = {
    "mechanism": LambdaCGD(0.8),
    "participation": Participation(rounds=6, min_separation=3),
    "clip_norm": 0.5,
    "noise_multiplier": 2.0,
    "delta": 1e-5,
}


def make(inner=None, **options) -> CorrelatedNoise:
    """A strategy around `inner`; `options` are those of the plan or of the strategy, and differ from small defaults."""
    plan = {name: options.pop(name, default) for name, default in PLAN.items()}
    return CorrelatedNoise(
        FedAvg() if inner is None else inner, Plan(**plan), **{"cohort_size": 4, "key": KEY, "patience": 0.0} | options
    )


def asked_users(grid: FakeGrid) -> list[list[str]]:
    """Users asked in each round, in order."""
    rounds: dict[int, list[str]] = {}
    for message in grid.sent:
        if is_training(message):
            task = message.content["fedcgd"]
            rounds.setdefault(task["round"], []).extend(task["users"])
    return [sorted(rounds[r]) for r in sorted(rounds)]
