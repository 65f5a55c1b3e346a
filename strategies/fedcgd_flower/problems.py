"""What can go wrong at a node, by kind: what the node says of it, and what the operator is told to do about it.

A node says one of these words and never a text of its own, which could tell about users' data; the server logs what stands here.
"""

from typing import Literal

from flwr.app import Error

RejectionReason = Literal[
    "no answer",
    "node lost",
    "app crashed",
    "training failed",
    "client error",
    "without fedcgd's mod",
    "not asked for",
    "wrong round",
    "more users than asked",
    "wrong arrays",
    "wrong type",
    "not finite",
    "altered reply",
    "left out",
]
"""Why a reply is not in the sum."""

_OF_NODES: dict[str, RejectionReason] = {
    "training failed": "training failed",
    "not finite": "not finite",
    "wrong arrays": "wrong arrays",
}
"""All that a node says whose training failed."""
_BY_CODE: dict[int, RejectionReason] = {
    3: "node lost",  # its message, its reply or the node itself is not available
    4: "node lost",
    5: "node lost",
    1: "app crashed",  # the ClientApp could not be loaded, or its process ended
    8: "app crashed",
}


def rejection_reason(error: Error) -> RejectionReason:
    """Why a node answered with an error. Its text may tell about users' data: it is compared, and never logged."""
    return _BY_CODE.get(error.code) or _OF_NODES.get(error.reason or "", "client error")


NOT_FINITE_WORDS = (
    "the trained model has numbers that are NaN, infinite or beyond what float32 holds (3.4·10³⁸): lower the local learning "
    "rate, or look for a loss that divides by zero or takes its logarithm, or for half precision that overflows"
)
"""For the log of the node and for that of the server."""

HINTS: dict[RejectionReason, str] = {
    "not finite": NOT_FINITE_WORDS,
    "left out": "a user's training raised, took too long, or ended with numbers that are not finite, or the node's "
    "users(context) did not name it any more; a node's own log says which of these",
    "no answer": "the node was too slow (raise timeout=), or is gone",
    "client error": "a ClientApp raised outside of fedcgd's code (clipped_update_mod must be the first of its mods), or keepers= "
    "was given to nodes or server alone; a node's own log says which",
    "altered reply": "what fedcgd sent was changed, or something was added to it, before it left the node: take the "
    "mods that stand before clipped_update_mod out of its ClientApp, or put them after it; what they added was not read",
    "without fedcgd's mod": "a ClientApp replied by itself; it needs clipped_update_mod as the first of its mods, or host_users",
    "training failed": "a node's own log says where its training failed",
    "wrong arrays": "a train function must reply the whole model that it was sent, with the same names and shapes; a node's own "
    "log says what differs",
    "app crashed": "a node's own log says why its ClientApp could not be loaded, or ended",
    "wrong type": "a ClippedSum of your own must return work.size integers, as work.clipped gives them",
}
"""What the operator can do about a reason."""

EVALUATION_HINT = (
    "nodes need an evaluate function that replies the metrics that bounds name, behind clipped_update_mod "
    "(ClientApp(mods=[clipped_update_mod]), not on the train function alone), or host_users(…, evaluate=…)"
)

Problem = Literal["no user id", "no ids", "users failed", "client_fn", "another privacy mod"]
"""Why a node can name no users, in its own answer."""

PROBLEMS: dict[Problem, str] = {
    "no user id": "its configuration names no user: start it with --node-config 'user-id=\"…\"' (or partition-id=…), give the "
    "mod a user (ClippedUpdateMod(user=...)), or let registrations name the nodes (identity='authenticated')",
    "no ids": "its app names users by what are no ids: numbers, an empty text, a missing value, or one text in place of a list. "
    "Ids are texts and not empty, [str(id) for id in …] without rows that have none; the node's own log says which",
    "users failed": "its app's function that names its users has failed; the node's own log says where",
    "client_fn": "its ClientApp is made of a client_fn (NumPyClient), Flower's earlier API, which reads other messages: make "
    "what its fit does a function under @app.train(), which finds the model in message.content['arrays'] and "
    "replies the trained one",
    "another privacy mod": "its ClientApp has another mod for privacy inside clipped_update_mod, which would spoil the update: "
    "take it out",
}


def silent_problem(reason: RejectionReason | None) -> str:
    """Why a node cannot take part that was asked for its users, and answered none of `PROBLEMS`."""
    if reason == "node lost":
        return ""  # it will be missing from the list of nodes soon
    if reason == "app crashed":
        return (
            "its ClientApp could not be loaded, or its process ended: the app's code or a package may be missing where the node "
            "runs, and its own log says which"
        )
    return (
        "it was asked which users it hosts, and answered without fedcgd's code. Its ClientApp needs clipped_update_mod as the "
        "first of its mods: from fedcgd_flower import clipped_update_mod; app = ClientApp(mods=[clipped_update_mod]). For many "
        "users on a node: host_users(app, …). It also needs a function under @app.train(). If it has all that, its own log says "
        "what failed"
    )


SECOND_USER = (
    "of another node, or a second user of a node that is one user (clipped_update_mod): give it the user-id that it had at first "
    "in this run, or register the other user's node under a name of its own"
)
