"""What the server accepts of the nodes' replies: their sum, within the norm that the clipped updates of so many users can have.

Whatever does not look exactly like what was asked for is dropped, with a cause.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from numpy.typing import NDArray

from fedcgd.clipping import clip
from fedcgd.native.vector_kernels import CHUNK, LANES, aligned, kernels, sum_of_lanes
from fedcgd.noise.quantisation import Integers
from fedcgd_flower import messages
from fedcgd_flower.layout import view
from fedcgd_flower.messages import TrainTask
from fedcgd_flower.problems import RejectionReason, rejection_reason
from fedcgd_flower.update import Clipping, Steps


def sum_of_replies(
    replies: Iterable[tuple[Message | None, TrainTask]], size: int
) -> tuple[Integers, list[int | RejectionReason]]:
    """(Σ updates in steps, shape (size,); how many users are in each reply, or why it was dropped).

    The sum of several users comes as integers, because the node has to round each user's update. A single user's update may also
    come as floats, clipped or not: it is clipped and rounded here.
    Guarantee: whatever a reply holds, this returns, and adds at most norm (users asked) · task.clipping.norm for it.
    Replies are added as they come. A reply is read once: its norm and checksum are found while it is added, and one that turns
    out to be wrong is subtracted again, which for integers is exact.
    """
    total: Integers = np.zeros(size, np.int64)
    results: list[int | RejectionReason] = []
    for reply, task in replies:
        received = _received(reply, task)
        if not isinstance(received, _Update):
            results.append(received)
            continue
        steps, clipping, users = received.steps, task.clipping, len(task.users)
        added, squares = _add(steps, total, task.layout.size)
        if received.checksum is not None and received.checksum != messages.modulo(added):
            total -= steps
            results.append("altered reply")
            continue
        if not clipping.is_short(squares, steps[task.layout.size :], users):
            total -= steps
            total += clipping.bounded(steps, task.layout.size, users)
        results.append(received.answered)
    return total, results


def _add(steps: Steps, total: Integers, parameters: int) -> tuple[int, float]:
    """Add to `total`; (the sum of the entries, the squared norm of the first `parameters`: what is counted is no part of it)."""
    form, lanes, added, squares = kernels(), np.empty(LANES), 0, 0.0
    for start in range(0, parameters, CHUNK):
        part = slice(start, min(start + CHUNK, parameters))
        added += form.add(steps[part], total[part], lanes)
        squares += sum_of_lanes(lanes)
    total[parameters:] += steps[parameters:]
    return added + int(steps[parameters:].sum(dtype=np.int64)), squares


@dataclass(frozen=True)
class _Update:
    """A well-formed reply, whose numbers nobody has checked yet."""

    steps: Steps
    answered: int
    checksum: object = None
    """What the node says that the numbers add up to; None if it says nothing."""


def _received(reply: Message | None, task: TrainTask) -> _Update | RejectionReason:
    if reply is None:
        return "no answer"
    if reply.has_error():
        return rejection_reason(reply.error)
    content = reply.content
    description, arrays = content.get(messages.TASK), content.get(messages.UPDATE)
    if not isinstance(description, ConfigRecord):
        return "without fedcgd's mod"
    if not isinstance(arrays, ArrayRecord) or sum(isinstance(record, ArrayRecord) for record in content.values()) > 1:
        return "wrong arrays"
    if set(content) != {messages.TASK, messages.UPDATE} or not set(description) <= messages.REPLY_FIELDS:
        return "altered reply"  # nobody asked for more, and nobody reads it
    if (description.get("round"), description.get("attempt")) != (task.round, task.attempt):
        return "wrong round"
    answered = description.get("answered")
    if not isinstance(answered, int) or not 0 <= answered <= len(task.users):
        return "more users than asked"
    if set(arrays) != {messages.FLAT}:
        return "wrong arrays"
    try:
        value = view(arrays[messages.FLAT])
    except Exception:  # the bytes are the sender's: any failure to parse them is the same to us
        return "wrong arrays"
    if not isinstance(value, np.ndarray) or value.ndim != 1:
        return "wrong type"
    if len(task.users) == 1 and value.dtype in (np.float32, np.float64) and len(value) == task.layout.size:
        if not np.isfinite(value).all():
            return "not finite"
        if messages.CHECKSUM in description:
            return "altered reply"  # it left fedcgd's code as integers
        return _Update(_clipped_and_rounded(value.astype(np.float64), task.clipping), answered)
    if value.dtype == task.dtype and len(value) == task.size:
        return _Update(aligned(value), answered, description.get(messages.CHECKSUM))
    return "wrong type"


def _clipped_and_rounded(update: NDArray[np.float64], clipping: Clipping) -> Integers:
    """A single user's update, as `clipped_update` would have sent it."""
    clipped = clip(update, clipping.clip_norm * clipping.update_scale)
    steps = clipping.grid.to_steps(clipped / clipping.update_scale)
    if not clipping.indicator:
        return steps
    return np.append(steps, clipping.indicator if np.array_equal(clipped, update) else -clipping.indicator)
