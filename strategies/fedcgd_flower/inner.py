"""Drive the inner strategy: it sees one reply a round, which holds the noised mean."""

import copy
import io
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore.run import Run


class _PlanningGrid(Grid):
    """Shows the inner strategy as many nodes as it wants to wait for, and sends nothing."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def get_node_ids(self) -> Iterable[int]:
        return range(1, self._nodes + 1)

    def _refuse(self) -> NoReturn:
        raise RuntimeError("the inner strategy may not send messages by itself: what it sends would bypass the noise")

    @property
    def run(self) -> Run:
        self._refuse()

    def set_run(self, run: Run) -> None:
        self._refuse()

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        self._refuse()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self._refuse()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._refuse()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        self._refuse()


@contextmanager
def _quiet() -> Iterator[None]:
    # The inner strategy would log node and reply counts that are artefacts of the one synthetic reply.
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def inner_config(inner: Strategy, server_round: int, arrays: ArrayRecord, config: ConfigRecord) -> ConfigRecord:
    """What the inner strategy wants to tell clients this round (FedProx adds its μ, for example)."""
    wanted = max(1, getattr(inner, "min_available_nodes", 1), getattr(inner, "min_train_nodes", 1))
    with _quiet():
        messages = list(inner.configure_train(server_round, arrays, config, _PlanningGrid(wanted)))
    if not messages:
        return config
    records = list(messages[0].content.config_records.values())
    return records[0] if records else config


def inner_step(inner: Strategy, server_round: int, arrays: ArrayRecord) -> ArrayRecord:
    """The inner strategy's next model, given the noised mean model `arrays` as its only reply.

    Raises ValueError if the inner strategy makes nothing of one reply.
    """
    weight = getattr(inner, "weighted_by_key", "num-examples")
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({weight: 1})})
    with _quiet():
        stepped, _ = inner.aggregate_train(
            server_round, [Message(content, dst_node_id=1, message_type=MessageType.TRAIN)]
        )
    if stepped is None:
        raise ValueError(
            f"{type(inner).__name__} made no model from a single reply; "
            "CorrelatedNoise needs an inner strategy that averages (FedAvg, FedAvgM, FedAdam, FedYogi, …)"
        )
    return stepped


def inner_state(inner: Strategy) -> bytes:
    """The arrays that the inner strategy carries from round to round (moments, momentum), as an .npz file."""
    arrays: dict[str, np.ndarray] = {}
    for attribute, value in vars(inner).items():
        if isinstance(value, dict):
            arrays |= {f"d|{attribute}|{k}": v for k, v in value.items() if isinstance(v, np.ndarray)}
        elif isinstance(value, list):
            arrays |= {f"l|{attribute}|{i}": v for i, v in enumerate(value) if isinstance(v, np.ndarray)}
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


@contextmanager
def undone_on_failure(inner: Strategy) -> Iterator[None]:
    """Puts the attributes of `inner` back if the block raises: no noise that was not released may stay in its moments."""
    before = {
        name: copy.deepcopy(value)
        for name, value in vars(inner).items()
        if value is None or isinstance(value, (dict, list, np.ndarray, ArrayRecord))
    }
    try:
        yield
    except BaseException:
        vars(inner).update(before)
        raise


def restore_inner_state(inner: Strategy, state: bytes) -> None:
    """Set the arrays that `inner_state` saved."""
    with np.load(io.BytesIO(state), allow_pickle=False) as saved:
        found: dict[str, dict[str, np.ndarray] | list[np.ndarray]] = {}
        for key in saved.files:
            kind, attribute, name = key.split("|", 2)
            if kind == "d":
                cast(dict[str, np.ndarray], found.setdefault(attribute, {}))[name] = saved[key]
            else:
                cast(list[np.ndarray], found.setdefault(attribute, [])).append(saved[key])
    for attribute, value in found.items():
        setattr(inner, attribute, value)
