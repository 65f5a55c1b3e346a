"""Central training as one pure step: the noised mean gradient of the next round, for any torch optimizer."""

from typing import TYPE_CHECKING

from fedcgd.support.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from fedcgd.central.step import PrivateGradient

__all__ = ["PrivateGradient"]

__getattr__ = lazy_exports(__name__, {"PrivateGradient": "step"})
