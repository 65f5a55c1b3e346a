"""Why a reply was dropped, what a failing node may say of it, and what the operator can do."""

from typing import Literal

from flwr.app import Error

Cause = Literal[
    "no answer",
    "node lost",
    "app crashed",
    "error in local training",
    "client error",
    "without fedcgd's mod",
    "not asked for",
    "wrong round",
    "more users than asked",
    "wrong arrays",
    "wrong shape or dtype",
    "not finite",
    "changed after clipping",
    "left out by its node",
]

# All that a failing node says.
LOCAL_FAILURE, NOT_FINITE, ANOTHER_MODEL = (
    "local training failed",
    "the update is not finite",
    "the reply is another model",
)


def cause_of(error: Error) -> Cause:
    """Why a node answered with an error. Its text may tell about users' data: it is compared, and never logged."""
    match error.code:
        case 3 | 4 | 5:  # message, reply or node unavailable
            return "node lost"
        case 1 | 8:  # the ClientApp could not be loaded, or its process ended
            return "app crashed"
    if error.reason == NOT_FINITE:
        return "not finite"
    if error.reason == ANOTHER_MODEL:
        return "wrong arrays"
    return "error in local training" if error.reason == LOCAL_FAILURE else "client error"


HINTS: dict[Cause, str] = {
    "client error": "a ClientApp raised outside of fedcgd's code; clipped_update_mod must be the first of its mods",
    "without fedcgd's mod": "a ClientApp replied by itself; it needs clipped_update_mod as the first of its mods, or host_users",
    "error in local training": "a node's own log says where its training failed",
    "wrong arrays": "a train function must reply the whole model that it was sent, with the same names and shapes; a node's own "
    "log says what differs",
    "app crashed": "a node's own log says why its ClientApp could not be loaded, or ended",
    "wrong shape or dtype": "a ClippedSum of your own must return work.size integers, as work.clipped gives them",
}
"""What the operator can do about a cause, for the log."""
