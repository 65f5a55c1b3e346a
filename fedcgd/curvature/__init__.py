"""Curvature: how correlated noise hurts on a quadratic with a known spectrum, and mechanisms fitted to it."""

from fedcgd.quadratic import Spectrum

__all__ = ["Spectrum"]
