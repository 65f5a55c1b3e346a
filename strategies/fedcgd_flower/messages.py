"""What travels between server and nodes: one flat array each way, and what was asked.

A request carries the flat model, the inner strategy's configuration, and which of the node's users shall take part. A reply
carries the sum of those users' clipped updates, and the server takes it only within the norm that they can have together.
"""

import json
import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from numpy.typing import NDArray

from fedcgd.native.vector_kernels import CHUNK, LANES, aligned, kernels, sum_of_lanes
from fedcgd.noise.quantisation import Integers, Lattice
from fedcgd.participation.user_ids import user_ids
from fedcgd_flower.clipping import Clipping, Steps
from fedcgd_flower.flower_private import log_error, log_failure
from fedcgd_flower.layout import Flat, Layout, PassthroughArray, flat_arrays, view
from fedcgd_flower.problems import RejectionReason, rejection_reason

MODEL = "model"
UPDATE = "update"
FLAT = "flat"
CARRIED = "carried"
CONFIG = "config"
RECORD_KEYS = "arrays", "config"
"""Under which Flower's strategies send the model and the configuration, unless they are told other names."""
TASK = "fedcgd"
CHECKSUM = "checksum"
REPLY_FIELDS = {"round", "attempt", "answered", CHECKSUM}
"""What a node says next to an update."""


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """What a node is asked to do in one round: give the sum of `users`' updates, each clipped and on a grid."""

    round: int
    attempt: int
    clipping: Clipping
    users: tuple[str, ...]
    layout: Layout
    node: int = 0
    """Which node is asked."""
    record_keys: tuple[str, str] = RECORD_KEYS
    """Under which the app's own function finds the model and the configuration."""

    def __post_init__(self) -> None:
        user_ids(self.users)  # one who is named twice would weigh twice

    @property
    def size(self) -> int:
        """Coordinates of the sum."""
        return self.clipping.size(self.layout.size)

    @property
    def dtype(self) -> type[np.int32] | type[np.int64]:
        """The integers that the sum of the users' updates, in steps, is sent in: the smaller ones if they hold it."""
        clipping = self.clipping
        return np.int32 if len(self.users) * clipping.norm / clipping.grid.step < 2**31 - 1 else np.int64

    def by_node(self, nodes: Mapping[str, int]) -> list["TrainTask"]:
        """The task of each node, in order: its own of the users, by user → node."""
        hosted: dict[int, list[str]] = {}
        for user, node_id in nodes.items():
            hosted.setdefault(node_id, []).append(user)
        return [replace(self, node=node_id, users=tuple(users)) for node_id, users in sorted(hosted.items())]


def model_records(model: Flat, layout: Layout) -> dict[str, ArrayRecord]:
    """The part of a request that all nodes share, in memory too: the flat model, and what it carries along."""
    records = {MODEL: ArrayRecord({FLAT: Array(model)})}
    if layout.passthrough:  # as one array: the number of arrays is what a deployed round costs
        parts = [np.ascontiguousarray(view(part.array)).reshape(-1).view(np.uint8) for part in layout.passthrough]
        records[CARRIED] = ArrayRecord({FLAT: Array(np.concatenate(parts))})
    return records


def train_message(
    model: Flat | Mapping[str, ArrayRecord],
    config: ConfigRecord,
    task: TrainTask,
    terms: Mapping[str, ConfigRecord] | None = None,
    message_type: str = MessageType.TRAIN,
) -> Message:
    """The request for the task's node; `model` is flat, or what `model_records` made of it for all nodes.

    `terms` are records of who makes the noise.
    """
    records = model_records(model, task.layout) if isinstance(model, np.ndarray) else model
    passthrough = task.layout.passthrough
    values = [view(part.array) for part in passthrough]
    description = ConfigRecord(
        {
            "round": task.round,
            "attempt": task.attempt,
            "clip-norm": task.clipping.clip_norm,
            "step": task.clipping.grid.step,
            "unit": task.clipping.update_scale,
            "indicator": task.clipping.indicator,
            "users": list(task.users),
            "layout": task.layout.to_json(),
            "carried": json.dumps(
                [(part.position, part.name, v.shape, v.dtype.str) for part, v in zip(passthrough, values, strict=True)]
            ),
        }
    )
    if task.record_keys != RECORD_KEYS:
        description["keys"] = list(task.record_keys)
    content = RecordDict({**records, CONFIG: config, TASK: description, **(terms or {})})
    return Message(content, dst_node_id=task.node, message_type=message_type)


def _read_passthrough(content: RecordDict) -> tuple[PassthroughArray, ...]:
    described = json.loads(cast(str, content.config_records[TASK]["carried"]))
    raw = content.array_records[CARRIED][FLAT].numpy() if described else np.empty(0, np.uint8)
    passthrough, start = [], 0
    for position, name, shape, dtype in described:
        stop = start + math.prod(shape) * np.dtype(dtype).itemsize
        passthrough.append(PassthroughArray(position, name, Array(raw[start:stop].view(dtype).reshape(shape))))
        start = stop
    return tuple(passthrough)


def read_train_message(message: Message) -> tuple[Flat, ConfigRecord, TrainTask]:
    """The flat model (read-only), the configuration and the task of a request, on the node.

    Raises ValueError if the message was not made by `train_message`.
    """
    content = message.content
    if TASK not in content.config_records or MODEL not in content.array_records:
        raise ValueError(
            "this train message does not come from fedcgd's CorrelatedNoise strategy; use it on the server"
        )
    description = content.config_records[TASK]
    task = TrainTask(
        round=cast(int, description["round"]),
        attempt=cast(int, description["attempt"]),
        clipping=Clipping(
            clip_norm=cast(float, description["clip-norm"]),
            grid=Lattice(cast(float, description["step"])),
            update_scale=cast(float, description["unit"]),
            indicator=cast(int, description["indicator"]),
        ),
        users=tuple(cast(list[str], description["users"])),
        layout=Layout.from_json(cast(str, description["layout"]), _read_passthrough(content)),
        node=message.metadata.dst_node_id,
        record_keys=cast(tuple[str, str], tuple(cast(list[str], description.get("keys", RECORD_KEYS)))),
    )
    return view(content.array_records[MODEL][FLAT]), content.config_records[CONFIG], task


def train_reply(request: Message, task: TrainTask, update: Steps, answered: int) -> Message:
    """The reply to `request`: the sum of the clipped updates of `answered` of the task's users, each in whole steps."""
    sent = update.astype(task.dtype, copy=False)
    # The checksum tells of changes by mistake; it keeps nobody from changing both.
    checksum = modulo(int(sent.sum(dtype=np.int64)))
    description = ConfigRecord({"round": task.round, "attempt": task.attempt, "answered": answered, CHECKSUM: checksum})
    content = RecordDict({UPDATE: ArrayRecord({FLAT: Array(sent)}), TASK: description})
    return Message(content, reply_to=request)


class NoUpdateError(RuntimeError):
    """Why a node gives no update: one of the few texts that it says of itself, and more for its own log."""

    def __init__(self, reason: RejectionReason, words: str) -> None:
        super().__init__(words)
        self.reason = reason


def trained_arrays(replied: object, layout: Layout) -> list[Flat]:
    """The trained arrays of what a train function replied, one vector an array.

    Raises NoUpdateError, with the names, shapes and types that differ, if that is not the model that it was sent.
    """
    if not isinstance(replied, ArrayRecord):
        raise NoUpdateError(
            "wrong arrays", f"the train function must reply an ArrayRecord, and gave {type(replied).__name__}"
        )
    try:
        return flat_arrays(replied, layout)
    except ValueError as error:
        words = f"the train function did not reply the model that it was sent: {error}"
        raise NoUpdateError("wrong arrays", words) from None


def failed_reply(request: Message, error: Exception) -> Message:
    """The reply of a node whose training raised `error`: without its text, which may quote the user's data.

    Flower itself would send the text. Where it happened goes to the node's own log.
    """
    if isinstance(error, NoUpdateError):
        log_error(f"no update is sent: {error}")
        return Message(Error(code=0, reason=error.reason), reply_to=request)
    log_failure("local training", error)
    # Flower's code for a ClientApp that raised.
    return Message(Error(code=2, reason="training failed"), reply_to=request)


def modulo(checksum: int) -> int:
    """As a 64-bit integer, which is what a message can hold."""
    return (checksum + 2**63) % 2**64 - 2**63


# What the server takes of replies: whatever does not look exactly like what was asked for is dropped, with a cause.


def read_flat(
    reply: Message | None, task: TrainTask, fields: AbstractSet[str], dtype: type[np.integer[Any]]
) -> tuple[ConfigRecord, NDArray[Any]] | RejectionReason:
    """(What a node says, the one array of shape (task.size,) that it sends), of the right form and not checked further.

    Args:
        reply: what came; None if nothing did.
        task: what was asked.
        fields: what a node may say.
        dtype: of the array.
    """
    if reply is None:
        return "no answer"
    if reply.has_error():
        return rejection_reason(reply.error)
    content = reply.content
    description, arrays = content.get(TASK), content.get(UPDATE)
    if not isinstance(description, ConfigRecord):
        return "without fedcgd's mod"
    if not isinstance(arrays, ArrayRecord) or len(content.array_records) > 1 or set(arrays) != {FLAT}:
        return "wrong arrays"
    if set(content) != {TASK, UPDATE} or not set(description) <= fields:
        return "altered reply"  # nobody asked for more, and nobody reads it
    if (description.get("round"), description.get("attempt")) != (task.round, task.attempt):
        return "wrong round"
    try:
        value: Any = view(arrays[FLAT])
    except Exception:  # the bytes are the sender's: any failure to parse them is the same to us
        return "wrong arrays"
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.shape != (task.size,):
        return "wrong type"
    return description, value


def sum_of_replies(
    replies: Iterable[tuple[Message | None, TrainTask]], size: int
) -> tuple[Integers, list[int | RejectionReason]]:
    """(Σ updates in steps, shape (size,); how many users are in each reply, or why it was dropped).

    Guarantee: whatever a reply holds, this returns, and adds at most norm (users asked) · task.clipping.norm for it.
    Replies are added as they come. A reply is read once: its norm and checksum are found while it is added, and one that turns
    out to be wrong is subtracted again, which for integers is exact.
    """
    total: Integers = np.zeros(size, np.int64)
    results: list[int | RejectionReason] = []
    for reply, task in replies:
        read = read_flat(reply, task, REPLY_FIELDS, task.dtype)
        if isinstance(read, str):
            results.append(read)
            continue
        description, steps = read[0], aligned(read[1])
        answered, users, clipping = description.get("answered"), len(task.users), task.clipping
        if not isinstance(answered, int) or not 0 <= answered <= users:
            results.append("more users than asked")
            continue
        added, squares = _add(steps, total, task.layout.size)
        if description.get(CHECKSUM) != modulo(added):
            total -= steps
            results.append("altered reply")
            continue
        if not clipping.is_short(squares, steps[task.layout.size :], users):
            total -= steps
            total += clipping.bounded(steps, task.layout.size, users)
        results.append(answered)
    return total, results


def _add(steps: Steps, total: Integers, parameters: int) -> tuple[int, float]:
    """Add to `total`; (the sum of the entries, the squared norm of the first `parameters`: what is counted is no part of it)."""
    form, lanes, added, squares = kernels(), np.empty(LANES), 0, 0.0
    for start in range(0, parameters, CHUNK):
        part = slice(start, min(start + CHUNK, parameters))
        added += form.add(steps[part], total[part], lanes)
        squares += sum_of_lanes(lanes)
    total[parameters:] += steps[parameters:]
    return added + int(steps[parameters:].sum(dtype=np.int64)), squares


_NAMES, _BOUNDS = "metrics", "bounds"


def scale_of(metrics: int) -> float:
    """So that values in [−1/2, 1/2], one for each metric, make a vector of norm at most 1."""
    return 2 / math.sqrt(metrics)


def answer(metrics: Mapping[str, Any], bounds: Mapping[str, float], grid: Lattice) -> Integers:
    """What a user adds to the sum, in steps, shape (number of metrics,). Guarantee: its norm is at most 1.

    Raises NoUpdateError if a metric is missing or no number.
    """
    values = np.empty(len(bounds))
    for i, (name, bound) in enumerate(bounds.items()):
        try:
            value = float(metrics[name])
        except (KeyError, TypeError, ValueError):  # whose text may quote what was measured
            value = math.nan
        if math.isnan(value):
            words = f"the evaluate function must reply {list(bounds)}, each a number; {name!r} is none"
            raise NoUpdateError("training failed", words)
        values[i] = min(max(value, 0.0), bound) / bound - 0.5
    return grid.to_steps(
        values * scale_of(len(bounds)) * (1 - 2.0**-40)
    )  # the factor: rounding must not lift the norm above 1


def evaluate_message(
    model: Flat | Mapping[str, ArrayRecord],
    config: ConfigRecord,
    task: TrainTask,
    bounds: Mapping[str, float],
    terms: Mapping[str, ConfigRecord] | None = None,
) -> Message:
    """The request for the task's node: the model, and the metrics that are wanted, of the task's users."""
    message = train_message(model, config, task, terms, MessageType.EVALUATE)
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
