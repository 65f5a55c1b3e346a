"""What travels between server and nodes: one flat array each way, and what was asked.

A request carries the flat model, the inner strategy's configuration, and which of the node's users shall take part. A reply
carries the sum of those users' clipped updates; what the server takes of it is in `replies`.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict

from fedcgd.noise.quantisation import Integers, Lattice
from fedcgd.participation.user_ids import NoUserIdsError, check_not_one_text, user_ids
from fedcgd.support.numbers import as_positive
from fedcgd_flower.flower_private import log_error, log_failure
from fedcgd_flower.layout import Flat, Layout, Outgoing, PassthroughArray, array_of, view
from fedcgd_flower.update import Steps

MODEL = "model"
UPDATE = "update"
FLAT = "flat"
CARRIED = "carried"
CONFIG = "config"
_FURTHER = "inner."  # before the names of an inner strategy's own records
RECORD_KEYS = "arrays", "config"
"""Under which Flower's strategies send the model and the configuration, unless they are told other names."""
TASK = "fedcgd"
KEEPERS = "fedcgd-keepers"
"""The record that says which agreement and which keepers a round has; on a question to a keeper, also what is asked."""
CHECKSUM = "checksum"
SAID_WITH_AN_UPDATE = {"round", "attempt", "answered", CHECKSUM}
"""What a node says beside an update."""
NOT_FINITE_WORDS = (
    "the trained model has numbers that are NaN, infinite or beyond what float32 holds (3.4·10³⁸): lower the local learning "
    "rate, or look for a loss that divides by zero or takes its logarithm, or for half precision that overflows"
)
TIED_WORDS = (
    "as two arrays they would be clipped and noised twice. Begin with initial_arrays=arrays_of(model), which has it once, and "
    "read the model with load_arrays(model, arrays) on server and nodes"
)
"""For the log of the node and for that of the server."""
_FAILED = 2  # Flower's code for a ClientApp that raised

# All that a failing node says.
LOCAL_FAILURE, NOT_FINITE, ANOTHER_MODEL, TIED = (
    "local training failed",
    "the update is not finite",
    "the reply is another model",
    "two arrays of the model are one",
)


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """What a node is asked to do in one round: give the sum of `users`' updates, each clipped to `clip_norm`."""

    round: int
    attempt: int
    clip_norm: float
    grid: Lattice
    """Updates are rounded towards zero to it."""
    users: tuple[str, ...]
    layout: Layout
    update_scale: float = 1.0
    """Updates are divided by it before they are clipped."""
    indicator: int = 0
    """Steps that a user adds to one coordinate more if its update is within the norm, and takes from it if not; 0: none."""
    record_keys: tuple[str, str] = RECORD_KEYS
    """Under which the app's own function finds the model and the configuration."""

    def __post_init__(self) -> None:
        # What a server says decides whether anything is clipped: divided by −1, every norm is below the bound.
        as_positive("the clip norm", self.clip_norm)
        as_positive("the scale of updates", self.update_scale)
        user_ids(self.users)  # one who is named twice would weigh twice
        if self.indicator < 0:
            raise ValueError(f"the indicator must be at least 0, got {self.indicator!r}")

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


def by_node(users: Mapping[str, int]) -> list[tuple[int, tuple[str, ...]]]:
    """Of user → node, each node, in order, with its users: who is asked together, by one message."""
    hosted: dict[int, list[str]] = {}
    for user, node_id in users.items():
        hosted.setdefault(node_id, []).append(user)
    return [(node_id, tuple(users)) for node_id, users in sorted(hosted.items())]


def model_records(model: Flat | Outgoing, layout: Layout) -> dict[str, ArrayRecord]:
    """The part of a request that all nodes share, in memory too: the flat model, and what it carries along."""
    records = {MODEL: ArrayRecord({FLAT: model.sent() if isinstance(model, Outgoing) else array_of(model)})}
    if layout.passthrough:  # as one array: the number of arrays is what a deployed round costs
        parts = [np.ascontiguousarray(view(part.array)).reshape(-1).view(np.uint8) for part in layout.passthrough]
        records[CARRIED] = ArrayRecord({FLAT: array_of(np.concatenate(parts))})
    return records


def train_message(
    node_id: int,
    model: Flat | Mapping[str, ArrayRecord],
    config: ConfigRecord,
    task: TrainTask,
    message_type: str = MessageType.TRAIN,
    further: Mapping[str, ConfigRecord | MetricRecord] | None = None,
    keepers: Mapping[str, ConfigRecord] | None = None,
) -> Message:
    """The request for one node; `model` is flat, or what `model_records` made of it for all nodes.

    `further` are records that the inner strategy sends beside the model and the configuration, and `keepers`
    what nodes are told of them.
    """
    records = model_records(model, task.layout) if isinstance(model, np.ndarray) else model
    passthrough = task.layout.passthrough
    values = [view(part.array) for part in passthrough]
    description = ConfigRecord(
        {
            "round": task.round,
            "attempt": task.attempt,
            "clip-norm": task.clip_norm,
            "step": task.grid.step,
            "unit": task.update_scale,
            "indicator": task.indicator,
            "users": list(task.users),
            "layout": task.layout.to_json(),
            "carried": json.dumps(
                [(part.position, part.name, v.shape, v.dtype.str) for part, v in zip(passthrough, values, strict=True)]
            ),
        }
    )
    if task.record_keys != RECORD_KEYS:
        description["keys"] = list(task.record_keys)
    beside = {f"{_FURTHER}{name}": record for name, record in (further or {}).items()}
    content = RecordDict({**records, CONFIG: config, TASK: description, **beside, **(keepers or {})})
    return Message(content, dst_node_id=node_id, message_type=message_type)


def further_records(message: Message) -> dict[str, ConfigRecord | MetricRecord]:
    """What the inner strategy sent beside the model and the configuration, by its own names."""
    return {
        name.removeprefix(_FURTHER): record
        for name, record in message.content.items()
        if name.startswith(_FURTHER) and isinstance(record, ConfigRecord | MetricRecord)
    }


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
        clip_norm=cast(float, description["clip-norm"]),
        grid=Lattice(cast(float, description["step"])),
        users=tuple(cast(list[str], description["users"])),
        layout=Layout.from_json(cast(str, description["layout"]), _read_passthrough(content)),
        update_scale=cast(float, description["unit"]),
        indicator=cast(int, description["indicator"]),
        record_keys=cast(tuple[str, str], tuple(cast(list[str], description.get("keys", RECORD_KEYS)))),
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
    checksum = modulo(checksum)
    description = ConfigRecord({"round": task.round, "attempt": task.attempt, "answered": answered, CHECKSUM: checksum})
    content = RecordDict({UPDATE: ArrayRecord({FLAT: outgoing.sent()}), TASK: description})
    return Message(content, reply_to=request)


def failed_reply(request: Message, error: Exception) -> Message:
    """The reply of a node whose training raised `error`: without its text, which may quote the user's data.

    Flower itself would send the text. Where it happened goes to the node's own log.
    """
    log_failure("local training", error)
    return Message(Error(code=_FAILED, reason=LOCAL_FAILURE), reply_to=request)


def modulo(checksum: int) -> int:
    """As a 64-bit integer, which is what a message can hold."""
    return (checksum + 2**63) % 2**64 - 2**63


Problem = Literal["no user id", "no ids", "users failed", "client_fn", "another privacy mod"]
PROBLEMS: dict[Problem, str] = {
    "no user id": (
        "its configuration names no user: start it with --node-config 'user-id=\"…\"' (or partition-id=…), give the mod a user "
        "(ClippedUpdateMod(user=...)), or let registrations name the nodes (identity='authenticated')"
    ),
    "no ids": (
        "its app names users by what are no ids: numbers, an empty text, a missing value, or one text in place of a list. Ids "
        "are texts and not empty, [str(id) for id in …] without rows that have none; the node's own log says which"
    ),
    "users failed": "its app's function that names its users has failed; the node's own log says where",
    "client_fn": (
        "its ClientApp is made of a client_fn (NumPyClient), Flower's earlier API, which reads other messages: make what its fit "
        "does a function under @app.train(), which finds the model in message.content['arrays'] and replies the trained one"
    ),
    "another privacy mod": (
        "its ClientApp has another mod for privacy inside clipped_update_mod, which would spoil the update: take it out"
    ),
}
"""Why a node cannot take part, in words for the server's log: chosen from here, never text that a node sent."""


def users_query(node_id: int, message_type: str = MessageType.TRAIN) -> Message:
    """The question which users a node hosts.

    It is a train message, of the type that the rounds' messages have, because a mod sees only messages for which the ClientApp
    has a function, and that train function is what every node has.
    """
    content = RecordDict({TASK: ConfigRecord({"question": "users"})})
    return Message(content, dst_node_id=node_id, message_type=message_type)


def is_users_query(message: Message) -> bool:
    """Whether `message` is what `users_query` made."""
    return TASK in message.content.config_records and "question" in message.content.config_records[TASK]


@dataclass(frozen=True)
class HostedUsers:
    """The users that a node says it hosts. If they are shared, other nodes may host the same: each is asked at one of them."""

    users: tuple[str, ...]
    shared: bool = False
    single: bool = False
    """The node is one user, as with `clipped_update_mod`: whatever it is called, it cannot become another one."""


def problem_reply(request: Message, problem: Problem) -> Message:
    """The reply to a `users_query` of a node that can name no users."""
    return Message(RecordDict({TASK: ConfigRecord({"problem": problem})}), reply_to=request)


def users_reply(
    request: Message, users: Callable[[], Iterable[str]], *, shared: bool = False, single: bool = False
) -> Message:
    """The reply to a `users_query`: the stable ids that `users()` gives, each once, or why there are none.

    The node's own log says more: what is no id, or where `users` raised, without the error's text, which may quote data.
    """
    try:
        named: object = users()
        if single and named == [None]:
            return problem_reply(request, "no user id")
        check_not_one_text(named)
        ids = user_ids(dict.fromkeys(cast(Iterable[str], named)))
    except NoUserIdsError as error:
        log_error(str(error))
        return problem_reply(request, "no ids")
    except Exception as error:
        log_failure("the function that names this node's users", error)
        return problem_reply(request, "users failed")
    answer = ConfigRecord({"users": list(ids)})
    if shared:
        answer["shared"] = True
    if single:
        answer["single"] = True
    return Message(RecordDict({TASK: answer}), reply_to=request)


def read_users_reply(reply: Message | None) -> HostedUsers | Problem | None:
    """The users that a node says it hosts, or what keeps it from saying so; None if the reply tells neither."""
    if reply is None or reply.has_error() or TASK not in reply.content.config_records:
        return None
    answer = reply.content.config_records[TASK]
    for problem in PROBLEMS:
        if answer.get("problem") == problem:
            return problem
    users = answer.get("users")
    try:
        listed = user_ids(dict.fromkeys(cast(list[str], users)) if isinstance(users, list) else "")
    except NoUserIdsError:
        return None
    shared = answer.get("shared") is True
    users_listed = tuple(sorted(listed)) if shared else listed  # so that the lists of nodes that share are equal
    return HostedUsers(users_listed, shared, answer.get("single") is True)


def has_keepers(message: Message) -> bool:
    """Whether a request says that the round has keepers, or is a question to one."""
    return KEEPERS in message.content.config_records


def question_of(message: Message) -> str | None:
    """What a keeper is asked: "who", "check" or "open"; None if the message is no question to a keeper."""
    asked = message.content.config_records[KEEPERS].get("question") if has_keepers(message) else None
    return asked if isinstance(asked, str) else None


def check_masked(message: Message, keepers: object | None) -> None:
    """Raise ValueError unless the server and this node both mean the same keepers, or both none.

    A node that was given keepers sends nothing that the server alone could read, whatever it is asked.
    """
    if keepers is None and has_keepers(message):
        raise ValueError(
            "this run has keepers, and this node was given none: host_users(…, keepers=Keepers.from_file(…)), or "
            "ClippedUpdateMod(keepers=…)"
        )
    if keepers is not None and not has_keepers(message):
        raise ValueError(
            "this node was given keepers, and the server asks for what it could read alone: CorrelatedNoise(…, keepers=…)"
        )


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
