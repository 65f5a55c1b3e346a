"""Flower's arrays, read without a copy."""

import numpy as np
import pytest
from flwr.app import Array

from fedcgd_flower.layout import view


@pytest.mark.parametrize("value", [np.zeros((0, 3), np.float32), np.array(2.5), np.eye(3)[:, ::2], np.eye(2).T])
def test_arrays_are_read_as_flower_reads_them(value: np.ndarray) -> None:
    np.testing.assert_array_equal(view(Array(value)), value)


def test_an_array_is_read_without_a_copy() -> None:
    array = Array(np.arange(5, dtype=np.int32))
    assert np.shares_memory(view(array), np.frombuffer(array.data, np.uint8))
