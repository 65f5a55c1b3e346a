"""Central training with Opacus and correlated noise: `CorrelatedPrivacyEngine` in place of `opacus.PrivacyEngine`."""

from fedcgd.opacus.engine import CorrelatedPrivacyEngine

__all__ = ["CorrelatedPrivacyEngine"]
