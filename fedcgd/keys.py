"""Where `NoiseKey` was in earlier versions; it is in `fedcgd.noise.keys`, and `fedcgd.NoiseKey` for short."""

from fedcgd.noise.keys import NoiseKey

__all__ = ["NoiseKey"]
