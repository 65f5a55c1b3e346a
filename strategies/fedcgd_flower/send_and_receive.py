"""Send messages and gather the replies, each matched to the message it answers."""

import time
from collections.abc import Sequence

from flwr.app import Message
from flwr.serverapp import Grid

# A simulated node answers within milliseconds and a deployed one within seconds; asking often costs the SuperLink little.
_FIRST_WAIT = 0.02
_LONGEST_WAIT = 1.0


def send_and_receive(grid: Grid, messages: Sequence[Message], timeout: float) -> list[Message | None]:
    """The reply to each of `messages`, in order, or None where none came within `timeout` seconds.

    Only replies to these very messages are returned, at most one each.
    """
    ids = list(grid.push_messages(list(messages)))  # deployment needs a list; an id is None if the message was refused
    replies: dict[str, Message] = {}
    waiting = {message_id for message_id in ids if message_id}
    deadline = time.monotonic() + timeout
    wait = _FIRST_WAIT
    while waiting:
        for reply in grid.pull_messages(sorted(waiting)):
            asked = reply.metadata.reply_to_message_id
            if asked in waiting:
                replies[asked] = reply
                waiting.discard(asked)
        if not waiting or time.monotonic() >= deadline:
            break
        time.sleep(min(wait, max(deadline - time.monotonic(), 0)))
        wait = min(1.5 * wait, _LONGEST_WAIT)
    return [replies.get(message_id) for message_id in ids]
