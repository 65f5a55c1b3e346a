"""Central training with Opacus and correlated noise: `CorrelatedPrivacyEngine` in place of `opacus.PrivacyEngine`."""

from typing import TYPE_CHECKING

from fedcgd.support.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from fedcgd.opacus.engine import CorrelatedPrivacyEngine
    from fedcgd.opacus.independence import CrossExampleLeakError, check_independence
    from fedcgd.opacus.losses import sequence_loss

__all__ = ["CorrelatedPrivacyEngine", "CrossExampleLeakError", "check_independence", "sequence_loss"]

__getattr__ = lazy_exports(
    __name__,
    {
        "CorrelatedPrivacyEngine": "engine",
        "CrossExampleLeakError": "independence",
        "check_independence": "independence",
        "sequence_loss": "losses",
    },
)
