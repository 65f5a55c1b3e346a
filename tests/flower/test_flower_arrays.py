"""Flower's arrays with few copies: the same bytes as Flower's own."""

import numpy as np
import pytest
from flwr.app import Array

from fedcgd_flower.layout import Outgoing, array_of, view


@pytest.mark.parametrize("value", [np.zeros((0, 3), np.float32), np.array(2.5), np.eye(3)[:, ::2], np.eye(2).T])
def test_arrays_are_written_as_flower_writes_them(value: np.ndarray) -> None:
    assert array_of(value) == Array(value)
    np.testing.assert_array_equal(view(array_of(value)), value)


@pytest.mark.parametrize("size", [5, 2**20 + 3])
def test_an_outgoing_array_is_sent_without_a_copy_and_cannot_be_changed_any_more(size: int) -> None:
    outgoing = Outgoing((size,), np.int32)
    outgoing.array[:] = np.arange(size)
    place = outgoing.array.ctypes.data
    sent = outgoing.sent()
    assert sent == Array(np.arange(size, dtype=np.int32))
    assert view(sent).ctypes.data == place
    held = Outgoing((size,), np.int32)
    kept = held.array
    sent = held.sent()
    kept[:] = 1
    assert not view(sent).any()
