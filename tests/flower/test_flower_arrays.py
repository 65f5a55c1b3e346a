"""Flower's arrays with few copies: the same bytes as Flower's own."""

import copy
import pickle

import numpy as np
import pytest
import torch
from flower_requests import LAYOUT
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_to_proto

from fedcgd_flower import layout as arrays_module
from fedcgd_flower.layout import LazyArray, Outgoing, array_of, unflatten, view


@pytest.mark.parametrize("value", [np.zeros((0, 3), np.float32), np.array(2.5), np.eye(3)[:, ::2], np.eye(2).T])
def test_arrays_are_written_as_flower_writes_them(value: np.ndarray) -> None:
    assert array_of(value) == Array(value)
    np.testing.assert_array_equal(view(array_of(value)), value)


SHOWN = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7.0), np.zeros((0, 3), np.float16)]


@pytest.mark.parametrize("value", SHOWN, ids=lambda value: str(value.shape))
def test_an_array_that_is_shown_is_an_array(value: np.ndarray) -> None:
    """In every way in which Flower, an app or a mod may take it, before and after its bytes are made."""
    plain = Array(value)
    for asked_before in (False, True):
        shown = LazyArray(value)
        assert not asked_before or shown.data == plain.data
        assert (shown == plain, plain == shown) == (True, True)
        assert (LazyArray(value + 1) == plain) == (not value.size)
        for same in (pickle.loads(pickle.dumps(shown)), copy.deepcopy(shown), copy.copy(shown)):
            assert (type(same), same) == (Array, plain)
        record, expected = ArrayRecord({"w": shown}), ArrayRecord({"w": plain})
        assert record == expected
        assert record.object_id == expected.object_id
        assert recorddict_to_proto(RecordDict({"arrays": record})) == recorddict_to_proto(
            RecordDict({"arrays": expected})
        )
        assert torch.equal(record.to_torch_state_dict()["w"], torch.from_numpy(value))


@pytest.mark.parametrize("slow", [None, 0, 2])
def test_large_pages_are_asked_for_until_one_takes_longer_than_small_ones(monkeypatch, slow: int | None) -> None:
    page = arrays_module._LARGE_PAGE
    clock = iter([at for i in range(5) for at in (0.0, 1e-4 if slow is None or i < slow else 1.0)])
    advised: list[tuple[int, int, int]] = []
    monkeypatch.setattr(arrays_module.mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(arrays_module.mmap, "MADV_NOHUGEPAGE", 15, raising=False)
    monkeypatch.setattr(arrays_module.time, "thread_time", lambda: next(clock))
    monkeypatch.setattr(arrays_module, "_advise", lambda *given: advised.append(given))
    memory = np.zeros(6 * page, np.uint8)
    first = -memory.ctypes.data % page
    memory = memory[first : first + 5 * page]
    arrays_module._ask_for_large_pages(memory)
    start, end = memory.ctypes.data, memory.ctypes.data + 5 * page
    expected = [(start, end, 14)]
    if slow is not None:
        expected.append((start + (slow + 1) * page, end, 15))
    assert advised == expected
    assert not memory.any()


def test_what_is_shown_can_be_written_to_and_stays_as_it_is() -> None:
    flat = np.frombuffer(np.arange(6, dtype=np.float32).tobytes(), np.float32)  # read-only, as a message is
    shown = LazyArray(flat.reshape(2, 3))
    first = shown.numpy()
    first += 1
    np.testing.assert_array_equal(shown.numpy(), [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(Array.numpy(shown), [[0, 1, 2], [3, 4, 5]])


def test_a_model_that_is_shown_makes_no_bytes_until_they_are_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(LazyArray, "data", property(lambda _: pytest.fail("nobody asked for bytes")))
    flat = np.arange(LAYOUT.size, dtype=np.float32)
    content = RecordDict({"arrays": unflatten(flat, LAYOUT, array=LazyArray), "config": ConfigRecord()})
    shown = content.array_records["arrays"].to_numpy_ndarrays()
    np.testing.assert_array_equal(np.concatenate([value.ravel() for value in shown]), flat)


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
