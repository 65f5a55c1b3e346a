"""Flower's arrays: read without a copy, and made of a model."""

import numpy as np
import pytest
import torch
from flwr.app import Array
from torch import nn

from fedcgd_flower import arrays_of, load_arrays
from fedcgd_flower.layout import view


@pytest.mark.parametrize("value", [np.zeros((0, 3), np.float32), np.array(2.5), np.eye(3)[:, ::2], np.eye(2).T])
def test_arrays_are_read_as_flower_reads_them(value: np.ndarray) -> None:
    np.testing.assert_array_equal(view(Array(value)), value)


def test_an_array_is_read_without_a_copy() -> None:
    array = Array(np.arange(5, dtype=np.int32))
    assert np.shares_memory(view(array), np.frombuffer(array.data, np.uint8))


class Tied(nn.Module):
    """A small language model, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight


def test_weights_that_a_model_ties_are_one_array() -> None:
    """`state_dict()` lists them twice, and as two they would be clipped and noised twice."""
    arrays, model = arrays_of(Tied()), Tied()
    assert list(arrays) == ["embedding.weight"]
    load_arrays(model, arrays)
    assert torch.equal(model.head.weight, torch.from_numpy(arrays["embedding.weight"].numpy()))
