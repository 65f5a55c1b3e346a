"""Drive the inner strategy: what it sends to a round's users is asked for, and its next model made of one reply, the noised mean.

An inner strategy chooses nodes and may tell each something else. Here the plan chooses users, and each of them gets the same: the
model, and the configuration that the inner strategy puts next to it. What would get lost on the way is an error that names it.
"""

import io
import json
import logging
from abc import ABC
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedAvgM, Strategy
from numpy.typing import NDArray

from fedcgd.mechanisms.schedule import Schedule, rate_factors
from fedcgd_flower.messages import RECORD_KEYS

_Arrays = dict[str, NDArray[Any]]
_CONFIG = "train_config of start"  # no name that an attribute has


class _NotSavableError(Exception):
    """A value of a type that has no form as JSON and arrays."""


_MEANS = {"Strategy", "FedAvg", "FedAvgM", "FedOpt", "FedAdam", "FedYogi", "FedAdagrad", "FedProx"}
"""Flower's strategies that make the next model of a mean of updates, and what they inherit from. The others compare updates, grow
trees, read what does not leave the nodes, or add noise by themselves."""


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
        raise TypeError(
            f"inner must be a strategy of flwr.serverapp.strategy, made and started in a function under @app.main(), for example "
            f"FedAvg(min_train_nodes=60); got {inner!r}"
        )
    name = type(inner).__name__
    flowers = {kind.__name__ for kind in type(inner).__mro__ if kind.__module__.startswith("flwr.")}
    if flowers - _MEANS or hasattr(inner, "plan"):
        raise ValueError(
            f"{name} needs more than it sees here, which is one update a round, the noised mean, or it adds noise by itself: "
            "give CorrelatedNoise the strategy inside of it, if it has one, or FedAvg, FedAvgM, FedAdam, FedYogi, FedAdagrad "
            "or FedProx. Clipping bounds what one user can do"
        )
    if type(inner).start is not Strategy.start and not has_hook:
        raise ValueError(
            f"{name}.start is its own, and would not be called: CorrelatedNoise.start runs the rounds, and keeps the record. "
            "Give what it does after each round (checkpoints, W&B, MLflow, TensorBoard) as CorrelatedNoise(…, on_release=…), "
            "which is called with every released model and its metrics; with on_release, that start is left out"
        )
    return inner


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


_AVERAGES_METRICS = "train_metrics_aggr_fn"  # Flower's name


def inner_step(inner: Strategy, server_round: int, arrays: ArrayRecord) -> ArrayRecord:
    """The inner strategy's next model, given the noised mean model `arrays` as its only reply, which holds no metrics.

    Raises ValueError if the inner strategy makes nothing of one reply.
    """
    weight = getattr(inner, "weighted_by_key", "num-examples")
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({weight: 1})})
    averages = vars(inner).get(_AVERAGES_METRICS)
    if (
        averages is not None
    ):  # what nodes measure while they train stays with them: a function that averages it finds nothing
        setattr(inner, _AVERAGES_METRICS, lambda *_: MetricRecord())
    try:
        with warnings_only():
            reply = Message(content, dst_node_id=1, message_type=MessageType.TRAIN)
            stepped, _ = inner.aggregate_train(server_round, [reply])
    finally:
        if averages is not None:
            setattr(inner, _AVERAGES_METRICS, averages)
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


@dataclass(frozen=True, kw_only=True)
class InnerRequest:
    """What each user of a round gets next to the model."""

    config: ConfigRecord
    record_keys: tuple[str, str]
    """The names of the model and the configuration."""


class _PlanningGrid(Grid):
    """Shows the inner strategy as many nodes as it wants to wait for, and sends nothing."""

    def __init__(self, nodes: int) -> None:
        self._nodes, self._asked = nodes, 0

    def get_node_ids(self) -> Iterable[int]:
        self._asked += 1
        if self._asked > 2:  # Flower's strategies ask twice, and a third time means that they wait for more
            self._nodes *= 32
        if self._asked > 6:
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
        ValueError: if `inner` asks nobody, tells nodes different things, or sends more than the model and one configuration.
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
    content, message_type = messages[0].content, messages[0].metadata.message_type
    if any(other.content != content for other in messages[1:]):
        raise ValueError(
            f"{name} tells one node something else than another: who is asked is drawn by the plan, by user and not by node, and "
            "every user of a round is told the same"
        )
    if message_type != MessageType.TRAIN:
        raise ValueError(f"{name} sends {message_type!r} messages to train with; they must be 'train'")
    if len(content.array_records) != 1 or arrays not in content.array_records.values():
        raise ValueError(
            f"{name} sends the arrays {list(content.array_records)}, and must send the model that it was given and no others: "
            "users train from what was released, and only the model's clipped update comes back, so that methods with state on "
            "clients (SCAFFOLD's control variates) cannot work. Numbers and texts for the nodes may go into the configuration"
        )
    configs = content.config_records
    if len(configs) > 1 or content.metric_records:
        raise ValueError(
            f"{name} sends the records {[*configs, *content.metric_records]} next to the model, and users get one configuration: "
            "put what they need into it"
        )
    config_key, sent = next(iter(configs.items()), (record_keys_of(inner)[1], ConfigRecord()))
    return InnerRequest(config=sent, record_keys=(next(iter(content.array_records)), config_key))


# What an inner strategy carries from round to round: saved with each release, put back on resume.


@dataclass(frozen=True)
class EditedConfig:
    """A configuration as it was `given` to `start`, and as the inner strategy has changed it since."""

    given: ConfigRecord
    edited: ConfigRecord


def saved_state(inner: Strategy, config: EditedConfig | None) -> bytes:
    """What `inner` carries from round to round, and the configuration as it left it: an .npz file.

    Of Flower's strategies these are their moments. A strategy of one's own says it itself, if it has `state()`, which returns
    numbers, texts, arrays and Flower's records, nested in lists, tuples and dicts, and `restore(state)`; else it is every
    attribute of such values but texts, which are settings. What else it holds (loggers, locks, files) stays as it is.

    Raises ValueError if `state()` returns other values.
    """
    arrays: _Arrays = {}
    try:
        tree = {name: _encode(value, arrays) for name, value in _carried(inner).items()}
    except _NotSavableError:
        raise ValueError(
            f"state() of {type(inner).__name__} returns what cannot be saved with a release: give numbers, texts, arrays and "
            "Flower's records, nested in lists, tuples and dicts"
        ) from None
    if config is not None:
        tree[_CONFIG] = [_encode(config.given, arrays), _encode(config.edited, arrays)]
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(tree).encode(), np.uint8)
    np.savez(buffer, allow_pickle=False, tree=text, **arrays)
    return buffer.getvalue()


def restore_state(inner: Strategy, saved: bytes) -> EditedConfig | None:
    """Set `inner` to what `saved_state` saved, and take away what it has got since; the result is the configuration."""
    with np.load(io.BytesIO(saved), allow_pickle=False) as arrays:
        tree = json.loads(arrays["tree"].tobytes())
        tree.pop("texts at the start", None)  # of ledgers of the earlier format: settings, which a run has itself
        config = tree.pop(_CONFIG, None)
        edited = None if config is None else EditedConfig(*(_decode(record, arrays) for record in config))
        values = {name: _decode(node, arrays) for name, node in tree.items()}
    if _has_own_state(inner):
        inner.restore(values[_OWN_STATE])  # type: ignore[attr-defined]
        return edited
    for name in _carried(inner).keys() - values.keys():
        delattr(inner, name)
    vars(inner).update(values)
    return edited


def unsaved(inner: Strategy) -> list[str]:
    """Attributes of a strategy of one's own that are neither saved nor functions nor texts."""
    if _has_own_state(inner) or _is_flowers(inner):
        return []
    saved = _carried(inner)
    return [
        name
        for name, value in vars(inner).items()
        if name not in saved and not callable(value) and type(value) is not str
    ]


_MOMENTS = {"FedAvgM": ("momentum_vector", "current_arrays"), "FedOpt": ("m_t", "v_t")}
"""What Flower's strategies carry from round to round; the others of the six carry nothing."""

_OWN_STATE = "state()"  # what a strategy says itself: no name that an attribute has


def _has_own_state(inner: Strategy) -> bool:
    return callable(getattr(inner, "state", None)) and callable(getattr(inner, "restore", None))


def _is_flowers(inner: Strategy) -> bool:
    kinds = [kind for kind in type(inner).__mro__ if kind not in (ABC, object)]
    return all(kind.__module__.startswith(("flwr.", "fedcgd_flower.")) for kind in kinds)


def _carried(inner: Strategy) -> dict[str, Any]:
    """What is saved with a release, by name."""
    if _has_own_state(inner):
        return {_OWN_STATE: inner.state()}  # type: ignore[attr-defined]
    if _is_flowers(inner):
        names = [name for kind in type(inner).__mro__ for name in _MOMENTS.get(kind.__name__, ())]
        return {name: getattr(inner, name) for name in names}
    return {name: value for name, value in vars(inner).items() if type(value) is not str and _savable(value)}


def settings(inner: Strategy) -> dict[str, Any]:
    """What of `inner` changes training, for the run's configuration: a run goes on with the same values only.

    These are the rates and momenta of Flower's strategies, and whatever a strategy of one's own names in `training_settings`.
    Everything else (folders, names of runs, fractions and numbers of nodes) may be another at each start.

        class Warm(FedAvg):
            training_settings = ("warmup",)

    Raises:
        TypeError: if `training_settings` is one text.
        ValueError: for a name in `training_settings` that `inner` does not have, or whose value cannot be compared.
    """
    name = type(inner).__name__
    own = getattr(inner, "training_settings", ())
    if isinstance(own, str):
        raise TypeError(f"training_settings of {name} must be names, for example ({own!r},); got one text")
    kept = {}
    for setting in sorted({*_flowers_settings(inner), *own}):
        if not hasattr(inner, setting):
            raise ValueError(f"training_settings of {name} names {setting!r}, which it does not have")
        value = getattr(inner, setting)
        try:
            kept[setting] = json.loads(json.dumps(value, default=np.generic.item))
        except TypeError:
            raise ValueError(
                f"{setting} of {name} is a {type(value).__name__}, which cannot be compared between runs: training_settings "
                "names numbers, texts and lists of those"
            ) from None
    return {"strategy": name, "training": kept}


_FLOWERS_SETTINGS = {
    "FedAvgM": ("server_learning_rate", "server_momentum"),
    "FedOpt": ("eta", "eta_l", "tau", "beta_1", "beta_2"),
    "FedProx": ("proximal_mu",),
}


def _flowers_settings(inner: Strategy) -> Iterator[str]:
    for base in type(inner).__mro__:
        if base.__module__.startswith("flwr."):
            yield from _FLOWERS_SETTINGS.get(base.__name__, ())


def _savable(value: object) -> bool:
    try:
        _encode(value, {})
    except _NotSavableError:
        return False
    return True


def _encode(value: Any, arrays: _Arrays) -> Any:
    """JSON-able `value`; its arrays go into `arrays`. Exact types only: a subclass may hold more than its base shows."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if (kind is not np.ndarray and not isinstance(value, np.generic)) or array.dtype.hasobject:
            raise _NotSavableError
        arrays[f"array{len(arrays)}"] = array
        return {"array": f"array{len(arrays) - 1}"}
    if kind in (list, tuple):
        return {kind.__name__: [_encode(item, arrays) for item in value]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is Array:
        return {"Array": _encode(value.numpy(), arrays)}
    if kind in _MAPPINGS.values():
        return {kind.__name__: [[_encode(k, arrays), _encode(v, arrays)] for k, v in value.items()]}
    raise _NotSavableError


_MAPPINGS: dict[str, Any] = {kind.__name__: kind for kind in (dict, ArrayRecord, MetricRecord, ConfigRecord)}


def _decode(node: Any, arrays: Any) -> Any:
    if not isinstance(node, dict):
        return node
    [(kind, value)] = node.items()
    match kind:
        case "array":
            return arrays[value][()]  # of one number, the number
        case "list" | "tuple":
            return (list if kind == "list" else tuple)(_decode(item, arrays) for item in value)
        case "bytes":
            return bytes.fromhex(value)
        case "Array":
            return Array(_decode(value, arrays))
    return _MAPPINGS[kind]({_decode(k, arrays): _decode(v, arrays) for k, v in value})
