"""Send messages and gather the replies, each matched to the message it answers."""

import gc
import time
from collections.abc import Iterator, Sequence

from flwr.app import ArrayRecord, Error, Message
from flwr.serverapp import Grid

from fedcgd_flower.flower_private import is_simulation

NODE_LOST = 5
"""Flower's code for a node that is not there (any more)."""

# Seconds between looks. A simulated node answers within milliseconds and a deployed one within seconds or hours: replies are seen
# at most a tenth later than they came, as long as that is less than a second.
_FIRST_WAIT, _LONGEST_WAIT = 0.005, 1.0
_LATE = 0.1
_SHARE = 0.05
"""The part of a simulation's time that looking for replies may take. They are in this process: nobody else has to answer."""

_SIMULATED_AT_ONCE = 64
"""Unanswered messages to simulated nodes: Flower's simulation goes through all of them for each node, many times a second, and
whoever wants to send, train or answer waits meanwhile. Replies of so many are fetched in less time than they take to train."""

_LARGE = 256
"""Mebibytes of a message from which on it is worth a look for what holds it."""


def send_and_receive(grid: Grid, messages: Sequence[Message], timeout: float) -> list[Message | None]:
    """The reply to each of `messages`, in order, or None where `receive` has none."""
    replies = {reply.metadata.reply_to_message_id: reply for reply in receive(grid, messages, timeout)}
    return [replies.get(message.metadata.message_id) for message in messages]


def receive(grid: Grid, messages: Sequence[Message], timeout: float) -> Iterator[Message]:
    """The replies to `messages`, each as soon as it is there, until all are or `timeout` seconds are over.

    Only replies to these very messages are given, at most one each, and none that cannot be read. One to a node that is gone
    is answered by an error. None is held here: whoever is done with a reply frees its memory before the next one comes. Nor is a
    message that was sent.
    Raises ValueError if the SuperLink refuses a message to a node that is there.
    """
    simulated = is_simulation(grid)
    most = _SIMULATED_AT_ONCE if simulated else len(messages)
    unsent = list(messages)
    del messages
    waiting: set[str] = set()
    deadline: float | None = None

    def has_room() -> bool:
        return bool(unsent) and 2 * len(waiting) <= most

    while True:
        if has_room():
            some, unsent = unsent[: most - len(waiting)], unsent[most - len(waiting) :]
            gone = push(grid, some)
            waiting |= {message.metadata.message_id for message in some}
            if _mebibytes(some[0]) > _LARGE:
                some.clear()
                gc.collect()  # Flower's records are in cycles, which would hold what was sent
            waiting -= {reply.metadata.reply_to_message_id for reply in gone}
            sent = time.monotonic()
            deadline = sent + timeout if deadline is None else deadline
            yield from gone
        looking = 0.0  # seconds, without those that go into what becomes of the replies
        for message_id in sorted(waiting):
            looked = time.monotonic()
            try:
                found = [reply] if (reply := pull(grid, message_id)) is not None else []
            except UnreadableReplyError:
                found = []
                waiting.discard(message_id)
            reply = None
            looking += time.monotonic() - looked
            if found:
                waiting.discard(message_id)
                yield found.pop()
        now = time.monotonic()
        if deadline is None or now >= deadline or not (waiting or unsent):
            break
        if has_room():
            continue
        wait = _LATE * (now - sent)
        if simulated:
            wait = min(wait, looking / _SHARE)
        wait = min(max(wait, _FIRST_WAIT), _LONGEST_WAIT)
        # Looking at many messages takes the SuperLink's time: at most half of it.
        time.sleep(min(max(wait, looking), max(deadline - now, 0)))


class UnreadableReplyError(Exception):
    """A node's reply that Flower cannot read: for us, none."""


def pull(grid: Grid, message_id: str) -> Message | None:
    """The reply to one message, None if it is not there yet. Raises UnreadableReplyError if it is there and cannot be read.

    One by one, because Flower raises for a whole batch, and loses the good replies in it, if one of them is malformed.
    """
    try:
        replies = list(grid.pull_messages([message_id]))
    except Exception as error:
        list(grid.get_node_ids())  # raises if it is the connection that failed, and not the reply
        raise UnreadableReplyError from error
    return next((reply for reply in replies if reply.metadata.reply_to_message_id == message_id), None)


def push(grid: Grid, messages: Sequence[Message]) -> list[Message]:
    """Send `messages`; the result is an error reply for each whose node is gone.

    Raises ValueError, with the size, if one is refused although its node is there.
    """
    refused = _push(grid, messages)
    if len(refused) > 1:  # together they may have been too large
        refused = [message for message in refused if _push(grid, [message])]
    if not refused:
        return []
    connected = set(grid.get_node_ids())
    for message in refused:
        if message.metadata.dst_node_id in connected:
            raise ValueError(
                f"the SuperLink refused a message of {_mebibytes(message):.1f} MiB to node {message.metadata.dst_node_id}: raise "
                "the limit on the size of requests (of the SuperLink, or of a proxy before it), or train fewer parameters"
            )
    return [Message(Error(code=NODE_LOST, reason="the node is gone"), reply_to=message) for message in refused]


def _push(grid: Grid, messages: Sequence[Message]) -> list[Message]:
    """Those of `messages` that were refused. Flower names the accepted ones, None or nothing in place of the others."""
    if not messages:
        return []
    accepted = set(grid.push_messages(list(messages)))  # deployment needs a list
    return [message for message in messages if message.metadata.message_id not in accepted]


def _mebibytes(message: Message) -> float:
    records = (record for record in message.content.values() if isinstance(record, ArrayRecord))
    arrays = (array for record in records for array in record.values())
    return sum(len(array.data) for array in arrays) / 2**20
