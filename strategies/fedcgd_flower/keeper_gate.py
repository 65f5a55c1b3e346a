"""Whether a message is about keepers: what every node looks at, before it loads anything that only keepers need."""

from flwr.app import Message

KEEPERS = "fedcgd-keepers"
"""The record that says which agreement and which keepers a round has; on a question to a keeper, also what is asked."""


def has_keepers(message: Message) -> bool:
    """Whether a request says that the round has keepers, or is a question to one."""
    return KEEPERS in message.content.config_records


def question_of(message: Message) -> str | None:
    """What a keeper is asked: "who", "check" or "open"; None if the message is no question to a keeper."""
    asked = message.content.config_records[KEEPERS].get("question") if has_keepers(message) else None
    return asked if isinstance(asked, str) else None


def check_masked(message: Message, keepers: object | None) -> None:
    """Raise ValueError unless the server and this node both mean the same keepers, or both none.

    A node that was given keepers sends nothing that the server alone could read, whatever it is asked.
    """
    if keepers is None and has_keepers(message):
        raise ValueError(
            "this run has keepers, and this node was given none: host_users(…, keepers=Keepers.from_file(…)), or "
            "ClippedUpdateMod(keepers=…)"
        )
    if keepers is not None and not has_keepers(message):
        raise ValueError(
            "this node was given keepers, and the server asks for what it could read alone: CorrelatedNoise(…, keepers=…)"
        )
