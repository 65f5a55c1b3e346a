"""The question which users a node hosts, and its answer: their ids, or why it can name none."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedcgd_flower.messages import TASK

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
