"""Mechanisms as JSON-able descriptions and back: what a ledger keeps, so that the very numbers that ran are on record."""

import base64
import zlib
from dataclasses import fields
from typing import Any

import numpy as np

from fedcgd.mechanisms.banded import BandedToeplitz, BandInvMF
from fedcgd.mechanisms.binary_tree import Tree
from fedcgd.mechanisms.blt import BLT
from fedcgd.mechanisms.dense import Diagonal, Explicit
from fedcgd.mechanisms.dp_sgd import DPSGD
from fedcgd.mechanisms.lambda_cgd import LambdaCGD
from fedcgd.mechanisms.mechanism import Mechanism, Toeplitz
from fedcgd.mechanisms.normalized import Normalized
from fedcgd.mechanisms.square_root import BISR, BSR, NuDPFTRL, SquareRootToeplitz

_CLASSES: dict[str, type] = {
    "dp-sgd": DPSGD,
    "lambda-cgd": LambdaCGD,
    "bisr": BISR,
    "band-inv-mf": BandInvMF,
    "bsr": BSR,
    "band-mf": Explicit,
    "banded-toeplitz": BandedToeplitz,
    "blt": BLT,
    "toeplitz": SquareRootToeplitz,
    "nu-dp-ftrl": NuDPFTRL,
    "tree": Tree,
    "dense": Explicit,
    "diagonal": Diagonal,
}

NAMES = tuple(_CLASSES)


def describe(mechanism: Mechanism) -> dict[str, Any]:
    """`mechanism` as {"name": …, its numbers …, "normalize": …}, from which `from_description` makes it again."""
    if isinstance(mechanism, Normalized):
        return describe(mechanism.mechanism) | {"normalize": True}
    if mechanism.name not in _CLASSES or not isinstance(mechanism, _CLASSES[mechanism.name]):
        raise ValueError(f"mechanism {mechanism.name!r} is not one of {', '.join(NAMES)}")
    if isinstance(mechanism, Explicit):
        packed = zlib.compress(mechanism.band.astype("<f8").tobytes())
        return {"name": mechanism.name, "shape": list(mechanism.band.shape), "band": base64.b64encode(packed).decode()}
    return {"name": mechanism.name} | {
        field.name: getattr(mechanism, field.name) for field in fields(_CLASSES[mechanism.name])
    }


def from_description(description: dict[str, Any]) -> Mechanism:
    """The mechanism that `describe` described. Raises ValueError for an unknown name."""
    numbers = dict(description)
    name, normalize = numbers.pop("name"), numbers.pop("normalize", False)
    check_name(name)
    if _CLASSES[name] is Explicit:
        band = np.frombuffer(zlib.decompress(base64.b64decode(numbers["band"])), "<f8")
        mechanism: Mechanism = Explicit(name, band.reshape(numbers["shape"]))
    else:
        mechanism = _CLASSES[name](**{k: tuple(v) if isinstance(v, list) else v for k, v in numbers.items()})
    if not normalize:
        return mechanism
    assert isinstance(mechanism, Toeplitz)
    return Normalized(mechanism)


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is a mechanism's."""
    if name not in NAMES:
        raise ValueError(f"unknown mechanism {name!r}; the mechanisms are {', '.join(NAMES)}")
