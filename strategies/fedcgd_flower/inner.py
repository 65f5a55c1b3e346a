"""Drive the inner strategy: what it sends to a round's users is asked for, and its next model made of one reply, the noised mean.

An inner strategy chooses nodes and may tell each something else. Here the plan chooses users, and each of them gets the same: the
model, and the records that the inner strategy puts beside it. Whatever would get lost on the way is an error that names it.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
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
