"""A model's arrays as one flat vector, and back."""

import numpy as np
import pytest
from flower_requests import LAYOUT
from flwr.app import Array, ArrayRecord

from fedcgd_flower.layout import Layout, flatten, layout_of, unflatten


def test_flat_and_back() -> None:
    arrays = ArrayRecord(
        {"w": Array(np.arange(6, dtype=np.float64).reshape(2, 3)), "b": Array(np.ones((), np.float16))}
    )
    layout = layout_of(arrays)
    flat = flatten(arrays, layout)
    assert flat.dtype == np.float32
    assert Layout.from_json(layout.to_json()) == layout
    back = unflatten(flat, layout)
    for name, array in arrays.items():
        assert back[name].numpy().dtype == array.numpy().dtype
        np.testing.assert_array_equal(back[name].numpy(), array.numpy())


def test_layout_refuses_what_cannot_carry_noise() -> None:
    with pytest.raises(ValueError, match="the arrays"):
        layout_of(ArrayRecord({"bn.count": Array(np.array(3))}))
    with pytest.raises(ValueError, match="no arrays"):
        layout_of(ArrayRecord())
    with pytest.raises(ValueError, match="expected arrays"):
        flatten(ArrayRecord({"w": Array(np.zeros((2, 2), np.float32))}), LAYOUT)
    with pytest.raises(ValueError, match="shape"):
        flatten(ArrayRecord({"w": Array(np.zeros(4, np.float32)), "b": Array(np.zeros(1, np.float32))}), LAYOUT)
    with pytest.raises(ValueError, match="shape"):
        unflatten(np.zeros(4, np.float32), LAYOUT)
