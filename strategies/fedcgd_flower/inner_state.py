"""What an inner strategy carries from round to round: saved with each release, put back on resume, compared between runs."""

import hashlib
import io
import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Self

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcgd.ledger.settings import TRAINING

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


def texts(inner: Strategy) -> dict[str, str]:
    """The attributes of `inner` that are texts, such as folders and names of runs."""
    return {name: value for name, value in vars(inner).items() if type(value) is str}


def save(inner: Strategy, given: Mapping[str, str], config: EditedConfig | None = None) -> bytes:
    """Every attribute of `inner` made of arrays, numbers, texts and records, nested in lists, tuples and dicts: an .npz file.

    What is not (functions, loggers, objects of other types) is left out; `digests_of_unsaved` says whether it changed. Saved
    beside it are `given`, the `texts` that it had when this process made it, and `config`, that of the training.
    """
    arrays: _Arrays = {}
    tree: dict[str, Any] = {_TEXTS: dict(given)}
    if config is not None:
        tree[_CONFIG] = [_encode(config.given, arrays), _encode(config.edited, arrays)]
    for name, value in vars(inner).items():
        try:
            tree[name] = _encode(value, arrays)
        except _NotSavableError:
            continue
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(tree).encode(), np.uint8)
    np.savez(buffer, allow_pickle=False, tree=text, **arrays)
    return buffer.getvalue()


def restore(inner: Strategy, state: bytes, given: Mapping[str, str]) -> list[str]:
    """Set the attributes that `save` saved; what `inner` has got since is taken away.

    A text that training never changed, such as a folder named after the time, is that of this process, `given`. The result are
    the names of those that were saved with another value.
    """
    with np.load(io.BytesIO(state), allow_pickle=False) as saved:
        tree = json.loads(saved["tree"].tobytes())
        tree.pop(_CONFIG, None)
        before = tree.pop(_TEXTS, {})
        values = {name: _decode(node, saved) for name, node in tree.items()}
    own = {name: text for name, text in given.items() if name in before and values.get(name) == before[name]}
    other = [name for name, text in own.items() if values[name] != text]
    values |= own
    for name in [name for name, value in vars(inner).items() if name not in values and _savable(value)]:
        delattr(inner, name)
    vars(inner).update(values)
    return other


def changed_since(inner: Strategy, state: bytes) -> list[str]:
    """The attributes of `inner` that are not what `save` saved in `state`."""
    before, now = _values(state), _values(save(inner, {}))
    return sorted(name for name in before.keys() | now.keys() if _form(before.get(name)) != _form(now.get(name)))


def _values(state: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(state), allow_pickle=False) as saved:
        tree = json.loads(saved["tree"].tobytes())
        return {name: _decode(node, saved) for name, node in tree.items() if name not in (_CONFIG, _TEXTS)}


def _form(value: object) -> tuple[object, ...]:
    arrays: _Arrays = {}
    tree = json.dumps(_encode(value, arrays))
    return tree, *((array.dtype, array.shape, array.tobytes()) for array in arrays.values())


def saved_config(state: bytes) -> EditedConfig | None:
    """The configuration of the training that `save` saved; None if it saved none."""
    with np.load(io.BytesIO(state), allow_pickle=False) as saved:
        node = json.loads(saved["tree"].tobytes()).get(_CONFIG)
        return None if node is None else EditedConfig(_decode(node[0], saved), _decode(node[1], saved))


def digests_of_unsaved(inner: Strategy) -> dict[str, str]:
    """A text for each attribute that `save` leaves out, which differs if the attribute is found to have changed."""
    return {name: _digest(value) for name, value in vars(inner).items() if not _savable(value)}


def check_unchanged(inner: Strategy, before: dict[str, str]) -> None:
    """Raise ValueError if what `save` leaves out has changed since `digests_of_unsaved` gave `before`."""
    changed = dict(digests_of_unsaved(inner).items() ^ before.items())
    if changed:
        name = type(inner).__name__
        raise ValueError(
            f"{name} changed {', '.join(sorted(changed))} in a round, and the ledger cannot save it: a run that is resumed "
            "would go on without it. Keep what changes in arrays, numbers, texts, lists, dicts or Flower's records"
        )


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
    return {"strategy": name, TRAINING: kept}


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


def _digest(value: object) -> str:
    try:
        return hashlib.sha256(pickle.dumps(value)).hexdigest()
    except Exception:  # no pickle, for whatever reason of its own: then only whether it is the same object
        return f"object {id(value)}"


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
