"""What a node may answer, and what is dropped."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcgd.noise.quantisation import Grid
from fedcgd_flower import arrays as arrays_module
from fedcgd_flower.arrays import Outgoing, Shown, array_of, view
from fedcgd_flower.layout import Layout, flatten, layout_of, unflatten
from fedcgd_flower.messages import (
    TrainTask,
    model_records,
    read_train_message,
    train_message,
    train_reply,
)
from fedcgd_flower.replies import NodeSum, read_train_reply, sum_of_replies
from fedcgd_flower.user_messages import Hosted, read_users_reply, users_query, users_reply

LAYOUT = Layout(("w", "b"), ((2, 2), (1,)), ("float32", "float32"))
TASK = TrainTask(round=3, attempt=1, clip_norm=0.5, grid=Grid(2.0**-20), users=("ann", "bob"), layout=LAYOUT)
ALONE = replace(TASK, users=("ann",))


def request() -> Message:
    return train_message(7, np.zeros(5, np.float32), ConfigRecord({"server-round": 4}), TASK)


def reply_with(update=None, *, task=None, arrays=None) -> Message:
    content = RecordDict()
    if arrays is not None:
        content["update"] = arrays
    elif update is not None:
        content["update"] = ArrayRecord({"flat": Array(update)})
    content["fedcgd"] = ConfigRecord({"round": 3, "attempt": 1, "answered": 1} | (task or {}))
    return Message(content, reply_to=request())


def test_request_carries_one_flat_array_and_the_task() -> None:
    message = request()
    assert [list(arrays) for arrays in message.content.array_records.values()] == [["flat"]]
    model, config, task = read_train_message(message)
    np.testing.assert_array_equal(model, np.zeros(5, np.float32))
    assert config["server-round"] == 4
    assert task == TASK


def test_honest_reply_is_read_as_sent() -> None:
    update = np.array([100_000, -200_000, 300_000, 0, 100_001])
    result = read_train_reply(train_reply(request(), TASK, update, 2), TASK)
    assert isinstance(result, NodeSum)
    assert result.answered == 2
    np.testing.assert_array_equal(result.update, update)


def test_a_checksum_that_is_known_is_sent_as_64_bits_and_not_made_again() -> None:
    update = np.array([100_000, -200_000, 300_000, 0, 100_001])
    for known in (300_001, 300_001 - 2**64, 300_001 + 2**64):
        assert isinstance(read_train_reply(train_reply(request(), TASK, update, 2, known), TASK), NodeSum)
    assert read_train_reply(train_reply(request(), TASK, update, 2, 300_002), TASK) == "changed after clipping"


def test_sums_that_32_bits_do_not_hold_are_sent_in_64() -> None:
    assert TASK.dtype == np.int32
    fine = replace(TASK, grid=Grid(2.0**-40))
    assert fine.dtype == np.int64
    update = np.array([2**39, -(2**38), 0, 1, -1])
    reply = train_reply(request(), fine, update, 2)
    result = read_train_reply(reply, fine)
    assert isinstance(result, NodeSum)
    np.testing.assert_array_equal(result.update, update)
    assert read_train_reply(reply, TASK) == "wrong shape or dtype"


def test_a_single_user_may_send_floats_which_are_clipped_and_rounded_here() -> None:
    for dtype in (np.float32, np.float64):
        result = read_train_reply(reply_with(np.array([0.25, -1e-9, 0, 2.0**-20 * 3.9, 0], dtype)), ALONE)
        assert isinstance(result, NodeSum)
        np.testing.assert_array_equal(result.update, [2**18, 0, 0, 3, 0])
        result = read_train_reply(reply_with(np.full(5, 1e30, dtype)), ALONE)
        assert isinstance(result, NodeSum)
        assert 0.5 * (1 - 1e-5) < 2.0**-20 * np.linalg.norm(result.update) <= 0.5
        assert read_train_reply(reply_with(np.full(5, 1.0, dtype)), TASK) == "wrong shape or dtype"  # a sum of two
    with np.errstate(over="ignore"):
        largest = np.full(5, 1.7e308)
        result = read_train_reply(reply_with(largest), ALONE)
    assert isinstance(result, NodeSum)
    assert 2.0**-20 * np.linalg.norm(result.update) <= 0.5


def test_all_zeros_is_a_valid_answer() -> None:
    result = read_train_reply(reply_with(np.zeros(5, np.int32)), TASK)
    assert isinstance(result, NodeSum)
    assert not result.update.any()


def test_enormous_norm_is_clipped_to_users_times_clip_norm() -> None:
    for value in (2**31 - 1, -(2**31), 2**20):
        result = read_train_reply(reply_with(np.full(5, value, np.int32)), TASK)
        assert isinstance(result, NodeSum)
        assert 2 * 0.5 * (1 - 1e-5) < 2.0**-20 * np.linalg.norm(result.update) <= 2 * 0.5


def test_norms_are_taken_over_all_of_a_long_sum() -> None:
    size = 2 * 2**16 + 7  # more than is worked on at once
    task = replace(TASK, layout=Layout(("w",), ((size,),), ("float32",)))
    largest = 2**20  # steps: users · clip norm
    for place in (0, 2**16, size - 1):
        update = np.zeros(size, np.int32)
        update[place] = largest - 1  # as near as an honest sum comes
        result = read_train_reply(reply_with(update), task)
        assert isinstance(result, NodeSum)
        np.testing.assert_array_equal(result.update, update)
        update[place] = largest + 1
        result = read_train_reply(reply_with(update), task)
        assert isinstance(result, NodeSum)
        assert largest * (1 - 1e-5) < np.linalg.norm(result.update) <= largest


def test_a_checksum_is_over_all_of_a_long_sum() -> None:
    size = 2 * 2**16 + 7
    task = replace(TASK, layout=Layout(("w",), ((size,),), ("float32",)))
    update = np.random.default_rng(1).integers(-9, 9, size).astype(np.int32)
    for wrong in (0, 1):
        reply = reply_with(update, task={"checksum": int(update.sum()) + wrong})
        result = read_train_reply(reply, task)
        assert result == "changed after clipping" if wrong else isinstance(result, NodeSum)


def test_64_bit_sums_whose_squares_overflow_integers_are_clipped() -> None:
    fine = replace(TASK, grid=Grid(2.0**-40))
    for value in (2**63 - 1, -(2**63), 2**32):  # the last one's square is 2⁶⁴, which is 0 in 64 bits
        update = np.full(5, value)
        result = read_train_reply(reply_with(update), replace(fine, clip_norm=2.0**-10))
        assert isinstance(result, NodeSum)
        assert 2.0**-40 * np.linalg.norm(result.update.astype(float)) <= 2 * 2.0**-10


def test_a_sum_holds_each_reply_as_it_is_read_alone_and_nothing_of_those_that_are_dropped() -> None:
    generator = np.random.default_rng(1)
    size = 2 * 2**16 + 3  # more than is worked on at once
    task = replace(TASK, layout=Layout(("w",), ((size,),), ("float32",)))
    fine = replace(task, grid=Grid(2.0**-40))
    within, beyond = (generator.integers(-most, most, size, np.int32) for most in (2**10, 2**31 - 1))
    counted = replace(task, layout=Layout(("w",), ((size - 1,),), ("float32",)), indicator=9)
    replies = [
        (reply_with(within), task),
        (None, task),
        (reply_with(beyond), task),
        (reply_with(beyond, task={"checksum": int(beyond.sum(dtype=np.int64)) + 1}), task),
        (reply_with(within.astype(np.int64) << 20), fine),
        (reply_with(generator.integers(-(2**63), 2**63 - 1, size), task={"checksum": 3}), fine),
        (reply_with(np.full(size, -(2**63))), fine),
        (reply_with(generator.normal(size=size)), replace(task, users=("ann",))),
        (reply_with(np.full(size, np.nan)), replace(task, users=("ann",))),
        (reply_with(np.append(within[1:], 18).astype(np.int32)), counted),
        (reply_with(np.append(within[1:], -19).astype(np.int32)), counted),
    ]
    total, results = sum_of_replies(replies, size)
    alone = [read_train_reply(reply, task) for reply, task in replies]
    assert results == [each.answered if isinstance(each, NodeSum) else each for each in alone]
    assert results == [
        1,
        "no answer",
        1,
        "changed after clipping",
        1,
        "changed after clipping",
        1,
        1,
        "not finite",
        1,
        1,
    ]
    np.testing.assert_array_equal(total, sum(each.update for each in alone if isinstance(each, NodeSum)))
    np.testing.assert_array_equal(alone[0].update, within)
    assert [int(each.update[-1]) for each in alone[-2:]] == [18, -18]
    np.testing.assert_array_equal(sum_of_replies([], 3)[0], [0, 0, 0])


@pytest.mark.parametrize("checksum", ["6", 6.5, [6], None])
def test_a_checksum_of_another_kind_is_no_checksum(checksum: object) -> None:
    update = np.array([1, 2, 3, 0, 0], np.int32)
    task = {} if checksum is None else {"checksum": checksum}
    result = read_train_reply(reply_with(update, task=task), TASK)
    assert isinstance(result, NodeSum) if checksum is None else result == "changed after clipping"


def test_the_requests_of_all_nodes_share_one_copy_of_the_model() -> None:
    records = model_records(np.arange(5, dtype=np.float32), LAYOUT)
    messages = [train_message(node, records, ConfigRecord(), TASK) for node in (1, 2)]
    first, second = (message.content["model"]["flat"].data for message in messages)
    assert first is second
    model, _, _ = read_train_message(messages[1])
    np.testing.assert_array_equal(model, np.arange(5))


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
        shown = Shown(value)
        assert not asked_before or shown.data == plain.data
        assert (shown == plain, plain == shown) == (True, True)
        assert (Shown(value + 1) == plain) == (not value.size)
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
    shown = Shown(flat.reshape(2, 3))
    first = shown.numpy()
    first += 1
    np.testing.assert_array_equal(shown.numpy(), [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(Array.numpy(shown), [[0, 1, 2], [3, 4, 5]])


def test_a_model_that_is_shown_makes_no_bytes_until_they_are_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(Shown, "data", property(lambda _: pytest.fail("nobody asked for bytes")))
    flat = np.arange(LAYOUT.size, dtype=np.float32)
    content = RecordDict({"arrays": unflatten(flat, LAYOUT, array=Shown), "config": ConfigRecord()})
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


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (None, "no answer"),
        (Message(Error(code=2, reason="secret"), reply_to=request()), "client error"),
        (Message(Error(code=2, reason="local training failed"), reply_to=request()), "error in local training"),
        (Message(Error(code=0, reason="the update is not finite"), reply_to=request()), "not finite"),
        (Message(Error(code=5, reason="node unavailable"), reply_to=request()), "node lost"),
        (Message(Error(code=3, reason="message unavailable"), reply_to=request()), "node lost"),
        (Message(Error(code=8, reason="secret"), reply_to=request()), "app crashed"),
        (reply_with(np.zeros(5, np.float32), task={"round": 2}), "wrong round"),
        (reply_with(np.zeros(5, np.float32), task={"attempt": 0}), "wrong round"),
        (reply_with(np.zeros(5, np.float32), task={"answered": 3}), "more users than asked"),
        (reply_with(np.zeros(5, np.float32), task={"answered": -1}), "more users than asked"),
        (reply_with(np.zeros(5, np.float32), task={"answered": "2"}), "more users than asked"),
        (reply_with(), "wrong arrays"),
        (reply_with(arrays=ArrayRecord({"other": Array(np.zeros(5, np.float32))})), "wrong arrays"),
        (reply_with(arrays=ArrayRecord({})), "wrong arrays"),
        (
            reply_with(arrays=ArrayRecord({"flat": Array("float32", (5,), "numpy.ndarray", b"\x93NUMPY junk")})),
            "wrong arrays",
        ),
        (reply_with(arrays=ArrayRecord({"flat": Array("float32", (5,), "pickle", b"x")})), "wrong arrays"),
        (Message(RecordDict({"update": MetricRecord({"flat": 1.0})}), reply_to=request()), "without fedcgd's mod"),
        (Message(RecordDict(), reply_to=request()), "without fedcgd's mod"),
        (reply_with(np.zeros(4, np.int32)), "wrong shape or dtype"),
        (reply_with(np.zeros((5, 1), np.int32)), "wrong shape or dtype"),
        (reply_with(np.zeros(5, np.float64)), "wrong shape or dtype"),
        (reply_with(np.zeros(5, np.float32)), "wrong shape or dtype"),
        (reply_with(np.zeros(5, np.int64)), "wrong shape or dtype"),
        (reply_with(np.zeros(5, np.uint32)), "wrong shape or dtype"),
        (reply_with(np.zeros(5, np.complex128)), "wrong shape or dtype"),
        (reply_with(np.zeros(5, ">i4")), "wrong shape or dtype"),
    ],
)
def test_broken_reply_is_dropped_with_its_cause(reply: Message | None, cause: str) -> None:
    assert read_train_reply(reply, TASK) == cause


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_floats_that_are_not_finite_are_dropped(bad: float, dtype: type) -> None:
    assert read_train_reply(reply_with(np.array([0, 0, bad, 0, 0], dtype)), ALONE) == "not finite"


@settings(derandomize=True, max_examples=200)
@given(st.binary(max_size=64), st.sampled_from(["int32", "float64", "object"]), st.integers(0, 10))
def test_no_bytes_make_the_server_raise(data: bytes, dtype: str, size: int) -> None:
    result = read_train_reply(
        reply_with(arrays=ArrayRecord({"flat": Array(dtype, (size,), "numpy.ndarray", data)})), TASK
    )
    assert not isinstance(result, NodeSum)


@settings(derandomize=True, max_examples=200)
@given(st.lists(st.floats(width=32), min_size=5, max_size=5))
def test_no_reply_exceeds_its_share(values: list[float]) -> None:
    result = read_train_reply(reply_with(np.array(values, np.float32)), ALONE)
    if np.isfinite(values).all():
        assert isinstance(result, NodeSum)
        assert 2.0**-20 * np.linalg.norm(result.update) <= 0.5
    else:
        assert result == "not finite"


@settings(derandomize=True, max_examples=200)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=5, max_size=5))
def test_no_sum_exceeds_its_share(values: list[int]) -> None:
    for task, share in ((TASK, 1.0), (ALONE, 0.5)):
        result = read_train_reply(reply_with(np.array(values, np.int32)), task)
        assert isinstance(result, NodeSum)
        assert 2.0**-20 * np.linalg.norm(result.update) <= share


def test_users_are_read_once_each_and_only_as_text() -> None:
    query = users_query(1)
    assert read_users_reply(users_reply(query, ["b", "a", "b"])) == Hosted(("b", "a"))
    assert read_users_reply(users_reply(query, ["b", "a", "b"], shared=True)) == Hosted(("a", "b"), shared=True)
    assert read_users_reply(users_reply(query, [])) == Hosted(())
    assert read_users_reply(None) is None
    assert read_users_reply(Message(RecordDict({"fedcgd": ConfigRecord({"users": [1, 2]})}), reply_to=query)) is None
    assert read_users_reply(Message(RecordDict({"fedcgd": ConfigRecord({"users": [""]})}), reply_to=query)) is None
    assert read_users_reply(Message(RecordDict({"fedcgd": ConfigRecord({"users": "ab"})}), reply_to=query)) is None
    assert read_users_reply(Message(RecordDict(), reply_to=query)) is None


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
    with pytest.raises(ValueError, match=r"none of the arrays \['bn\.count'\] is trained"):
        layout_of(ArrayRecord({"bn.count": Array(np.array(3))}))
    with pytest.raises(ValueError, match="no arrays"):
        layout_of(ArrayRecord())
    with pytest.raises(ValueError, match="expected arrays"):
        flatten(ArrayRecord({"w": Array(np.zeros((2, 2), np.float32))}), LAYOUT)
    with pytest.raises(ValueError, match="shape"):
        flatten(ArrayRecord({"w": Array(np.zeros(4, np.float32)), "b": Array(np.zeros(1, np.float32))}), LAYOUT)
    with pytest.raises(ValueError, match="shape"):
        unflatten(np.zeros(4, np.float32), LAYOUT)


def test_a_message_of_another_strategy_is_refused_clearly() -> None:
    other = Message(
        RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord()}), dst_node_id=1, message_type="train"
    )
    with pytest.raises(ValueError, match="CorrelatedNoise"):
        read_train_message(other)


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
