"""The node's side of keepers: a node masks what it sends, and a node whose configuration names a keeper's key opens sums."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from flwr.app import Context, Message, MessageType
from numpy.typing import NDArray

from fedcgd.clipping import ROUNDING
from fedcgd.keepers import (
    EVALUATION,
    TRAINING,
    Agreement,
    Keeper,
    KeeperKey,
    Keepers,
    NodeTurns,
    Refusal,
    RefusedError,
    mask,
)
from fedcgd.keepers.wire import proof
from fedcgd_flower import keeper_messages
from fedcgd_flower.flower_private import log_error, log_failure, log_warning
from fedcgd_flower.keeper_messages import Masking
from fedcgd_flower.messages import KEEPERS, TrainTask, question_of
from fedcgd_flower.replies import bounded

CONFIGURED = "keeper"
"""Under which a node's configuration names the file of the keeper's key."""

TURNS = "turns"
"""Under which a node's configuration names the file in which it counts its users' turns."""

_ROUNDING = 2.0**-40  # of a norm that was computed on two machines


def masked_answer(
    message: Message,
    context: Context,
    task: TrainTask,
    keepers: Keepers,
    users: Collection[str],
    summed: Callable[[], NDArray[np.signedinteger[Any]]],
) -> Message:
    """The reply to a request: what `summed` gives of `users`, under masks; zeros if it raises or gives anything else.

    The sums are evaluations if the message is an evaluate message, and of a training otherwise, whatever the server calls them.

    Nothing in the reply but the masked integers depends on data: not whether training failed, nor why. A node whose configuration
    names a file for `turns` has counted those of `users` in it before this calls `summed`.

    Raises:
        ValueError: before `summed` is called, if the server's agreement is not what this node is asked to do, or if it is not the
            turn of one of `users`.
    """
    is_evaluation = message.metadata.message_type.partition(".")[0] == MessageType.EVALUATE
    masking = Masking.of(message, keepers, EVALUATION if is_evaluation else TRAINING)
    agreement = masking.agreement
    asked = (task.size, task.grid.step)
    if asked != (agreement.size, agreement.step):
        raise ValueError(
            f"the server asks for {asked[0]} coordinates in steps of {asked[1]:g}, and its keepers make noise for "
            f"{agreement.size} in steps of {agreement.step:g}"
        )
    if not task.norm <= agreement.plan.clip_norm * (1 + _ROUNDING):
        raise ValueError(
            f"the server asks for updates of norm {task.norm:g}, and its keepers make noise for {agreement.plan.clip_norm:g}"
        )
    agreement.info(task.round, task.attempt, masking.present)  # refused before any work
    if (turns := context.node_config.get(TURNS, "")) != "":
        _count(str(turns), agreement, task, users)
    values = _bounded(_or_zeros(summed, task), task, len(users))
    masked = mask(values, agreement, round=task.round, attempt=task.attempt, present=masking.present)
    return keeper_messages.masked_reply(message, task, masked, masking.present)


def _count(file: str, agreement: Agreement, task: TrainTask, users: Collection[str]) -> None:
    try:
        with NodeTurns.open(file) as turns:
            turns.count(agreement, task.round, task.attempt, users)
    except RefusedError as error:
        log_error(str(error))
        raise ValueError(str(error)) from error


def _or_zeros(summed: Callable[[], NDArray[Any]], task: TrainTask) -> NDArray[np.signedinteger[Any]]:
    try:
        values = np.asarray(summed())
        if values.shape == (task.size,) and values.dtype.kind == "i":
            return values
        log_error(f"the app's function gave {values.dtype} of shape {values.shape}, not {task.size} integers")
    except Exception as error:
        log_failure("the app's function", error)
    log_warning("this node adds zeros; under masks nobody can tell")
    return np.zeros(task.size, np.int64)


def _bounded(values: NDArray[np.signedinteger[Any]], task: TrainTask, users: int) -> NDArray[np.signedinteger[Any]]:
    """`values`, no longer than sums of so many users' vectors are: nobody can check it once it is masked."""
    size = task.layout.size
    update, counted = values[:size], values[size:]
    steps = update.astype(np.float64)
    bound = users * task.clip_norm / task.grid.step
    most = users * task.indicator
    if float(steps @ steps) <= (1 - ROUNDING / 2) * bound**2 and bool((np.abs(counted) <= most).all()):
        return values
    log_warning(f"the sum of {users} users was longer than {users} clip norms, and is scaled")
    return bounded(values, task, users)


def answer_question(message: Message, context: Context, keepers: Keepers | None) -> Message:
    """The reply to a question to a keeper; `question_of` says whether a message is one."""
    key_file = context.node_config.get(CONFIGURED)
    if keepers is None or not isinstance(key_file, str) or not key_file:
        return keeper_messages.identity_reply(message, "", b"")
    if question_of(message) == "who":
        key = KeeperKey.from_file(key_file)
        name = keepers.card_of(key).name
        sealed = message.content.config_records[KEEPERS].get(f"challenge {name}")
        return keeper_messages.identity_reply(message, name, proof(key, sealed if isinstance(sealed, bytes) else b""))
    try:
        agreement, opening = keeper_messages.read_opening(message, keepers)
        with Keeper.open(key_file, keepers) as keeper:
            answer = keeper.reply(agreement, opening, check=question_of(message) == "check")
    except ValueError as error:
        answer = Refusal(str(error))
    if not isinstance(answer, Refusal):
        return keeper_messages.opened_reply(message, answer)
    if answer.reason:
        log_warning(f"this keeper does not open the round: {answer.reason}")
    return keeper_messages.refused_reply(message, answer)
