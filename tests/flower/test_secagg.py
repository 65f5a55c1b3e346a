"""What docs/security.md says of Flower's SecAgg+."""

import numpy as np
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

SIZE = 300


def test_flowers_masks_have_no_more_than_32_secret_bits() -> None:
    """Why it is not offered: seeds of 256 bits are folded to 32, so that one of 2³² known masks is on every update."""
    seed = bytes(range(32))
    fold = np.bitwise_xor.reduce(np.frombuffer(seed, "<u4"))
    other = bytes(28) + int(fold).to_bytes(4, "little")
    assert seed != other
    masks = [pseudo_rand_gen(s, 2**32, [(SIZE,)])[0] for s in (seed, other)]
    np.testing.assert_array_equal(masks[0], masks[1])
    known = np.random.RandomState(int(fold)).randint(0, 2**32 - 1, (SIZE,), dtype=np.int64)
    np.testing.assert_array_equal(masks[0], known)
