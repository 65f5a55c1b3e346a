"""What an inner strategy sends to the users of a round: asked on a grid of its own, and refused where it cannot be sent.

An inner strategy chooses nodes and may tell each something else. Here the plan chooses users, and each of them gets the same: the
model, and the records that the inner strategy puts beside it. Whatever would get lost on the way is an error that names it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcgd_flower.inner import record_keys_of, warnings_only

_FLOWER_ASKS = 2  # times a round: for a fraction of the nodes, and to sample them
_MOST_QUESTIONS, _MOST_NODES = 16, 1 << 16


@dataclass(frozen=True, kw_only=True)
class InnerRequest:
    """What each user of a round gets beside the model."""

    config: ConfigRecord
    record_keys: tuple[str, str]
    """The names of the model and the configuration."""
    records: Mapping[str, ConfigRecord | MetricRecord]
    """Further records, by name."""
    message_type: str
    """"train", or "train.…" for an app with functions of other names."""


class _PlanningGrid(Grid):
    """Shows the inner strategy as many nodes as it wants to wait for, and sends nothing."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._pending = 0

    def get_node_ids(self) -> Iterable[int]:
        self._pending += 1
        if self._pending > _FLOWER_ASKS:  # whoever asks again waits for more
            self._nodes = min(32 * self._nodes, _MOST_NODES)
        if self._pending > _MOST_QUESTIONS:
            raise RuntimeError("the inner strategy waits for nodes; its configure_train must take those that are there")
        return range(1, self._nodes + 1)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("the inner strategy may not send messages by itself: what it sends would bypass the noise")

    run = property(_refuse)
    set_run = create_message = push_messages = pull_messages = send_and_receive = _refuse


def inner_request(inner: Strategy, server_round: int, arrays: ArrayRecord, config: ConfigRecord) -> InnerRequest:
    """What `inner` wants to tell clients in this round (FedProx adds its μ to the configuration, for example).

    Args:
        inner: the strategy. What it changes in itself stays changed.
        server_round: the round, from 1.
        arrays: the model's trained arrays.
        config: the configuration of the training. What `inner` changes in it stays changed.

    Raises:
        ValueError: if `inner` asks nobody, tells nodes different things, or sends what is neither the model nor a record of
            numbers and texts.
    """
    name = type(inner).__name__
    wanted = max(1, getattr(inner, "min_available_nodes", 1), getattr(inner, "min_train_nodes", 1))
    with warnings_only():
        messages = list(inner.configure_train(server_round, arrays, config, _PlanningGrid(wanted)))
    if not messages:
        raise ValueError(
            f"{name} asks no node in round {server_round} (fraction_train = {getattr(inner, 'fraction_train', None)}): the plan "
            "says how many rounds there are and who is asked, and a round cannot be left out; its configure_train must make a "
            "message"
        )
    first = messages[0]
    for other in messages[1:]:
        if (difference := _difference(first, other)) is not None:
            raise ValueError(
                f"{name} {difference}: who is asked is drawn by the plan, by user and not by node, and every user of a round is "
                "told the same"
            )
    message_type = first.metadata.message_type
    if message_type.partition(".")[0] != MessageType.TRAIN:
        raise ValueError(f"{name} sends {message_type!r} messages to train with; they must be 'train' or 'train.NAME'")
    arrays_key = _model_key(name, first.content, arrays)
    others = {key: record for key, record in first.content.items() if key != arrays_key}
    config_key = record_keys_of(inner)[1]
    configs = [key for key, record in others.items() if isinstance(record, ConfigRecord)]
    if config_key not in configs and len(configs) == 1:
        config_key = configs[0]
    sent = others.pop(config_key, None)
    records = {key: record for key, record in others.items() if isinstance(record, ConfigRecord | MetricRecord)}
    return InnerRequest(
        config=sent if isinstance(sent, ConfigRecord) else ConfigRecord(),
        record_keys=(arrays_key, config_key),
        records=records,
        message_type=message_type,
    )


def _model_key(name: str, content: RecordDict, arrays: ArrayRecord) -> str:
    """Under which name the model is sent. Raises ValueError unless it is the only record of arrays, and as it was given."""
    found = list(content.array_records)
    models = [key for key, record in content.array_records.items() if _same_arrays(record, arrays)]
    if len(found) == 1 and len(models) == 1:
        return models[0]
    if not models:
        raise ValueError(
            f"{name} sends {_named(found)} in place of the model that it was given ({len(arrays)} arrays): what the users "
            "trained from would not be what was released. Arrays that are not trained are left out by trainable=[…]"
        )
    raise ValueError(
        f"{name} sends arrays beside the model: {_named([key for key in found if key != models[0]])}. Only the model's clipped "
        "update comes back from a node, so that methods with state on clients (SCAFFOLD's control variates, for example) cannot "
        "work inside CorrelatedNoise. Numbers and texts for the nodes may go into a ConfigRecord"
    )


def _difference(first: Message, other: Message) -> str | None:
    """What one message tells its node that the other does not; None if they are the same."""
    if first.metadata.message_type != other.metadata.message_type:
        return f"sends {first.metadata.message_type!r} to one node and {other.metadata.message_type!r} to another"
    if first.content is other.content:
        return None
    if list(first.content) != list(other.content):
        return f"sends the records {list(first.content)} to one node and {list(other.content)} to another"
    for key, record in first.content.items():
        theirs: Any = other.content[key]
        if isinstance(record, ArrayRecord):
            if not _same_arrays(record, theirs):
                return f"sends other arrays under {key!r} to one node than to another"
        elif dict(record) != dict(theirs):
            entry = next(k for k in [*record, *theirs] if k not in record or k not in theirs or record[k] != theirs[k])
            values = f"{record.get(entry)!r} and {theirs.get(entry)!r}"
            return f"tells nodes different values of {entry!r} in {key!r} ({values})"
    return None


def _same_arrays(sent: Mapping[str, Array], given: Mapping[str, Array]) -> bool:
    if sent is given:
        return True
    if list(sent) != list(given):
        return False
    return all(array is given[name] or _form(array) == _form(given[name]) for name, array in sent.items())


def _form(array: Array) -> tuple[object, ...]:
    return array.dtype, tuple(array.shape), array.stype, array.data


def _named(keys: list[str]) -> str:
    return ", ".join(map(repr, keys)) or "no arrays"
