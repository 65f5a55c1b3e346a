"""Central training with Opacus and correlated noise: `CorrelatedPrivacyEngine` in place of `opacus.PrivacyEngine`."""

from fedcgd.opacus.engine import CorrelatedPrivacyEngine
from fedcgd.opacus.independence import CrossExampleLeakError, check_independence

__all__ = ["CorrelatedPrivacyEngine", "CrossExampleLeakError", "check_independence"]
