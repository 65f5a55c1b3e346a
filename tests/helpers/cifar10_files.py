"""Small files in the format of CIFAR-10."""

import pickle

import numpy as np

GENERATOR = np.random.default_rng(0)
BATCHES = {
    name: (
        GENERATOR.integers(0, 256, size=(10, 3, 32, 32), dtype=np.uint8),
        GENERATOR.integers(0, 10, size=10).tolist(),
    )
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
}


def write_python(folder):
    """A pickled dict with byte-string keys, as Python 2 wrote them; pixels by channel, then row."""
    folder.mkdir(parents=True)
    for name, (images, labels) in BATCHES.items():
        content = {b"batch_label": b"", b"labels": labels, b"data": images.reshape(10, 3072), b"filenames": [b"x"] * 10}
        # The authors' NumPy had its parts in `numpy.core`.
        written = pickle.dumps(content, protocol=2).replace(b"numpy._core.", b"numpy.core.")
        (folder / name).write_bytes(written)
