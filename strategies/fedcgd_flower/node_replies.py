"""How a node answers: in the clear, or under masks that only keepers open. Their part is loaded only where there are keepers."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from flwr.app import Context, Message

from fedcgd_flower.messages import TrainTask, failed_reply, train_reply
from fedcgd_flower.update import Steps

if TYPE_CHECKING:
    from fedcgd.keepers import Keepers

KEEPERS = "fedcgd-keepers"
"""The record that says which agreement and which keepers a round has; on a question to a keeper, also what is asked."""


def has_keepers(message: Message) -> bool:
    """Whether a request says that the round has keepers, or is a question to one."""
    return KEEPERS in message.content.config_records


def question_of(message: Message) -> str | None:
    """What a keeper is asked: "who", "check" or "open"; None if the message is no question to a keeper."""
    asked = message.content.config_records[KEEPERS].get("question") if has_keepers(message) else None
    return asked if isinstance(asked, str) else None


def keeper_reply(message: Message, context: Context, keepers: "Keepers | None") -> Message | None:
    """The reply to a question to a keeper; None if `message` is none."""
    if question_of(message) is None:
        return None
    from fedcgd_flower.keepers import answer_question

    return answer_question(message, context, keepers)


def check_masked(message: Message, keepers: "Keepers | None") -> None:
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
        from fedcgd_flower.keepers import masked_answer

        return masked_answer(message, context, task, keepers, users, lambda: summed()[0])
    try:
        return train_reply(message, task, *summed())
    except Exception as error:
        return failed_reply(message, error)
