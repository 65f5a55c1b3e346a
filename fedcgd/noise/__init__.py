"""Gaussian noise that is a pure function of (key, round, nonce, coordinate), and its correlation across rounds.

Nothing here keeps state: the noise of an earlier round is generated again whenever a later round needs part of it.
"""

from fedcgd.noise.stream import STREAM, NoiseStream, Term

__all__ = ["STREAM", "NoiseStream", "Term"]
