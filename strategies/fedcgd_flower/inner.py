"""Drive the inner strategy: it sees one reply a round, which holds the noised mean."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedMedian,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)
from flwr.supercore.run import Run

from fedcgd_flower.messages import RECORD_KEYS

_DIFFERENTIALLY_PRIVATE = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
_NOT_AVERAGES = (Bulyan, FedMedian, FedTrimmedAvg, FedXgbBagging, FedXgbCyclic, Krum, MultiKrum, QFedAvg)
_FLOWER_ASKS = 2  # times a round: for a fraction of the nodes, and to sample them
_MOST_QUESTIONS, _MOST_NODES = 16, 1 << 16


def check_inner(inner: object) -> Strategy:
    """`inner` as it is. Raises TypeError if it is no Flower strategy, ValueError if it cannot work on one noised mean a round."""
    if not isinstance(inner, Strategy):
        raise TypeError(f"inner must be a Flower strategy, for example FedAvg(min_train_nodes=60); got {inner!r}")
    if hasattr(inner, "plan") and hasattr(inner, "inner"):
        raise ValueError(f"{type(inner).__name__} adds its noise by itself; it is not put into another one")
    if isinstance(inner, _DIFFERENTIALLY_PRIVATE):
        raise ValueError(  # noqa: TRY004
            f"{type(inner).__name__} clips and adds noise by itself; give CorrelatedNoise the strategy inside of it, "
            f"{type(inner.strategy).__name__}"
        )
    if isinstance(inner, _NOT_AVERAGES):
        raise ValueError(  # noqa: TRY004
            f"{type(inner).__name__} compares the updates of clients with each other, and would see a single one here, their "
            "noised mean; use FedAvg, FedAvgM, FedAdam, FedYogi, FedAdagrad or FedProx"
        )
    return inner


def planned_cohort(inner: Strategy, expected_users: int | None) -> tuple[int, str]:
    """(users of a round, where that number comes from), by what the inner strategy says; ValueError if it does not say.

    As in Flower, max(⌊fraction_train · users⌋, min_train_nodes), if the number of users is given. If it is not,
    `min_train_nodes`, where that was set and `fraction_train` was not.
    """
    least = getattr(inner, "min_train_nodes", None)
    fraction = getattr(inner, "fraction_train", None)
    if least is not None and fraction is not None:
        if expected_users is not None:
            size = max(int(fraction * expected_users), least)
            return (
                size,
                f"max(⌊fraction_train · expected_users⌋, min_train_nodes) = max(⌊{fraction:g} · {expected_users}⌋, {least})",
            )
        if fraction == 1.0 and least > _FLOWERS_DEFAULT:
            return least, f"min_train_nodes = {least}"
        if fraction == 1.0:
            raise ValueError(
                f"how many users a round? min_train_nodes = {least} of {type(inner).__name__} may be Flower's default, and not "
                "meant: give cohort_size, or expected_users"
            )
    raise ValueError(
        f"how many users a round? {type(inner).__name__} (fraction_train = {fraction}, min_train_nodes = {least}) does not say "
        "it without the number of users: give cohort_size, or expected_users, or the inner strategy's min_train_nodes alone"
    )


_FLOWERS_DEFAULT = 2  # of min_train_nodes


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
def warnings_only() -> Iterator[None]:
    """Without Flower's lines about each round: an inner strategy's count nodes and replies of the one that it is given."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def record_keys_of(inner: Strategy) -> tuple[str, str]:
    """The names under which nodes get the model and the configuration, as the inner strategy would send them."""
    return getattr(inner, "arrayrecord_key", RECORD_KEYS[0]), getattr(
        inner, "configrecord_key", RECORD_KEYS[1]
    )  # Flower's names


def inner_config(inner: Strategy, server_round: int, arrays: ArrayRecord, config: ConfigRecord) -> ConfigRecord:
    """What the inner strategy wants to tell clients this round (FedProx adds its μ, for example)."""
    wanted = max(1, getattr(inner, "min_available_nodes", 1), getattr(inner, "min_train_nodes", 1))
    with warnings_only():
        messages = list(inner.configure_train(server_round, arrays, config, _PlanningGrid(wanted)))
    if not messages:
        return config
    records = list(messages[0].content.config_records.values())
    return records[0] if records else config


@contextmanager
def _without_training_metrics(inner: Strategy) -> Iterator[None]:
    """What nodes measure while they train stays with them: a function of the user's that averages it would find nothing."""
    function = vars(inner).get(_AVERAGES_METRICS)
    if function is None:
        yield
        return
    setattr(inner, _AVERAGES_METRICS, lambda *_: MetricRecord())
    try:
        yield
    finally:
        setattr(inner, _AVERAGES_METRICS, function)


_AVERAGES_METRICS = "train_metrics_aggr_fn"  # Flower's name


def inner_step(inner: Strategy, server_round: int, arrays: ArrayRecord) -> ArrayRecord:
    """The inner strategy's next model, given the noised mean model `arrays` as its only reply, which holds no metrics.

    Raises ValueError if the inner strategy makes nothing of one reply.
    """
    weight = getattr(inner, "weighted_by_key", "num-examples")
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({weight: 1})})
    with warnings_only(), _without_training_metrics(inner):
        stepped, _ = inner.aggregate_train(
            server_round, [Message(content, dst_node_id=1, message_type=MessageType.TRAIN)]
        )
    if stepped is None:
        raise ValueError(
            f"{type(inner).__name__} made no model from a single reply; "
            "CorrelatedNoise needs an inner strategy that averages (FedAvg, FedAvgM, FedAdam, FedYogi, …)"
        )
    return stepped
