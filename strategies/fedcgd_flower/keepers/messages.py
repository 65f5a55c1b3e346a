"""What travels between server, nodes and keepers: masked updates, and requests to open their sum.

All questions to keepers are train messages, because a mod sees only messages for which the ClientApp has a function.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from numpy.typing import NDArray

from fedcgd.keepers import (
    EVALUATION,
    TRAINING,
    Agreement,
    Keepers,
    Kind,
    Masked,
    NodeParticipations,
    mask,
    service,
)
from fedcgd.keepers.identities import SEALED_BYTES
from fedcgd.keepers.masks import TICKET_BYTES
from fedcgd.keepers.wire import MOST_LINE
from fedcgd.noise.quantisation import Lattice
from fedcgd.support.untrusted import conform, parse_json
from fedcgd_flower.flower_private import log_error, log_failure, log_warning
from fedcgd_flower.layout import view
from fedcgd_flower.messages import FLAT, TASK, UPDATE, TrainTask, read_flat
from fedcgd_flower.noise_provider import KEEPERS
from fedcgd_flower.problems import RejectionReason


@dataclass(frozen=True)
class Masking:
    """How the nodes of a round mask: for which run, and for which keepers."""

    agreement: Agreement
    present: tuple[str, ...]

    @property
    def lattice(self) -> Lattice:
        """That of the integers."""
        return Lattice(self.agreement.step)

    @property
    def records(self) -> dict[str, ConfigRecord]:
        """As a request carries it."""
        agreement = json.dumps(self.agreement.to_description())
        return {KEEPERS: ConfigRecord({"agreement": agreement, "present": list(self.present)})}

    @staticmethod
    def from_message(message: Message, keepers: Keepers, kind: Kind) -> "Masking":
        """What the server says in `message`, for sums of this kind, which is never what the server says that they are.

        Raises ValueError if it is about other keepers, or describes no agreement.
        """
        record = conform(dict(message.content.config_records[KEEPERS]), _MASKING, "a message with keepers")
        description = parse_json(record["agreement"], dict, "the agreement", most=MOST_LINE)
        return Masking(Agreement.from_description(description, keepers, kind), tuple(record["present"]))


# A node's reply.


def masked_reply(request: Message, task: TrainTask, masked: Masked, present: Sequence[str]) -> Message:
    """The reply to `request`: masked integers, and sealed seeds. Nothing else in it depends on anybody's data."""
    description = ConfigRecord(
        {
            "round": task.round,
            "attempt": task.attempt,
            "ticket": masked.ticket,
            "sealed": b"".join(masked.sealed[name] for name in present),
        }
    )
    content = RecordDict({UPDATE: ArrayRecord({FLAT: Array(masked.residues)}), TASK: description})
    return Message(content, reply_to=request)


def read_masked_reply(reply: Message | None, task: TrainTask, masking: Masking) -> Masked | RejectionReason:
    """The masked integers in a reply, or why there are none."""
    read = read_flat(reply, task, _REPLY_FIELDS, np.uint32 if masking.agreement.bits == 32 else np.uint64)
    if isinstance(read, str):
        return read
    description, residues = read
    ticket, sealed = description.get("ticket"), description.get("sealed")
    if not isinstance(ticket, bytes) or len(ticket) != TICKET_BYTES:
        return "wrong arrays"
    if not isinstance(sealed, bytes) or len(sealed) != SEALED_BYTES * len(masking.present):
        return "wrong arrays"
    parts = [sealed[start : start + SEALED_BYTES] for start in range(0, len(sealed), SEALED_BYTES)]
    return Masked(residues, ticket, dict(zip(masking.present, parts, strict=True)))


_REPLY_FIELDS = {"round", "attempt", "ticket", "sealed"}


# Questions to keepers, and their answers, as `fedcgd.keepers.wire` writes both.


def keeper_question(node_id: int, question: str, request: bytes) -> Message:
    """A question to the keeper that a node may be: "/who", "/check" or "/open"."""
    asked = ConfigRecord({"question": question, "request": request})
    return Message(RecordDict({KEEPERS: asked}), dst_node_id=node_id, message_type=MessageType.TRAIN)


def read_answer(reply: Message) -> bytes:
    """A keeper's answer; b"" if there is none, as of a node that is no keeper."""
    try:
        return view(reply.content.array_records[UPDATE][FLAT]).tobytes()
    except Exception:  # the bytes are the sender's: any failure to parse them is the same to us
        return b""


_MASKING = {"agreement": str, "present": [str], str: object}

CONFIGURED = "keeper"
"""Under which a node's configuration names the file of the keeper's key."""

PARTICIPATIONS = "participations"
"""Under which a node's configuration names the file in which it counts its users' participations."""


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
    names a file for `participations` has counted those of `users` in it before this calls `summed`.

    Raises:
        ValueError: before `summed` is called, if the server's agreement is not what this node is asked to do.
        RefusedError: before it too, if it is not the turn of one of `users`.
    """
    is_evaluation = message.metadata.message_type.partition(".")[0] == MessageType.EVALUATE
    masking = Masking.from_message(message, keepers, EVALUATION if is_evaluation else TRAINING)
    agreement = masking.agreement
    asked, agreed = (task.size, task.clipping.grid.step), (agreement.size, agreement.step)
    norm, most = task.clipping.norm, agreement.plan.clip_norm
    if asked != agreed or not norm <= most * (1 + 2.0**-40):  # the norm was computed on two machines
        raise ValueError(
            f"the server asks for {asked[0]} coordinates in steps of {asked[1]:g} and updates of norm {norm:g}, and its keepers "
            f"make noise for {agreed[0]} in steps of {agreed[1]:g} and norm {most:g}"
        )
    agreement.info(task.round, task.attempt, masking.present)  # refused before any work
    if (counts := context.node_config.get(PARTICIPATIONS, "")) != "":
        with NodeParticipations.open(str(counts)) as turns:
            turns.count(agreement, task.round, task.attempt, users)
    values = _bounded(_or_zeros(summed, task), task, len(users))
    masked = mask(values, agreement, round=task.round, attempt=task.attempt, present=masking.present)
    return masked_reply(message, task, masked, masking.present)


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
    parameters = task.layout.size
    if task.clipping.within(values, parameters, users):
        return values
    log_warning(f"the sum of {users} users was longer than {users} clip norms, and is scaled")
    return task.clipping.bounded(values, parameters, users)


def answer_question(message: Message, question: str, context: Context, keepers: Keepers | None) -> Message:
    """The reply to a `question` to a keeper."""
    answer, key_file = None, context.node_config.get(CONFIGURED)
    if keepers is not None and isinstance(key_file, str) and key_file:
        request = message.content.config_records[KEEPERS].get("request")
        asked = request if isinstance(request, bytes) else b""
        answer = service.answer(Path(key_file), keepers, question, asked)
    flat = Array(np.frombuffer(answer or b"", np.uint8))
    return Message(RecordDict({UPDATE: ArrayRecord({FLAT: flat})}), reply_to=message)
