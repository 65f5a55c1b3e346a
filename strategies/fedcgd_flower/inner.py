"""Drive the inner strategy: it sees one reply a round, which holds the noised mean; its learning rate may follow a schedule."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, FedAvgM, Strategy

from fedcgd.mechanisms.schedule import Schedule, rate_factors
from fedcgd_flower.messages import RECORD_KEYS

_DIFFERENTIALLY_PRIVATE = (
    flower.DifferentialPrivacyClientSideAdaptiveClipping,
    flower.DifferentialPrivacyClientSideFixedClipping,
    flower.DifferentialPrivacyServerSideAdaptiveClipping,
    flower.DifferentialPrivacyServerSideFixedClipping,
)
_COMPARES = (
    "compares the updates of clients with each other, and would see a single one here, their noised mean: clipping bounds what "
    "one user can do"
)
_TREES = "collects the trees that nodes grow, which have no sum that could be clipped and noised"
_REFUSED: dict[type[Strategy], str] = {
    flower.Bulyan: _COMPARES,
    flower.FedMedian: _COMPARES,
    flower.FedTrimmedAvg: _COMPARES,
    flower.Krum: _COMPARES,
    flower.MultiKrum: _COMPARES,
    flower.FedXgbBagging: _TREES,
    flower.FedXgbCyclic: _TREES,
    flower.QFedAvg: "weights clients by their losses, which do not leave the nodes",
}
"""Why Flower's strategies that are no mean of updates cannot work on one noised mean a round."""


def check_inner(inner: object, *, has_hook: bool = False) -> Strategy:
    """`inner` as it is.

    Args:
        inner: what was given as the inner strategy.
        has_hook: whether `on_release` was given, for what an overridden `start` did after each round.

    Raises:
        TypeError: if it is no Flower strategy.
        ValueError: if it cannot work on one noised mean a round, or has a `start` of its own, which would not be called.
    """
    if not isinstance(inner, Strategy):
        raise TypeError(f"inner must be a Flower strategy, for example FedAvg(min_train_nodes=60); got {_shown(inner)}")
    name = type(inner).__name__
    if hasattr(inner, "plan") and hasattr(inner, "inner"):
        raise ValueError(f"{name} adds its noise by itself; it is not put into another one")
    if isinstance(inner, _DIFFERENTIALLY_PRIVATE):
        raise ValueError(  # noqa: TRY004
            f"{name} clips and adds noise by itself; give CorrelatedNoise the strategy inside of it, "
            f"{type(inner.strategy).__name__}"
        )
    for kind, why in _REFUSED.items():
        if isinstance(inner, kind):
            raise ValueError(f"{name} {why}; use FedAvg, FedAvgM, FedAdam, FedYogi, FedAdagrad or FedProx")  # noqa: TRY004
    if type(inner).start is not Strategy.start and not has_hook:
        raise ValueError(
            f"{name}.start is its own, and would not be called: CorrelatedNoise.start runs the rounds, and keeps the record. "
            "Give what it does after each round (checkpoints, W&B, MLflow, TensorBoard) as CorrelatedNoise(…, on_release=…), "
            "which is called with every released model and its metrics; with on_release, that start is left out"
        )
    return inner


def _shown(inner: object) -> str:
    """What was given in place of a strategy, and what to do about it."""
    if isinstance(inner, type):
        return f"the class {inner.__name__}, of which none is made yet: {inner.__name__}(…)"
    if any(kind.__module__.startswith("flwr.server.strategy") for kind in type(inner).__mro__):
        return (
            f"a {type(inner).__name__} of flwr.server.strategy, Flower's earlier API: take the one of flwr.serverapp.strategy, "
            "and start it in a function under @app.main()"
        )
    return repr(inner)


def check_scheduled_rounds(inner: Strategy, rounds: int) -> None:
    """Raise ValueError if the rate of `inner` follows a schedule (`scheduled`) over another number than the plan's `rounds`."""
    planned: int | None = getattr(inner, "scheduled_rounds", None)
    if planned not in (None, rounds):
        raise ValueError(
            f"the server rate of {type(inner).__name__} is scheduled over {planned} rounds, and the plan has {rounds}: make it "
            f"with scheduled(…, rounds={rounds}), which is plan.participation.rounds"
        )


def own_aggregation(inner: Strategy) -> str | None:
    """The class that overrides `aggregate_train` of Flower's strategies; None if none does, or only one of fedcgd."""
    for kind in type(inner).__mro__:
        if "aggregate_train" in vars(kind) and not kind.__module__.startswith("fedcgd_flower."):
            return None if kind.__module__.startswith("flwr.") else kind.__name__
    return None


def planned_cohort(inner: Strategy, expected_users: int | None) -> tuple[int, str]:
    """(users of a round, where that number comes from), by what the inner strategy says; ValueError if it does not say.

    `min_train_nodes`, where that was set and `fraction_train` was not, whoever is expected. Else, if the number of users is
    given, as in Flower max(⌊fraction_train · users⌋, min_train_nodes).
    """
    least = getattr(inner, "min_train_nodes", None)
    fraction = getattr(inner, "fraction_train", None)
    if least is not None and fraction is not None:
        if fraction == 1.0 and least > FLOWERS_DEFAULT:
            return least, f"min_train_nodes = {least}"
        if expected_users is not None:
            size = max(int(fraction * expected_users), least)
            return (
                size,
                f"max(⌊fraction_train · expected_users⌋, min_train_nodes) = max(⌊{fraction:g} · {expected_users}⌋, {least})",
            )
        if fraction == 1.0:
            raise ValueError(
                f"how many users a round? min_train_nodes = {least} of {type(inner).__name__} may be Flower's default, and not "
                "meant: give cohort_size, or expected_users"
            )
    raise ValueError(
        f"how many users a round? {type(inner).__name__} (fraction_train = {fraction}, min_train_nodes = {least}) does not say "
        "it without the number of users: give cohort_size, or expected_users, or the inner strategy's min_train_nodes alone"
    )


FLOWERS_DEFAULT = 2
"""Of min_train_nodes and min_available_nodes: a strategy that has it may not have been told a number."""


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
    arrays, config = RECORD_KEYS
    return getattr(inner, "arrayrecord_key", arrays), getattr(inner, "configrecord_key", config)


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


def scheduled(base: type[FedAvg], schedule: Schedule, *, rounds: int, warmup: int = 0) -> type[FedAvg]:
    """`base` with a server learning rate that follows `schedule`: `scheduled(FedAvgM, "linear", rounds=210)(…)`.

    In round t the rate that the strategy was given is multiplied with factor t of `rate_factors`; after the last planned round it
    stays what it was there. The strategy keeps the given rate as its setting, so that a ledger compares the same one.

    Args:
        base: a Flower strategy with a server learning rate: FedAvgM (also without momentum), FedAdam, FedYogi, FedAdagrad.
        schedule: `constant`, `linear` or `cosine`.
        rounds: n, the planned releases.
        warmup: the first so many rounds, in which the rate rises.

    Raises:
        ValueError: for an unknown schedule, a warm-up that is not shorter than the run, and a strategy without a server rate.
            `CorrelatedNoise` raises it if its plan has another number of rounds.
    """
    factors = rate_factors(schedule, rounds, warmup=warmup)
    if base is FedAvg:
        raise ValueError("FedAvg has no server learning rate to schedule; take FedAvgM, with server_momentum=0")
    if set(factors) == {1.0}:
        return base
    rate = "server_learning_rate" if issubclass(base, FedAvgM) else "eta"

    class Scheduled(base):  # type: ignore[misc, valid-type]
        scheduled_rounds = rounds
        rate_schedule = f"{schedule} over {rounds} rounds, warm-up {warmup}"
        training_settings = (*getattr(base, "training_settings", ()), "rate_schedule")

        def aggregate_train(
            self, server_round: int, replies: Iterable[Message]
        ) -> tuple[ArrayRecord | None, MetricRecord | None]:
            first = getattr(self, rate)
            setattr(self, rate, first * factors[min(server_round, rounds) - 1])
            try:
                result: tuple[ArrayRecord | None, MetricRecord | None] = super().aggregate_train(server_round, replies)
            finally:
                setattr(self, rate, first)  # it is a setting of the run, which a ledger compares
            return result

    Scheduled.__name__ = f"Scheduled{base.__name__}"
    return Scheduled
