"""Central training as one pure step: the noised mean gradient of the next round, for any torch optimizer."""

from typing import TYPE_CHECKING

from fedcgd.on_use import names_on_use

if TYPE_CHECKING:
    from fedcgd.central.step import PrivateGradient

__all__ = ["PrivateGradient"]

__getattr__ = names_on_use(__name__, {"PrivateGradient": "step"})
