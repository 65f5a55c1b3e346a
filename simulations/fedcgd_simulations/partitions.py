"""Which examples belong to which user: lists of index arrays, one per user, that cover every example once."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcgd_simulations.task import Examples

Indices = NDArray[np.intp]

FORMS = "'examples', 'iid:USERS', 'dirichlet:CONCENTRATION:USERS' or 'natural'"


def partition(form: str, examples: Examples, *, seed: int) -> list[Indices]:
    """The examples of each user: `examples` gives everyone one, and the others split them as `FORMS` says.

    Raises ValueError for another form, for more users than examples, and for `natural` where the data names nobody.
    """
    name, *numbers = form.split(":")
    try:
        match name, numbers:
            case "examples", []:
                return one_per_user(len(examples))
            case "iid", [users]:
                return iid_shards(len(examples), int(users), seed=seed)
            case "dirichlet", [concentration, users]:
                labels = examples.targets.numpy()
                return dirichlet_label_skew(labels, int(users), concentration=float(concentration), seed=seed)
            case "natural", [] if examples.users is not None:
                return natural(examples.users)
    except ValueError as error:
        raise ValueError(f"users = {form!r}: {error}") from error
    known = "" if name != "natural" else ": the data of this task names no people"
    raise ValueError(f"users must be {FORMS}, got {form!r}{known}")


def one_per_user(examples: int) -> list[Indices]:
    """User i owns example i: the privacy of a user is that of an example."""
    return list(np.arange(examples).reshape(examples, 1))


def iid_shards(examples: int, users: int, *, seed: int) -> list[Indices]:
    """A random split of all examples in `users` parts whose sizes differ by at most one."""
    _check_users(users, examples)
    order = np.random.default_rng(seed).permutation(examples)
    return [np.sort(part) for part in np.array_split(order, users)]


def dirichlet_label_skew(labels: ArrayLike, users: int, *, concentration: float, seed: int) -> list[Indices]:
    """Each label's examples split over the users in proportions drawn from a Dirichlet distribution.

    Small `concentration` gives users few labels each, large gives all the same mix (Hsu et al., arXiv:1909.06335).
    A user left without examples by the draw takes one from the user that has most.
    """
    labels = np.asarray(labels)
    _check_users(users, len(labels))
    if not concentration > 0:
        raise ValueError(
            f"concentration must be positive, got {concentration}; 0.1 is strong skew and 100 is nearly none"
        )
    generator = np.random.default_rng(seed)
    parts: list[list[int]] = [[] for _ in range(users)]
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(users, concentration))
        cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(int)
        for part, own in zip(parts, np.split(members, cuts), strict=True):
            part.extend(own.tolist())
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return [np.array(sorted(part), dtype=np.intp) for part in parts]


def natural(users: ArrayLike) -> list[Indices]:
    """One part per distinct value of `users`, in sorted order: the people that the data itself names."""
    _, owner = np.unique(np.asarray(users), return_inverse=True)
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner))[:-1])


def _check_users(users: int, examples: int) -> None:
    if not 1 <= users <= examples:
        raise ValueError(f"users must be between 1 and the {examples} examples, got {users}")
