"""What server and node say to each other when users evaluate a model: which metrics, and what a user adds for them.

A metric with bounds [0, B] becomes (2/√q)·(value/B − 1/2), one coordinate of q, so that a user adds a vector of norm at most 1.
Apart from the server's part (`evaluation`), because a node is a new process for each message, and need not load an accountant.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType

from fedcgd.noise.quantisation import Integers, Lattice
from fedcgd_flower.layout import Flat, Layout
from fedcgd_flower.messages import TASK, TrainTask, train_message

_NAMES, _BOUNDS = "metrics", "bounds"


def scale_of(metrics: int) -> float:
    """So that values in [−1/2, 1/2], one for each metric, make a vector of norm at most 1."""
    return 2 / math.sqrt(metrics)


def answer(metrics: Mapping[str, Any], bounds: Mapping[str, float], grid: Lattice) -> Integers:
    """What a user adds to the sum, in steps, shape (number of metrics,). Guarantee: its norm is at most 1.

    Raises ValueError if a metric is missing or no number.
    """
    values = np.empty(len(bounds))
    for i, (name, bound) in enumerate(bounds.items()):
        value = float(metrics[name]) if name in metrics else math.nan
        if math.isnan(value):
            raise ValueError(f"the evaluate function must reply {list(bounds)}, each a number; {name!r} is none")
        values[i] = min(max(value, 0.0), bound) / bound - 0.5
    return grid.to_steps(
        values * scale_of(len(bounds)) * (1 - 2.0**-40)
    )  # the factor: rounding must not lift the norm above 1


def evaluate_message(
    node_id: int,
    model: Flat,
    config: ConfigRecord,
    task: TrainTask,
    bounds: Mapping[str, float],
    keepers: Mapping[str, ConfigRecord] | None = None,
) -> Message:
    """The request for one node: the model, and the metrics that are wanted, of the task's users."""
    message = train_message(node_id, model, config, task, MessageType.EVALUATE, keepers=keepers)
    message.content.config_records[TASK].update({_NAMES: list(bounds), _BOUNDS: [float(b) for b in bounds.values()]})
    return message


def answers_task(task: TrainTask, metrics: int) -> TrainTask:
    """`task` for what comes back: so many metrics, where the model went out."""
    return replace(task, layout=Layout(("metrics",), ((metrics,),), ("float32",)))


def bounds_of(message: Message) -> dict[str, float]:
    """The metrics that an `evaluate_message` asks for."""
    description = message.content.config_records[TASK]
    return dict(zip(cast(list[str], description[_NAMES]), cast(list[float], description[_BOUNDS]), strict=True))


def is_private_evaluation(message: Message) -> bool:
    """Whether `message` was made by `evaluate_message`."""
    return TASK in message.content.config_records and _NAMES in message.content.config_records[TASK]
