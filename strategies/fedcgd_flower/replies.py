"""What the server accepts of the nodes' replies: their sum, within the norm that the clipped updates of so many users can have.

Whatever does not look exactly like what was asked for is dropped, with a cause.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from numpy.typing import NDArray

from fedcgd.clipping import clip
from fedcgd.native.vector_kernels import CHUNK, LANES, Lanes, aligned, kernels_for, sum_of_lanes
from fedcgd.noise.quantisation import Integers
from fedcgd_flower import messages
from fedcgd_flower.layout import view
from fedcgd_flower.messages import TrainTask
from fedcgd_flower.problems import RejectionReason, rejection_reason
from fedcgd_flower.update import Clipping, Steps

_AT_ONCE = 2**30
"""Bytes of replies that are added in one pass over the sum: a pass costs as much as reading four replies of its size."""


def sum_of_replies(
    replies: Iterable[tuple[Message | None, TrainTask]], size: int
) -> tuple[Integers, list[int | RejectionReason]]:
    """(Σ updates in steps, shape (size,); how many users are in each reply, or why it was dropped).

    The sum of several users comes as integers, because the node has to round each user's update. A single user's update may also
    come as floats, clipped or not: it is clipped and rounded here.
    Guarantee: whatever a reply holds, this returns, and adds at most norm (users asked) · task.clipping.norm for it.
    Replies are taken as they come, and gone when they are added: those of `_AT_ONCE` bytes together, and a larger one by itself.
    """
    total: Integers = np.zeros(size, np.int64)
    results: list[int | RejectionReason] = []
    together: list[_UnverifiedUpdate | RejectionReason] = []
    held = 0
    for reply, task in replies:
        part = _received(reply, task)
        del reply
        together.append(part)
        if isinstance(part, _UnverifiedUpdate):
            held += part.update.nbytes
        del part
        if held >= _AT_ONCE:
            results += _added(together, total)
            together, held = [], 0
    return total, results + _added(together, total)


def _added(received: Sequence["_UnverifiedUpdate | RejectionReason"], total: Integers) -> list[int | RejectionReason]:
    """How many users are in each, or why it was dropped; those that are right are in `total` then.

    All are added stretch by stretch, with their norms and checksums in the same pass, so that each is read once and the
    sum goes through memory once. One that turns out to be wrong is subtracted again, which for integers is exact.
    """
    lanes = np.empty(LANES)
    unverified_updates = [part for part in received if isinstance(part, _UnverifiedUpdate)]
    for start in range(0, len(total), CHUNK):
        for unverified in unverified_updates:
            unverified.add_to(total, start, lanes)
    results: list[int | RejectionReason] = []
    for part in received:
        if not isinstance(part, _UnverifiedUpdate):
            results.append(part)
        elif part.is_changed():
            total -= part.update
            results.append("altered reply")
        else:
            if not part.is_within():
                total -= part.update
                task = part.task
                total += task.clipping.bounded(part.update, task.layout.size, len(task.users))
            results.append(part.answered)
    return results


class _UnverifiedUpdate:
    """A well-formed reply, whose numbers nobody has checked yet; and what is found out about them while they are added."""

    def __init__(self, update: Steps, task: TrainTask, answered: int, checksum: object) -> None:
        self.update, self.task, self.answered = aligned(update), task, answered
        self._claimed = checksum  # what the node says that the numbers add up to; None if it says nothing
        self._sum, self._squares = 0, 0.0
        self._kernels = kernels_for(len(update))

    def add_to(self, total: Integers, start: int, lanes: Lanes) -> None:
        """Add the stretch of the update that begins at `start` to `total`."""
        end = min(start + CHUNK, len(self.update))
        model = max(start, min(end, self.task.layout.size))  # after these, what is counted: no part of the norm
        if model > start:
            self._sum += self._kernels.add(self.update[start:model], total[start:model], lanes)
            self._squares += sum_of_lanes(lanes)
        if end > model:
            self._sum += self._kernels.add(self.update[model:end], total[model:end], lanes)

    def is_changed(self) -> bool:
        """Whether the numbers are not those whose sum, modulo 2⁶⁴, the node sent along."""
        return self._claimed is not None and self._claimed != messages.modulo(self._sum)

    def is_within(self) -> bool:
        """True only if the update's norm is at most users·clip_norm, and always if it is at most (1 − `ROUNDING`) times that; and
        only if what is counted is within its bounds.
        """
        counted = self.update[self.task.layout.size :]
        return self.task.clipping.is_short(self._squares, counted, len(self.task.users))


def _received(reply: Message | None, task: TrainTask) -> _UnverifiedUpdate | RejectionReason:
    if reply is None:
        return "no answer"
    if reply.has_error():
        return rejection_reason(reply.error)
    content = reply.content  # `content.array_records` would keep the update in memory until garbage is collected
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
        return _UnverifiedUpdate(_clipped_and_rounded(value.astype(np.float64), task.clipping), task, answered, None)
    if value.dtype == task.dtype and len(value) == task.size:
        return _UnverifiedUpdate(np.ascontiguousarray(value), task, answered, description.get(messages.CHECKSUM))
    return "wrong type"


def _clipped_and_rounded(update: NDArray[np.float64], clipping: Clipping) -> Integers:
    """A single user's update, as `clipped_update` would have sent it."""
    clipped = clip(update, clipping.clip_norm * clipping.update_scale)
    steps = clipping.grid.to_steps(clipped / clipping.update_scale)
    if not clipping.indicator:
        return steps
    return np.append(steps, clipping.indicator if np.array_equal(clipped, update) else -clipping.indicator)
