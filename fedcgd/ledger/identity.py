"""What a run knows about who its users are, in words: ε is for one user, and so for whoever counts as one."""

from collections.abc import Mapping
from typing import Any

_WORDS = {
    "declared": (
        "declared: a user is an id that a node names. A registered node speaks for the users that it named first, and one with "
        "clipped_update_mod for a single one, all run long; a pool is believed, and so is a node that is not registered, also "
        "when it comes back and names somebody else. Whoever is named by two ids counts as two users, each with this ε"
    ),
    "authenticated": (
        "authenticated: a user is a node, by the name under which it is registered at the SuperLink. Whoever registers two keys "
        "counts as two users, each with this ε"
    ),
}


def identity_of(configuration: Mapping[str, Any]) -> str | None:
    """What tells one user of a run from another, from the run's configuration; None if it has no nodes."""
    return _WORDS.get(str(configuration.get("identity")))
