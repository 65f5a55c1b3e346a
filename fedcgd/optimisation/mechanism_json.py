"""A mechanism as JSON, in ledgers, plans and files, and back, bit by bit."""

import base64
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedcgd import mechanisms
from fedcgd.mechanisms import Mechanism, Normalized
from fedcgd.mechanisms.mechanism import Matrix
from fedcgd.optimisation.effort import EFFORT
from fedcgd.optimisation.table import FILE, TABLE, row_of, with_unit_columns
from fedcgd.support.files import atomic_write
from fedcgd.support.untrusted import MalformedError, Optional, conform, inflate, parse_json


def describe(mechanism: Mechanism) -> dict[str, Any]:
    """`mechanism` as {"name": …, its numbers …, "normalize": …}, JSON-able; `from_description` makes it again, bit by bit."""
    if isinstance(mechanism, Normalized):
        return describe(mechanism.mechanism) | {"normalize": True}
    if mechanism.name not in TABLE or type(mechanism) is not TABLE[mechanism.name].cls:
        raise ValueError(
            f"mechanism {mechanism.name!r} is not one of {', '.join(TABLE)}, and no file or ledger can hold it; BandedToeplitz "
            "takes coefficients of your own, BandInvMF those of a C⁻¹ with few, and Dense a matrix"
        )
    if isinstance(mechanism, mechanisms.Dense):
        packed = zlib.compress(mechanism.band.astype("<f8").tobytes())
        return {"name": mechanism.name, "shape": list(mechanism.band.shape), "band": base64.b64encode(packed).decode()}
    numbers = {field.name: getattr(mechanism, field.name) for field in fields(TABLE[mechanism.name].cls)}
    return {"name": mechanism.name} | numbers


def from_description(description: dict[str, Any]) -> Mechanism:
    """The mechanism that `describe` described. Raises ValueError for an unknown name, and for what it cannot have written."""
    name = conform(description, {"name": str, str: object}, "a mechanism")["name"]
    cls = row_of(name).cls
    parts = (
        {"shape": [int], "band": str}
        if cls is mechanisms.Dense
        else {field.name: _form(field) for field in fields(cls)}
    )
    numbers = conform(description, {"name": str, "normalize": Optional(bool), **parts}, f"mechanism {name}")
    if cls is mechanisms.Dense:
        mechanism: Mechanism = mechanisms.Dense(name, _unpacked(numbers["band"], numbers["shape"]))
    else:
        values = (numbers[part] for part in parts)
        mechanism = cls(*(tuple(value) if isinstance(value, list) else value for value in values))
    return with_unit_columns(mechanism) if numbers.get("normalize") else mechanism


def _form(field: Field[Any]) -> Any:
    """What a description has for a field of a mechanism: a number, or a list of them."""
    return [float] if "tuple" in str(field.type) else float


def _unpacked(band: str, shape: Sequence[int]) -> Matrix:
    size = math.prod(shape)
    if len(shape) != np.ndim([[]]) or min(shape) < 1 or size > EFFORT.entries_read:
        raise MalformedError(f"a band has two sizes and at most {EFFORT.entries_read} entries, got {list(shape)[:3]}")
    packed = inflate(base64.b64decode(band, validate=True), 8 * size, "a band")
    if len(packed) != 8 * size:
        raise MalformedError(f"a band of shape {list(shape)} has {8 * size} bytes, got {len(packed)}")
    return np.frombuffer(packed, "<f8").reshape(shape)


def write_mechanism(mechanism: Mechanism, path: Path | str) -> None:
    """Write what `describe` says of `mechanism` as JSON, so that it is spelled `file:PATH`."""
    text = json.dumps(describe(mechanism)) + "\n"
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")


def read_mechanism(path: Path | str) -> Mechanism:
    """The mechanism that `write_mechanism` wrote. Raises ValueError, which names the file, if there is none in it.

    A file is trusted to be what was wanted, not to be private: its noise is calibrated like that of any other mechanism.
    """
    try:
        return from_description(parse_json(Path(path).read_text(encoding="utf-8"), dict, "the file"))
    except OSError as error:
        raise ValueError(
            f"{FILE}:{path} cannot be read: {error.strerror}; write {FILE}: and the path of a file"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{path} describes no mechanism ({error!r}); `write_mechanism` and `fedcgd curve` write such files"
        ) from error
