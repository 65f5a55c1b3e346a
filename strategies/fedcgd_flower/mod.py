"""Keep the ClientApp you have: a mod for nodes that are one user each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict

from fedcgd_flower import messages
from fedcgd_flower.clipping import Steps, clipped_update
from fedcgd_flower.flower_private import is_client_fn, is_privacy_mod, log_warning, mods_after
from fedcgd_flower.layout import Flat, cast_as_trained, unflatten
from fedcgd_flower.messages import (
    NoUpdateError,
    TrainTask,
    answer,
    answers_task,
    bounds_of,
    is_private_evaluation,
    trained_arrays,
)
from fedcgd_flower.noise_provider import check_masked, keeper_reply, sum_reply
from fedcgd_flower.problems import NOT_FINITE_WORDS, PROBLEMS, Problem
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
            return _evaluate(message, context, call_next, self.keepers, self._user(context))
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
        return _train(message, context, call_next, self.keepers, self._user(context))

    def _user(self, context: Context) -> str:
        """Under which name the node counts its user's participations, where there are keepers."""
        return (None if self.keepers is None else self.user(context)) or _THIS


clipped_update_mod = ClippedUpdateMod()
"""`ClippedUpdateMod` for a node whose configuration names its user."""


def _train(message: Message, context: Context, call_next: CallNext, keepers: "Keepers | None", user: str) -> Message:
    model, config, task = messages.read_train_message(message)
    _check_single_user(task)

    def update() -> tuple[Steps, int]:
        # Only now: it takes from the message what the server says of the keepers.
        return _clipped(_app_reply(message, context, call_next, model, config, task), model, task), 1

    # Its one user's participations are counted under its own name, and not under what the server calls it.
    return sum_reply(message, context, task, keepers, [user], update)


def _clipped(reply: Message, model: Flat, task: TrainTask) -> Steps:
    """The clipped update of the train function's `reply`, in steps, shape (task.size,). Raises NoUpdateError if it has none."""
    if lost := list(reply.content.config_records):
        log_warning(f"the train function also replied the records {lost}; nothing but the clipped update is sent")
    records = reply.content.array_records
    if len(records) > 1:  # all but one would be lost
        words = f"the train function replied the arrays {list(records)}, and only the update of one model is clipped and sent"
        raise NoUpdateError("wrong arrays", words)
    trained = trained_arrays(next(iter(records.values()), ArrayRecord()), task.layout)
    steps = clipped_update(np.concatenate(trained), cast_as_trained(model, trained, task.layout), task.clipping)
    if steps is None:
        raise NoUpdateError("not finite", NOT_FINITE_WORDS)
    return steps


def _evaluate(message: Message, context: Context, call_next: CallNext, keepers: "Keepers | None", user: str) -> Message:
    model, config, task = messages.read_train_message(message)
    bounds = bounds_of(message)
    _check_single_user(task)

    def measure() -> tuple[Steps, int]:
        reply = _app_reply(message, context, call_next, model, config, task)
        metrics = {name: value for record in reply.content.metric_records.values() for name, value in record.items()}
        return answer(metrics, bounds, task.clipping.grid), 1

    return sum_reply(message, context, answers_task(task, len(bounds)), keepers, [user], measure)


def _app_reply(
    message: Message, context: Context, call_next: CallNext, model: Flat, config: ConfigRecord, task: TrainTask
) -> Message:
    """The reply of the app's own function. Raises RuntimeError if that is an error."""
    arrays_key, config_key = task.record_keys
    message.content = RecordDict({arrays_key: unflatten(model, task.layout), config_key: config})
    reply = call_next(message, context)
    if reply.has_error():
        raise RuntimeError("the app's function replied an error")
    return reply


def _check_single_user(task: TrainTask) -> None:
    if len(task.users) != 1:
        raise ValueError(f"a node with clipped_update_mod is one user, and {len(task.users)} were asked for")


def _problem(call_next: CallNext) -> Problem | None:
    """What of the app behind the mod keeps the node from taking part."""
    if is_client_fn(call_next):
        return "client_fn"
    return "another privacy mod" if any(map(is_privacy_mod, mods_after(call_next))) else None
