"""A quadratic with a known spectrum, and how much of a run's noise is left in its loss."""

from fedcgd.quadratic.problem import Quadratic
from fedcgd.quadratic.spectrum import Spectrum

__all__ = ["Quadratic", "Spectrum"]
