"""Z by whatever makes it quickest: machine code where it was built and is worth it, else NumPy; the same bits."""

import numpy as np

from fedcgd.noise.box_muller import Float32
from fedcgd.noise.compiled import kernels_for
from fedcgd.noise.stream import NoiseStream, key_words


def normals(stream: NoiseStream, round: int, nonce: int, size: int, start: int = 0) -> Float32:
    """Z_(round, nonce)[start : start + size] of `stream`, shape (size,). Raises ValueError for an index out of range."""
    fast = kernels_for(size)
    if fast is None:
        return stream.normal(round, nonce, start, start + size)
    out = np.empty(size, np.float32)
    fast.fill_normals(out, start, key_words(stream.key_of(round, nonce)))
    return out
