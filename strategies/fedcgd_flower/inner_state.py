"""What an inner strategy carries from round to round: saved with each release, put back on resume, compared between runs."""

import io
import json
from abc import ABC
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Self

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcgd_flower.flower_private import log_info

_Arrays = dict[str, NDArray[Any]]
_CONFIG = "train_config of start"  # no name that an attribute has
_TEXTS = "texts at the start"  # nor this


class _NotSavableError(Exception):
    """A value of a type that has no form as JSON and arrays."""


@dataclass(frozen=True)
class EditedConfig:
    """A configuration as it was `given` to `start`, and as the inner strategy has changed it since."""

    given: ConfigRecord
    edited: ConfigRecord

    def for_next_round(self, given: ConfigRecord) -> ConfigRecord:
        """A copy of `given`, or of what has become of it: as in Flower, where every round gets the same record."""
        return ConfigRecord(dict(self.edited if dict(self.given) == dict(given) else given))

    def given_otherwise(self, given: ConfigRecord) -> str:
        """How `given` differs from what was given before; "" if it does not."""
        before, now = dict(self.given), dict(given)
        names = [name for name in [*before, *now] if name not in before or name not in now or before[name] != now[name]]
        return ", ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in dict.fromkeys(names))

    def to_description(self) -> dict[str, Any]:
        """Both, JSON-able."""
        return {"given": _encode(self.given, {}), "edited": _encode(self.edited, {})}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Self:
        """What `to_description` made."""
        return cls(_decode(description["given"], {}), _decode(description["edited"], {}))


class InnerState:
    """What an inner strategy carries from round to round, as the last release left it.

    Of Flower's strategies these are their moments. A strategy of one's own says it itself, if it has `state()`, which returns
    numbers, texts, arrays and Flower's records, nested in lists, tuples and dicts, and `restore(state)`; else it is every
    attribute of such values. What else it holds (loggers, locks, files) stays as it is, whatever becomes of a round.

    Args:
        inner: the strategy.
    """

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner
        self.config: EditedConfig | None = None
        """The configuration of the training, as the last release left it; None before it."""
        self._saved: bytes | None = None  # as this process knows it
        self._texts: dict[str, str] = {}

    def resume(self, saved: bytes | None, release: int) -> None:
        """Stand where the run stands.

        Args:
            saved: what was saved with the last release; None if nothing is released yet, and the strategy may still be changed.
            release: its number.

        Raises:
            ValueError: if the strategy was changed from outside since this process knew its state.
        """
        texts = {name: value for name, value in vars(self.inner).items() if type(value) is str}
        kind, first = type(self.inner).__name__, self._saved is None
        if saved is None:
            self._saved = _packed(self.inner, texts, None)
        elif self._saved is not None:
            changed = self._changed(self._saved)
            texts = self._texts | {name: texts[name] for name in changed if name in texts}
            if kept := [name for name in changed if name not in texts]:
                raise ValueError(
                    f"{', '.join(kept)} of {kind} changed after release {release}, and a run goes on with the inner strategy as "
                    "it was then: what shall change in a run belongs into a method of the strategy"
                )
        self._texts, self._saved = texts, saved or self._saved
        other = self.put_back()
        if first and other:
            log_info(
                f"{', '.join(other)} of {kind}: as this process set it, not as the run saved it; training never changed it"
            )
        if first and (held := _by_reference(self.inner)):
            log_info(
                f"{', '.join(held)} of {kind} cannot be saved with a release: what a round changes in it is lost where the run "
                "is resumed. Give the strategy state() and restore(state) if that matters"
            )

    def save(self, config: EditedConfig) -> bytes:
        """The state as it is now, and the configuration: an .npz file. Raises ValueError if `state()` returns other values."""
        return _packed(self.inner, self._texts, config)

    def released(self, saved: bytes, config: EditedConfig) -> None:
        """What `save` returned is on record."""
        self._saved, self.config = saved, config

    def put_back(self) -> list[str]:
        """Set the strategy to its state at the last release, and take away what it has got since.

        A text that training never changed, such as a folder named after the time, is that of this process.

        Returns:
            The names of texts that were saved with another value.
        """
        assert self._saved is not None  # `resume` comes first
        values, before, self.config = _unpacked(self._saved)
        own = {name: text for name, text in self._texts.items() if name in before and values.get(name) == before[name]}
        other = [name for name, text in own.items() if values[name] != text]
        if _has_own_state(self.inner):
            self.inner.restore(values[_OWN_STATE])  # type: ignore[attr-defined]
            return []
        for name in _carried(self.inner).keys() - values.keys():
            delattr(self.inner, name)
        vars(self.inner).update(values | own)
        return other

    def _changed(self, saved: bytes) -> list[str]:
        """What of the strategy is not as it was saved."""
        before, now = _unpacked(saved)[0], _carried(self.inner)
        if _is_flowers(self.inner):  # earlier versions saved more of these
            before = {name: before.get(name) for name in now}
        return sorted(name for name in before.keys() | now.keys() if _form(before.get(name)) != _form(now.get(name)))


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
    return {name: value for name, value in vars(inner).items() if _savable(value)}


def _by_reference(inner: Strategy) -> list[str]:
    """Attributes of a strategy of one's own that are neither saved nor functions."""
    if _has_own_state(inner) or _is_flowers(inner):
        return []
    return [name for name, value in vars(inner).items() if not callable(value) and not _savable(value)]


def _packed(inner: Strategy, texts: Mapping[str, str], config: EditedConfig | None) -> bytes:
    arrays: _Arrays = {}
    tree: dict[str, Any] = {_TEXTS: dict(texts)}
    if config is not None:
        tree[_CONFIG] = [_encode(config.given, arrays), _encode(config.edited, arrays)]
    try:
        tree |= {name: _encode(value, arrays) for name, value in _carried(inner).items()}
    except _NotSavableError:
        raise ValueError(
            f"state() of {type(inner).__name__} returns what cannot be saved with a release: give numbers, texts, arrays and "
            "Flower's records, nested in lists, tuples and dicts"
        ) from None
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(tree).encode(), np.uint8)
    np.savez(buffer, allow_pickle=False, tree=text, **arrays)
    return buffer.getvalue()


def _unpacked(state: bytes) -> tuple[dict[str, Any], dict[str, str], EditedConfig | None]:
    """(what is carried, the texts that the process had set at first, the configuration)."""
    with np.load(io.BytesIO(state), allow_pickle=False) as saved:
        tree = json.loads(saved["tree"].tobytes())
        config, texts = tree.pop(_CONFIG, None), tree.pop(_TEXTS, {})
        edited = None if config is None else EditedConfig(_decode(config[0], saved), _decode(config[1], saved))
        return {name: _decode(node, saved) for name, node in tree.items()}, texts, edited


def _form(value: object) -> tuple[object, ...]:
    arrays: _Arrays = {}
    tree = json.dumps(_encode(value, arrays))
    return tree, *((array.dtype, array.shape, array.tobytes()) for array in arrays.values())


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
        kept[setting] = _comparable(f"{setting} of {name}", getattr(inner, setting))
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


def _comparable(name: str, value: object) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, FunctionType):
        return value.__qualname__
    if isinstance(value, list | tuple):
        return [_comparable(name, item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{name} is a {type(value).__name__}, which cannot be compared between runs: training_settings names numbers, texts, "
        "functions and lists of those"
    )


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
        return {"array" if kind is np.ndarray else "number": f"array{len(arrays) - 1}"}
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
            return arrays[value]
        case "number":
            return arrays[value][()]
        case "list":
            return [_decode(item, arrays) for item in value]
        case "tuple":
            return tuple(_decode(item, arrays) for item in value)
        case "bytes":
            return bytes.fromhex(value)
        case "Array":
            return Array(_decode(value, arrays))
    return _MAPPINGS[kind]({_decode(k, arrays): _decode(v, arrays) for k, v in value})
