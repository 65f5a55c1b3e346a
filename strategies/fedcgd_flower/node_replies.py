"""How a node answers, in the clear or under masks. `keeper_app` is loaded only where there are keepers."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from flwr.app import Context, Message

from fedcgd_flower.messages import TrainTask, failed_reply, question_of, train_reply
from fedcgd_flower.update import Steps

if TYPE_CHECKING:
    from fedcgd.keepers import Keepers


def keeper_reply(message: Message, context: Context, keepers: "Keepers | None") -> Message | None:
    """The reply to a question to a keeper; None if `message` is none."""
    if question_of(message) is None:
        return None
    from fedcgd_flower.keepers.messages import answer_question

    return answer_question(message, context, keepers)


def sum_reply(
    message: Message,
    context: Context,
    task: TrainTask,
    keepers: "Keepers | None",
    users: Collection[str],
    summed: Callable[[], tuple[Steps, int]],
) -> Message:
    """The reply to a request: the sum that `summed` makes for `users` of the node, and how many of them are in it.

    With `keepers` the sum is masked, and how many are in it stays on the node.
    """
    if keepers is not None:
        from fedcgd_flower.keepers.messages import masked_answer

        return masked_answer(message, context, task, keepers, users, lambda: summed()[0])
    try:
        return train_reply(message, task, *summed())
    except Exception as error:
        return failed_reply(message, error)
