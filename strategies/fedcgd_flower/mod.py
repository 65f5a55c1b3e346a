"""Keep the ClientApp you have: a mod for nodes that are one user each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, RecordDict

from fedcgd.noise.quantisation import Integers
from fedcgd_flower import messages, problems
from fedcgd_flower.flower_private import is_client_fn, is_privacy_mod, log_error, log_warning, mods_after
from fedcgd_flower.layout import Flat, Outgoing, cast_as_trained, flat_arrays, tied_arrays, unflatten
from fedcgd_flower.messages import TrainTask, answer, answers_task, bounds_of, is_private_evaluation
from fedcgd_flower.node_replies import check_masked, keeper_reply, sum_reply
from fedcgd_flower.problems import PROBLEMS, Problem
from fedcgd_flower.update import Steps, write_clipped_update
from fedcgd_flower.users import configured_user, is_users_query, problem_reply, users_reply

if TYPE_CHECKING:
    from fedcgd.keepers import Keepers

_THIS = "the user of this node"  # where the node itself does not know a name

CallNext = Callable[[Message, Context], Message]


@dataclass(frozen=True)
class ClippedUpdateMod:
    """Run an ordinary train function, and reply with its update (new model − old), clipped to the server's norm.

    `ClientApp(mods=[clipped_update_mod])` is all, or `@app.train(mods=[clipped_update_mod])` for one function. The function sees
    the model under "arrays" and the configuration under "config", or under the names that the inner strategy gives them, and
    replies as for FedAvg. Nothing but the clipped update of the arrays that the server trains is sent, rounded to the server's
    grid: no metrics, no error text, no counters. Of an evaluate function's metrics, those that the server's `PrivateEvaluation`
    bounds are sent, for its noised sum. Messages of other kinds (`@app.query`, evaluations of another sort) pass, and so do
    their replies: CorrelatedNoise sends none, but for evaluations where client metrics are forwarded. With `keepers` they are
    refused.

    The node is one user. This must be the first of the mods: what a mod before it changes is refused by the server, and Flower's
    own privacy mods are refused after it.

    Args:
        user: `user(context)` is the user's id, the same whenever the node comes back; by default the "user-id" of the node's
            configuration, or else its "partition-id".
        keepers: with them, what leaves the node is masked, so that only all keepers of a round together can open it, and only as
            a noised sum with others'. A node whose configuration names a keeper's key (`keeper="/srv/keeper.key"`) is that keeper
            too. Evaluations are answered under masks as well, and only those of the server's `PrivateEvaluation`.

    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp(mods=[clipped_update_mod])
    >>> app = ClientApp(mods=[ClippedUpdateMod(user=lambda context: str(context.node_config["device"]))])
    """

    user: Callable[[Context], str | None] = configured_user
    keepers: "Keepers | None" = None

    def __call__(self, message: Message, context: Context, call_next: CallNext) -> Message:
        """The reply to a message of the server.

        Args:
            message: what the server asks.
            context: the node's.
            call_next: the rest of the app.
        """
        # Without the name of the app's function, as in "train.lora".
        kind = message.metadata.message_type.partition(".")[0]
        if kind == MessageType.EVALUATE and (self.keepers is not None or is_private_evaluation(message)):
            check_masked(message, self.keepers)
            return _evaluate(message, context, call_next, self.keepers, self.user(context) or _THIS)
        if kind != MessageType.TRAIN:
            check_masked(message, self.keepers)
            return call_next(message, context)
        if (answered := keeper_reply(message, context, self.keepers)) is not None:
            return answered
        problem = _problem(call_next)
        if is_users_query(message):
            if problem is not None:
                return problem_reply(message, problem)
            return users_reply(message, lambda: [cast(str, self.user(context))], single=True)
        if problem is not None:
            raise ValueError(f"this node cannot take part: {PROBLEMS[problem]}")
        check_masked(message, self.keepers)
        if self.keepers is not None:
            return _train_masked(message, context, call_next, self.keepers, self.user(context) or _THIS)
        return _train(message, context, call_next)


clipped_update_mod = ClippedUpdateMod()
"""`ClippedUpdateMod` for a node whose configuration names its user."""


def _train(message: Message, context: Context, call_next: CallNext) -> Message:
    model, config, task = messages.read_train_message(message)
    _show_model(message, model, config, task)
    try:
        reply = call_next(message, context)
        if reply.has_error():
            return Message(Error(code=reply.error.code, reason=problems.LOCAL_FAILURE), reply_to=message)
    except Exception as error:
        return messages.failed_reply(message, error)
    outgoing = Outgoing((task.size,), task.dtype)
    try:
        checksum = _write_update(reply, model, task, outgoing.array)
    except _NoUpdateError as error:
        return Message(Error(code=0, reason=str(error)), reply_to=message)
    return messages.train_reply(message, task, outgoing, 1, checksum)


def _train_masked(message: Message, context: Context, call_next: CallNext, keepers: "Keepers", user: str) -> Message:
    model, config, task = messages.read_train_message(message)
    _check_single_user(task)

    def update() -> tuple[Integers, int]:
        # Only now: it takes from the message what the server says of the keepers.
        reply = _app_reply(message, context, call_next, model, config, task)
        steps = np.empty(task.size, np.int64)
        _write_update(reply, model, task, steps)
        return steps, 1

    # Its one user's turns are counted under its own name, and not under what the server calls it.
    return sum_reply(message, context, task, keepers, [user], update)


class _NoUpdateError(RuntimeError):
    """Why a reply gives no update: one of the few texts that a node says of itself."""


def _write_update(reply: Message, model: Flat, task: TrainTask, out: Steps) -> int:
    """Write the clipped update of the train function's `reply` to `out`, shape (task.size,); the result is the sum of its steps.

    Raises _NoUpdateError if it has none. Why, in words that may name arrays, goes to the node's own log.
    """
    if lost := list(reply.content.config_records):
        log_warning(f"the train function also replied the records {lost}; nothing but the clipped update is sent")
    try:
        new = flat_arrays(_replied_model(reply), task.layout)
    except ValueError as error:
        log_error(f"the train function did not reply the model that it was sent: {error}")
        raise _NoUpdateError(problems.ANOTHER_MODEL) from None
    if tied := tied_arrays(new, model, task.layout):
        log_error(f"no update is sent: the arrays {list(tied)} are one tensor of the model; {problems.TIED_WORDS}")
        raise _NoUpdateError(problems.TIED)
    checksum = write_clipped_update(out, new, cast_as_trained(model, new, task.layout), task.clipping)
    if checksum is None:
        log_error(f"no update is sent: {problems.NOT_FINITE_WORDS}")
        raise _NoUpdateError(problems.NOT_FINITE)
    return checksum


def _replied_model(reply: Message) -> ArrayRecord:
    """The one record of arrays in `reply`. Raises ValueError if there are several, of which all but one would be lost."""
    records = reply.content.array_records
    if len(records) > 1:
        raise ValueError(f"it replied the arrays {list(records)}, and only the update of one model is clipped and sent")
    return next(iter(records.values()), ArrayRecord())


def _evaluate(message: Message, context: Context, call_next: CallNext, keepers: "Keepers | None", user: str) -> Message:
    model, config, task = messages.read_train_message(message)
    bounds = bounds_of(message)
    _check_single_user(task)

    def measure() -> tuple[Integers, int]:
        reply = _app_reply(message, context, call_next, model, config, task)
        metrics = {name: value for record in reply.content.metric_records.values() for name, value in record.items()}
        return answer(metrics, bounds, task.clipping.grid), 1

    return sum_reply(message, context, answers_task(task, len(bounds)), keepers, [user], measure)


def _app_reply(
    message: Message, context: Context, call_next: CallNext, model: Flat, config: ConfigRecord, task: TrainTask
) -> Message:
    """The reply of the app's own function. Raises RuntimeError if that is an error."""
    _show_model(message, model, config, task)
    reply = call_next(message, context)
    if reply.has_error():
        raise RuntimeError(problems.LOCAL_FAILURE)
    return reply


def _show_model(message: Message, model: Flat, config: ConfigRecord, task: TrainTask) -> None:
    """Give `message` the content that the app's own function expects. Raises ValueError if it is not for one user."""
    _check_single_user(task)
    arrays_key, config_key = task.record_keys
    further = messages.further_records(message)
    message.content = RecordDict({arrays_key: unflatten(model, task.layout), config_key: config, **further})


def _check_single_user(task: TrainTask) -> None:
    if len(task.users) != 1:
        raise ValueError(f"a node with clipped_update_mod is one user, and {len(task.users)} were asked for")


def _problem(call_next: CallNext) -> Problem | None:
    """What of the app behind the mod keeps the node from taking part."""
    if is_client_fn(call_next):
        return "client_fn"
    return "another privacy mod" if any(map(is_privacy_mod, mods_after(call_next))) else None
