"""Send messages and gather the replies, each matched to the message it answers."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flwr.app import ArrayRecord, Error, Message
from flwr.serverapp import Grid

from fedcgd_flower.flower_private import SIMULATION_GRID


@dataclass(frozen=True, kw_only=True)
class GridKind:
    """How the nodes of a grid are waited for: all that tells a simulation from a deployment.

    Waits are in seconds. A simulated node answers within milliseconds and a deployed one within seconds or hours: replies are
    seen at most a tenth later than they came, as long as that is less than a second.
    """

    is_simulation: bool
    """All nodes are this program's own, and there from the beginning: no others connect, and one that lacks something has it no
    sooner for being asked again."""
    most_unanswered: int | None = None
    """Messages that are out at once. Flower's simulation goes through all of them for each node, many times a second, and whoever
    wants to send, train or answer waits meanwhile. Replies of so many are fetched in less time than they take to train."""
    share_of_looks: float = math.inf
    """Of the time that the last look took, so much is waited at most, where looking takes nobody else's time."""
    first_wait: float = 0.005
    longest_wait: float = 1.0
    late: float = 0.1
    """The part of the time since the last message by which a reply may be seen late."""

    def pause(self, since_sent: float, looking: float) -> float:
        """How many seconds to wait before the next look, where the last took `looking`: looking is half of the time at most."""
        wait = min(self.late * since_sent, looking * self.share_of_looks)
        return max(min(max(wait, self.first_wait), self.longest_wait), looking)


DEPLOYMENT = GridKind(is_simulation=False)
SIMULATION = GridKind(is_simulation=True, most_unanswered=64, share_of_looks=20)


def kind_of(grid: object) -> GridKind:
    """What kind of grid this is."""
    return SIMULATION if any(kind.__name__ == SIMULATION_GRID for kind in grid.__class__.__mro__) else DEPLOYMENT


def send_and_receive(grid: Grid, messages: Sequence[Message], timeout: float) -> list[Message | None]:
    """The reply to each of `messages`, in order, or None where `receive` has none."""
    replies = {reply.metadata.reply_to_message_id: reply for reply in receive(grid, messages, timeout)}
    return [replies.get(message.metadata.message_id) for message in messages]


def receive(grid: Grid, messages: Sequence[Message], timeout: float) -> Iterator[Message]:
    """The replies to `messages`, each as soon as it is there, until all are or `timeout` seconds are over.

    Only replies to these very messages are given, at most one each, and none that cannot be read. One to a node that is gone
    is answered by an error. Raises ValueError if the SuperLink refuses a message to a node that is there.
    """
    kind, unsent, waiting = kind_of(grid), list(messages), set[str]()
    most, deadline = kind.most_unanswered or len(unsent), math.inf
    while True:
        if unsent and 2 * len(waiting) <= most:  # else it is not worth it to send more
            room = most - len(waiting)
            some, unsent = unsent[:room], unsent[room:]
            gone = push(grid, some)
            waiting |= {message.metadata.message_id for message in some}
            waiting -= {reply.metadata.reply_to_message_id for reply in gone}
            sent = time.monotonic()
            deadline = min(deadline, sent + timeout)
            yield from gone
        looking = 0.0  # seconds, without those that go into what becomes of the replies
        for message_id in sorted(waiting):
            began, found = time.monotonic(), None
            try:
                found = pull(grid, message_id)
            except UnreadableReplyError:
                waiting.discard(message_id)
            looking += time.monotonic() - began
            if found is not None:
                waiting.discard(message_id)
                yield found
        now = time.monotonic()
        if not (unsent or waiting) or now >= deadline:
            return
        if not unsent or 2 * len(waiting) > most:
            time.sleep(min(kind.pause(now - sent, looking), deadline - now))


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
    # Flower's code for a node that is not there (any more).
    return [Message(Error(code=5, reason="the node is gone"), reply_to=message) for message in refused]


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
