"""Curvature: spectra of models, and how correlated noise hurts on a quadratic with a known spectrum."""

from fedcgd.quadratic import Spectrum

__all__ = ["Spectrum"]
