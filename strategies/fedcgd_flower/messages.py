"""What travels between server and nodes: one flat array each way, and what was asked.

A request carries the flat model, the inner strategy's configuration, and which of the node's users shall take part. A reply
carries the sum of those users' clipped updates. Whatever does not look exactly like that is dropped, with a cause.
"""

import json
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import ERROR
from typing import Literal, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.supercore import log
from numpy.typing import NDArray

from fedcgd.clipping import ROUNDING, clip
from fedcgd.noise.quantisation import Grid, Integers
from fedcgd.passes import CHUNK, LANES, Lanes, aligned, passes, sum_of_lanes
from fedcgd_flower.layout import Carried, Flat, Layout, Outgoing, array_of, view
from fedcgd_flower.update import Steps

MODEL = "model"
UPDATE = "update"
FLAT = "flat"
CARRIED = "carried"
CONFIG = "config"
KEYS = "arrays", "config"
"""Under which Flower's strategies send the model and the configuration, unless they are told other names."""
TASK = "fedcgd"
_CHECKSUM = "checksum"
_FAILED = 2  # Flower's code for a ClientApp that raised
# All that a failing node says.
LOCAL_FAILURE, NOT_FINITE, ANOTHER_MODEL = (
    "local training failed",
    "the update is not finite",
    "the reply is another model",
)

Cause = Literal[
    "no answer",
    "node lost",
    "app crashed",
    "error in local training",
    "client error",
    "without fedcgd's mod",
    "not asked for",
    "wrong round",
    "more users than asked",
    "wrong arrays",
    "wrong shape or dtype",
    "not finite",
    "changed after clipping",
    "left out by its node",
]

Problem = Literal["no user id", "another privacy mod"]
PROBLEMS: dict[Problem, str] = {
    "no user id": (
        "its configuration names no user: start it with --node-config 'user-id=\"…\"' (or partition-id=…), give the mod a user "
        "(ClippedUpdateMod(user=...)), or let registrations name the nodes (identity='authenticated')"
    ),
    "another privacy mod": (
        "its ClientApp has another mod for privacy inside clipped_update_mod, which would spoil the update: take it out"
    ),
}
"""Why a node cannot take part, in words for the server's log: chosen from here, never text that a node sent."""


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """What a node is asked to do in one round: give the sum of `users`' updates, each clipped to `clip_norm`."""

    round: int
    attempt: int
    clip_norm: float
    grid: Grid
    """Updates are rounded towards zero to it."""
    users: tuple[str, ...]
    layout: Layout
    unit: float = 1.0
    """Updates are divided by it before they are clipped."""
    indicator: int = 0
    """Steps that a user adds to one coordinate more if its update is within the norm, and takes from it if not; 0: none."""
    keys: tuple[str, str] = KEYS
    """Under which the app's own function finds the model and the configuration."""

    @property
    def size(self) -> int:
        """Coordinates of the sum."""
        return self.layout.size + bool(self.indicator)

    @property
    def norm(self) -> float:
        """The most that one user adds to the sum, all coordinates together."""
        return math.hypot(self.clip_norm, self.indicator * self.grid.step)

    @property
    def dtype(self) -> type[np.int32] | type[np.int64]:
        """The integers that the sum of the users' updates, in steps, is sent in: the smaller ones if they hold it."""
        return np.int32 if len(self.users) * self.norm / self.grid.step < 2**31 - 1 else np.int64


@dataclass(frozen=True)
class NodeSum:
    """An accepted reply: the sum of the clipped updates of `answered` users, in steps."""

    update: Integers
    answered: int


def model_records(model: Flat | Outgoing, layout: Layout) -> dict[str, ArrayRecord]:
    """The part of a request that all nodes share, in memory too: the flat model, and what it carries along."""
    records = {MODEL: ArrayRecord({FLAT: model.sent() if isinstance(model, Outgoing) else array_of(model)})}
    if layout.carried:  # as one array: the number of arrays is what a deployed round costs
        parts = [np.ascontiguousarray(view(part.array)).reshape(-1).view(np.uint8) for part in layout.carried]
        records[CARRIED] = ArrayRecord({FLAT: array_of(np.concatenate(parts))})
    return records


def train_message(
    node_id: int,
    model: Flat | Mapping[str, ArrayRecord],
    config: ConfigRecord,
    task: TrainTask,
    message_type: str = MessageType.TRAIN,
) -> Message:
    """The request for one node; `model` is flat, or what `model_records` made of it for all nodes."""
    records = model_records(model, task.layout) if isinstance(model, np.ndarray) else model
    carried = task.layout.carried
    values = [view(part.array) for part in carried]
    description = ConfigRecord(
        {
            "round": task.round,
            "attempt": task.attempt,
            "clip-norm": task.clip_norm,
            "step": task.grid.step,
            "unit": task.unit,
            "indicator": task.indicator,
            "users": list(task.users),
            "layout": task.layout.to_json(),
            "carried": json.dumps(
                [(part.position, part.name, v.shape, v.dtype.str) for part, v in zip(carried, values, strict=True)]
            ),
        }
    )
    if task.keys != KEYS:
        description["keys"] = list(task.keys)
    content = RecordDict({**records, CONFIG: config, TASK: description})
    return Message(content, dst_node_id=node_id, message_type=message_type)


def _read_carried(content: RecordDict) -> tuple[Carried, ...]:
    described = json.loads(cast(str, content.config_records[TASK]["carried"]))
    raw = content.array_records[CARRIED][FLAT].numpy() if described else np.empty(0, np.uint8)
    carried, start = [], 0
    for position, name, shape, dtype in described:
        stop = start + math.prod(shape) * np.dtype(dtype).itemsize
        carried.append(Carried(position, name, Array(raw[start:stop].view(dtype).reshape(shape))))
        start = stop
    return tuple(carried)


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
        clip_norm=cast(float, description["clip-norm"]),
        grid=Grid(cast(float, description["step"])),
        users=tuple(cast(list[str], description["users"])),
        layout=Layout.from_json(cast(str, description["layout"]), _read_carried(content)),
        unit=cast(float, description["unit"]),
        indicator=cast(int, description["indicator"]),
        keys=cast(tuple[str, str], tuple(cast(list[str], description.get("keys", KEYS)))),
    )
    return view(content.array_records[MODEL][FLAT]), content.config_records[CONFIG], task


def train_reply(
    request: Message, task: TrainTask, update: Steps | Outgoing, answered: int, checksum: int | None = None
) -> Message:
    """The reply to `request`: the sum of the clipped updates of `answered` of the task's users, each in whole steps.

    `checksum` is what these integers add up to, where that is known.
    """
    outgoing = update if isinstance(update, Outgoing) else Outgoing.of(update.astype(task.dtype, copy=False))
    # It tells of changes by mistake; it keeps nobody from changing both.
    if checksum is None:
        checksum = int(outgoing.array.sum(dtype=np.int64))
    checksum = _modulo(checksum)
    description = ConfigRecord(
        {"round": task.round, "attempt": task.attempt, "answered": answered, _CHECKSUM: checksum}
    )
    content = RecordDict({UPDATE: ArrayRecord({FLAT: outgoing.sent()}), TASK: description})
    return Message(content, reply_to=request)


def failed_reply(request: Message, error: Exception) -> Message:
    """The reply of a node whose training raised `error`: without its text, which may quote the user's data.

    Flower itself would send the text. Where it happened goes to the node's own log.
    """
    where = "".join(traceback.format_tb(error.__traceback__))
    log(ERROR, "fedcgd: local training failed with %s at\n%s", type(error).__name__, where)
    return Message(Error(code=_FAILED, reason=LOCAL_FAILURE), reply_to=request)


def read_train_reply(reply: Message | None, task: TrainTask) -> NodeSum | Cause:
    """The node's sum in steps, scaled to norm at most (users asked) · task.norm; or why the reply was dropped.

    The sum of several users comes as integers, because the node has to round each user's update. A single user's update
    may also come as floats, clipped or not: it is clipped and rounded here.
    Guarantee: whatever the reply holds, this returns, and a returned update has that norm.
    """
    total, [result] = sum_of_replies([(reply, task)], task.size)
    return NodeSum(total, result) if isinstance(result, int) else result


def sum_of_replies(
    replies: Sequence[tuple[Message | None, TrainTask]], size: int
) -> tuple[Integers, list[int | Cause]]:
    """(Σ updates, each as `read_train_reply` gives it, shape (size,); how many users are in each, or why it was dropped).

    All replies are added stretch by stretch, with their norms and checksums in the same pass, so that each is read once and the
    sum goes through memory once. One that turns out to be wrong is subtracted again, which for integers is exact.
    """
    total, lanes = np.zeros(size, np.int64), np.empty(LANES)
    received = [_received(reply, task) for reply, task in replies]
    addends = [part for part in received if isinstance(part, _Addend)]
    for start in range(0, size, CHUNK):
        for addend in addends:
            addend.add_to(total, start, lanes)
    results: list[int | Cause] = []
    for part in received:
        if not isinstance(part, _Addend):
            results.append(part)
        elif part.is_changed():
            total -= part.update
            results.append("changed after clipping")
        else:
            if not part.is_within():
                total -= part.update
                total += _bounded(part.update, part.task)
            results.append(part.answered)
    return total, results


def _modulo(checksum: int) -> int:
    """As a 64-bit integer, which is what a message can hold."""
    return (checksum + 2**63) % 2**64 - 2**63


class _Addend:
    """A well-formed reply, whose numbers nobody has checked yet; and what is found out about them while they are added."""

    def __init__(self, update: Steps, task: TrainTask, answered: int, checksum: object) -> None:
        self.update, self.task, self.answered = aligned(update), task, answered
        self._claimed = checksum  # what the node says that the numbers add up to; None if it says nothing
        self._sum, self._squares = 0, 0.0
        self._passes = passes(len(update))

    def add_to(self, total: Integers, start: int, lanes: Lanes) -> None:
        """Add the stretch of the update that begins at `start` to `total`."""
        end = min(start + CHUNK, len(self.update))
        model = max(start, min(end, self.task.layout.size))  # after these, what is counted: no part of the norm
        if model > start:
            self._sum += self._passes.add(self.update[start:model], total[start:model], lanes)
            self._squares += sum_of_lanes(lanes)
        if end > model:
            self._sum += self._passes.add(self.update[model:end], total[model:end], lanes)

    def is_changed(self) -> bool:
        """Whether the numbers are not those whose sum, modulo 2⁶⁴, the node sent along."""
        return self._claimed is not None and self._claimed != _modulo(self._sum)

    def is_within(self) -> bool:
        """True only if the update's norm is at most bound = users·clip_norm, and always if it is at most (1 − `ROUNDING`)·bound;
        and only if what is counted is within its bounds.

        In float64, with u = 2⁻⁵³: a number that became a float is off by a factor 1 ± u, its square by (1 ± u)³, and a sum of
        n ≤ 2¹⁶ squares, whatever the order, by (1 ± u)ⁿ⁻¹ more, as are the sums of at most 2²⁴ of these by (1 ± u)^(2²⁴). All
        terms are positive, so up to 2⁴⁰ numbers the result is at least (1 − 2⁻²⁷) times the true square of the norm: if it is at
        most (1 − 2⁻²³)·bound², as computed (another 2⁻⁴⁹), the true one is below bound². Nothing overflows: the sum stays below
        2⁴⁰·2¹²⁶. An honest sum, clipped to (1 − `ROUNDING`)·bound with `ROUNDING` = 2⁻²², passes.
        """
        task, users = self.task, len(self.task.users)
        counted, most = self.update[task.layout.size :], users * task.indicator
        bound = users * task.clip_norm / task.grid.step
        return self._squares <= (1 - ROUNDING / 2) * bound**2 and bool(((counted <= most) & (counted >= -most)).all())


def _received(reply: Message | None, task: TrainTask) -> _Addend | Cause:
    if reply is None:
        return "no answer"
    if reply.has_error():
        return _cause_of(reply.error)
    content = reply.content
    if TASK not in content.config_records:
        return "without fedcgd's mod"
    if set(content.array_records) != {UPDATE}:
        return "wrong arrays"
    description, arrays = content.config_records[TASK], content.array_records[UPDATE]
    if (description.get("round"), description.get("attempt")) != (task.round, task.attempt):
        return "wrong round"
    answered = description.get("answered")
    if not isinstance(answered, int) or not 0 <= answered <= len(task.users):
        return "more users than asked"
    if set(arrays) != {FLAT}:
        return "wrong arrays"
    try:
        value = view(arrays[FLAT])
    except Exception:  # the bytes are the sender's: any failure to parse them is the same to us
        return "wrong arrays"
    if not isinstance(value, np.ndarray) or value.ndim != 1:
        return "wrong shape or dtype"
    if len(task.users) == 1 and value.dtype in (np.float32, np.float64) and len(value) == task.layout.size:
        if not np.isfinite(value).all():
            return "not finite"
        if _CHECKSUM in description:
            return "changed after clipping"  # it left fedcgd's code as integers
        return _Addend(_clipped_and_rounded(value.astype(np.float64), task), task, answered, None)
    if value.dtype == task.dtype and len(value) == task.size:
        return _Addend(np.ascontiguousarray(value), task, answered, description.get(_CHECKSUM))
    return "wrong shape or dtype"


def _clipped_and_rounded(update: NDArray[np.float64], task: TrainTask) -> Integers:
    """A single user's update, as `clipped_update` would have sent it."""
    clipped = clip(update, task.clip_norm * task.unit)
    steps = task.grid.to_steps(clipped / task.unit)
    if not task.indicator:
        return steps
    return np.append(steps, task.indicator if np.array_equal(clipped, update) else -task.indicator)


def _bounded(total: Steps, task: TrainTask) -> Integers:
    """`total`, made no longer than sums of so many users' vectors are: the update, and what is counted, each by itself."""
    users, size = len(task.users), task.layout.size
    update, counted = total[:size], total[size:].astype(np.int64)
    bounded = task.grid.to_steps(clip(task.grid.from_steps(update), users * task.clip_norm))
    most = users * task.indicator
    return np.append(bounded, np.clip(counted, -most, most)) if task.indicator else bounded


def _cause_of(error: Error) -> Cause:
    """Why a node answered with an error. Its text may tell about users' data: it is compared, and never logged."""
    match error.code:
        case 3 | 4 | 5:  # message, reply or node unavailable
            return "node lost"
        case 1 | 8:  # the ClientApp could not be loaded, or its process ended
            return "app crashed"
    if error.reason == NOT_FINITE:
        return "not finite"
    if error.reason == ANOTHER_MODEL:
        return "wrong arrays"
    return "error in local training" if error.reason == LOCAL_FAILURE else "client error"


HINTS: dict[Cause, str] = {
    "client error": "a ClientApp raised outside of fedcgd's code; clipped_update_mod must be the first of its mods",
    "without fedcgd's mod": "a ClientApp replied by itself; it needs clipped_update_mod as the first of its mods, or host_users",
    "error in local training": "a node's own log says where its training failed",
    "wrong arrays": "a train function must reply the whole model that it was sent, with the same names and shapes; a node's own "
    "log says what differs",
    "app crashed": "a node's own log says why its ClientApp could not be loaded, or ended",
    "wrong shape or dtype": "a ClippedSum of your own must return work.size integers, as work.clipped gives them",
}
"""What the operator can do about a cause, for the log."""


def users_query(node_id: int) -> Message:
    """The question which users a node hosts.

    It is a train message, because a mod sees only messages for which the ClientApp has a function, and a train function is what
    every node has.
    """
    content = RecordDict({TASK: ConfigRecord({"question": "users"})})
    return Message(content, dst_node_id=node_id, message_type=MessageType.TRAIN)


def is_users_query(message: Message) -> bool:
    """Whether `message` is what `users_query` made."""
    return TASK in message.content.config_records and "question" in message.content.config_records[TASK]


@dataclass(frozen=True)
class Hosted:
    """The users that a node says it hosts. If they are shared, other nodes may host the same: each is asked at one of them."""

    users: tuple[str, ...]
    shared: bool = False


def users_reply(request: Message, users: Sequence[str] | Problem, *, shared: bool = False) -> Message:
    """The reply to a `users_query`: the stable ids of the users this node hosts, or why it can name none.

    Raises TypeError, which names no user, unless the ids are texts that are not empty.
    """
    for user in () if isinstance(users, str) else users:
        if not _is_id(user):
            what = "an empty text" if user == "" else type(user).__name__
            raise TypeError(f"ids of users must be texts and not empty, such as '17'; one is {what}")
    answer = ConfigRecord({"problem": users} if isinstance(users, str) else {"users": list(users)})
    if shared:
        answer["shared"] = True
    return Message(RecordDict({TASK: answer}), reply_to=request)


def _is_id(user: object) -> bool:
    return isinstance(user, str) and user != ""


def read_users_reply(reply: Message | None) -> Hosted | Problem | None:
    """The users that a node says it hosts, or what keeps it from saying so; None if the reply tells neither."""
    if reply is None or reply.has_error() or TASK not in reply.content.config_records:
        return None
    answer = reply.content.config_records[TASK]
    for problem in PROBLEMS:
        if answer.get("problem") == problem:
            return problem
    users = answer.get("users")
    if not isinstance(users, list) or not all(map(_is_id, users)):
        return None
    listed = tuple(dict.fromkeys(cast(list[str], users)))
    shared = answer.get("shared") is True
    return Hosted(
        tuple(sorted(listed)) if shared else listed, shared
    )  # so that the lists of nodes that share are equal
