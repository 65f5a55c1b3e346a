"""A round's request, and replies to it."""

from dataclasses import dataclass, replace

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedcgd.noise.quantisation import Integers, Lattice
from fedcgd_flower.clipping import Clipping
from fedcgd_flower.layout import Layout
from fedcgd_flower.messages import TrainTask, sum_of_replies, train_message
from fedcgd_flower.problems import RejectionReason

LAYOUT = Layout(("w", "b"), ((2, 2), (1,)), ("float32", "float32"))
TASK = TrainTask(
    round=3,
    attempt=1,
    node=1,
    clipping=Clipping(clip_norm=0.5, grid=Lattice(2.0**-20)),
    users=("ann", "bob"),
    layout=LAYOUT,
)
ALONE = replace(TASK, users=("ann",))


def request() -> Message:
    return train_message(np.zeros(5, np.float32), ConfigRecord({"server-round": 4}), TASK)


def reply_with(update=None, *, task=None, arrays=None) -> Message:
    content, told = RecordDict(), {"round": 3, "attempt": 1, "answered": 1}
    if arrays is not None:
        content["update"] = arrays
    elif update is not None:
        content["update"] = ArrayRecord({"flat": Array(update)})
        told["checksum"] = int(update.sum(dtype=np.int64)) if update.dtype.kind in "iu" else 0
    content["fedcgd"] = ConfigRecord(told | (task or {}))
    return Message(content, reply_to=request())


def with_update(reply: Message, update: np.ndarray) -> Message:
    """A node's reply with other numbers: who lies can tell what they add up to."""
    reply.content["update"] = ArrayRecord({"flat": Array(update)})
    reply.content["fedcgd"]["checksum"] = int(update.sum(dtype=np.int64)) if update.dtype.kind in "iu" else 0
    return reply


@dataclass(frozen=True)
class NodeSum:
    """An accepted reply: the sum of the clipped updates of `answered` users, in steps."""

    update: Integers
    answered: int


def read_train_reply(reply: Message | None, task: TrainTask) -> NodeSum | RejectionReason:
    """What the server takes of one reply, or why it drops it."""
    total, [result] = sum_of_replies([(reply, task)], task.size)
    return NodeSum(total, result) if isinstance(result, int) else result
