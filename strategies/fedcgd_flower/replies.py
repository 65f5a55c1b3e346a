"""What the server accepts of the nodes' replies: their sum, within the norm that the clipped updates of so many users can have.

Whatever does not look exactly like what was asked for is dropped, with a cause.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message
from numpy.typing import NDArray

from fedcgd.clipping import ROUNDING, clip
from fedcgd.native.vector_kernels import CHUNK, LANES, Lanes, aligned, kernels_for, sum_of_lanes
from fedcgd.noise.quantisation import Integers
from fedcgd_flower import messages
from fedcgd_flower.layout import view
from fedcgd_flower.messages import TrainTask
from fedcgd_flower.update import Steps

RejectionReason = Literal[
    "no answer",
    "node lost",
    "app crashed",
    "error in local training",
    "client error",
    "without fedcgd's mod",
    "not asked for",
    "wrong round",
    "more users than asked",
    "wrong arrays",
    "wrong shape or dtype",
    "not finite",
    "tied weights",
    "changed after clipping",
    "left out by its node",
]


_BY_CODE: dict[int, RejectionReason] = {
    3: "node lost",  # its message, its reply or the node itself is not available
    4: "node lost",
    5: "node lost",
    1: "app crashed",  # the ClientApp could not be loaded, or its process ended
    8: "app crashed",
}
_BY_TEXT: dict[str, RejectionReason] = {
    messages.NOT_FINITE: "not finite",
    messages.TIED: "tied weights",
    messages.ANOTHER_MODEL: "wrong arrays",
    messages.LOCAL_FAILURE: "error in local training",
}


def rejection_reason(error: Error) -> RejectionReason:
    """Why a node answered with an error. Its text may tell about users' data: it is compared, and never logged."""
    return _BY_CODE.get(error.code) or _BY_TEXT.get(error.reason or "", "client error")


HINTS: dict[RejectionReason, str] = {
    "not finite": messages.NOT_FINITE_WORDS,
    "tied weights": "two names of state_dict() are one tensor of the model, as the embedding and the head of a language model "
    f"often are; {messages.TIED_WORDS}; a node's own log names them",
    "left out by its node": "a user's training raised, took too long, or ended with numbers that are not finite, or the node's "
    "users(context) did not name it any more; a node's own log says which of these",
    "no answer": "the node was too slow (raise timeout=), or is gone",
    "client error": "a ClientApp raised outside of fedcgd's code; clipped_update_mod must be the first of its mods",
    "changed after clipping": "what fedcgd sent was changed, or something was added to it, before it left the node: take the "
    "mods that stand before clipped_update_mod out of its ClientApp, or put them after it; what they added was not read",
    "without fedcgd's mod": "a ClientApp replied by itself; it needs clipped_update_mod as the first of its mods, or host_users",
    "error in local training": "a node's own log says where its training failed",
    "wrong arrays": "a train function must reply the whole model that it was sent, with the same names and shapes; a node's own "
    "log says what differs",
    "app crashed": "a node's own log says why its ClientApp could not be loaded, or ended",
    "wrong shape or dtype": "a ClippedSum of your own must return work.size integers, as work.clipped gives them",
}
"""What the operator can do about a cause, for the log."""


_AT_ONCE = 2**30
"""Bytes of replies that are added in one pass over the sum: a pass costs as much as reading four replies of its size."""


def sum_of_replies(
    replies: Iterable[tuple[Message | None, TrainTask]], size: int, out: Integers | None = None
) -> tuple[Integers, list[int | RejectionReason]]:
    """(Σ updates in steps, shape (size,), in `out` if that is given; how many users are in each reply, or why it was dropped).

    The sum of several users comes as integers, because the node has to round each user's update. A single user's update may also
    come as floats, clipped or not: it is clipped and rounded here.
    Guarantee: whatever a reply holds, this returns, and adds at most norm (users asked) · task.norm for it.
    Replies are taken as they come, and gone when they are added: those of `_AT_ONCE` bytes together, and a larger one by itself.
    """
    total: Integers = np.empty(size, np.int64) if out is None else out
    total.fill(0)
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
            results.append("changed after clipping")
        else:
            if not part.is_within():
                total -= part.update
                total += bounded(part.update, part.task, len(part.task.users))
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
        """True only if the update's norm is at most bound = users·clip_norm, and always if it is at most (1 − `ROUNDING`)·bound;
        and only if what is counted is within its bounds.

        In float64, with u = 2⁻⁵³: a number that became a float is off by a factor 1 ± u, its square by (1 ± u)³, and a sum of
        n ≤ 2¹⁶ squares, whatever the order, by (1 ± u)ⁿ⁻¹ more, as are the sums of at most 2²⁴ of these by (1 ± u)^(2²⁴). All
        terms are positive, so up to 2⁴⁰ numbers the result is at least (1 − 2⁻²⁷) times the true square of the norm: if it is at
        most (1 − 2⁻²³)·bound², as computed (another 2⁻⁴⁹), the true one is below bound². Nothing overflows: the sum stays below
        2⁴⁰·2¹²⁶. An honest sum, clipped to (1 − `ROUNDING`)·bound with `ROUNDING` = 2⁻²², passes.
        """
        task, users = self.task, len(self.task.users)
        counted, most = self.update[task.layout.size :], users * task.indicator
        bound = users * task.clip_norm / task.grid.step
        return self._squares <= (1 - ROUNDING / 2) * bound**2 and bool(((counted <= most) & (counted >= -most)).all())


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
    if set(content) != {messages.TASK, messages.UPDATE} or not set(description) <= messages.SAID_WITH_AN_UPDATE:
        return "changed after clipping"  # nobody asked for more, and nobody reads it
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
        return "wrong shape or dtype"
    if len(task.users) == 1 and value.dtype in (np.float32, np.float64) and len(value) == task.layout.size:
        if not np.isfinite(value).all():
            return "not finite"
        if messages.CHECKSUM in description:
            return "changed after clipping"  # it left fedcgd's code as integers
        return _UnverifiedUpdate(_clipped_and_rounded(value.astype(np.float64), task), task, answered, None)
    if value.dtype == task.dtype and len(value) == task.size:
        return _UnverifiedUpdate(np.ascontiguousarray(value), task, answered, description.get(messages.CHECKSUM))
    return "wrong shape or dtype"


def _clipped_and_rounded(update: NDArray[np.float64], task: TrainTask) -> Integers:
    """A single user's update, as `clipped_update` would have sent it."""
    clipped = clip(update, task.clip_norm * task.update_scale)
    steps = task.grid.to_steps(clipped / task.update_scale)
    if not task.indicator:
        return steps
    return np.append(steps, task.indicator if np.array_equal(clipped, update) else -task.indicator)


def bounded(total: Steps, task: TrainTask, users: int) -> Integers:
    """`total`, made no longer than sums of so many users' vectors are: the update, and what is counted, each by itself."""
    size = task.layout.size
    update, counted = total[:size], total[size:].astype(np.int64)
    bounded = task.grid.to_steps(clip(task.grid.from_steps(update), users * task.clip_norm))
    most = users * task.indicator
    return np.append(bounded, np.clip(counted, -most, most)) if task.indicator else bounded
