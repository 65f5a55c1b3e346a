"""A round's request, and replies to it."""

from dataclasses import replace

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedcgd.noise.quantisation import Lattice
from fedcgd_flower.layout import Layout
from fedcgd_flower.messages import (
    TrainTask,
    train_message,
)

LAYOUT = Layout(("w", "b"), ((2, 2), (1,)), ("float32", "float32"))
TASK = TrainTask(round=3, attempt=1, clip_norm=0.5, grid=Lattice(2.0**-20), users=("ann", "bob"), layout=LAYOUT)
ALONE = replace(TASK, users=("ann",))


def request() -> Message:
    return train_message(7, np.zeros(5, np.float32), ConfigRecord({"server-round": 4}), TASK)


def reply_with(update=None, *, task=None, arrays=None) -> Message:
    content = RecordDict()
    if arrays is not None:
        content["update"] = arrays
    elif update is not None:
        content["update"] = ArrayRecord({"flat": Array(update)})
    content["fedcgd"] = ConfigRecord({"round": 3, "attempt": 1, "answered": 1} | (task or {}))
    return Message(content, reply_to=request())
