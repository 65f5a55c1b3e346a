"""Keepers in a Flower run: how they are reached, what is said to them, and how they open a sum once."""

from typing import TYPE_CHECKING

from fedcgd.support.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from fedcgd_flower.keepers.messages import answer_question, masked_answer
    from fedcgd_flower.keepers.openings import KeeperParties

__all__ = ["KeeperParties", "answer_question", "masked_answer"]

__getattr__ = lazy_exports(
    __name__, {"KeeperParties": "openings", "answer_question": "messages", "masked_answer": "messages"}
)
