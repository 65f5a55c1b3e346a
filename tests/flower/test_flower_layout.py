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


def test_a_model_is_made_of_the_arrays_that_it_came_in_where_they_are_the_same() -> None:
    layout = Layout(("a", "b", "c", "bn.running_var"), ((2,),) * 4, ("float32", "float64", "float32", "float32"))
    third = Array("float32", (2,), "numpy.ndarray", Array(np.array([5.0, 1 / 3])).data)  # its bytes are of float64
    values = {name: np.array([1 / 3, -2.0], np.float32) for name in layout.names}
    arrays = {name: Array(value) for name, value in values.items()} | {"b": Array(np.array([1 / 3, 1.0])), "c": third}
    flat = flatten(arrays, layout)
    back = unflatten(flat, layout, same=arrays)
    assert back == unflatten(flat, layout)  # as a run that is resumed makes it
    assert [back[name].data is arrays[name].data for name in layout.names] == [True, False, False, False]
    assert back["a"] is not arrays["a"]  # who writes another text into one of them does not change both
    assert (back["bn.running_var"].numpy() >= 0).all()
