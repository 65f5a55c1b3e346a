"""Gaussian noise that is a pure function of (key, round, nonce, coordinate), and its correlation across rounds.

Nothing here keeps state: the noise of an earlier round is generated again whenever a later round needs part of it.
"""

from fedcgd.noise.correlated import Term, for_each_chunk
from fedcgd.noise.stream import NoiseStream

__all__ = ["NoiseStream", "Term", "for_each_chunk"]
