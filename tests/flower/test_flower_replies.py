"""What a node may answer, and what is dropped."""

from dataclasses import replace

import numpy as np
import pytest
from flower_requests import ALONE, TASK, NodeSum, read_train_reply, reply_with, request
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcgd.noise.quantisation import Lattice
from fedcgd_flower.layout import Layout
from fedcgd_flower.messages import sum_of_replies, train_reply


def test_sums_that_32_bits_do_not_hold_are_sent_in_64() -> None:
    assert TASK.dtype == np.int32
    fine = replace(TASK, clipping=replace(TASK.clipping, grid=Lattice(2.0**-40)))
    assert fine.dtype == np.int64
    update = np.array([2**39, -(2**38), 0, 1, -1])
    reply = train_reply(request(), fine, update, 2)
    result = read_train_reply(reply, fine)
    assert isinstance(result, NodeSum)
    np.testing.assert_array_equal(result.update, update)
    assert read_train_reply(reply, TASK) == "wrong type"


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


def test_64_bit_sums_whose_squares_overflow_integers_are_clipped() -> None:
    fine = replace(TASK, clipping=replace(TASK.clipping, grid=Lattice(2.0**-40)))
    for value in (2**63 - 1, -(2**63), 2**32):  # the last one's square is 2⁶⁴, which is 0 in 64 bits
        update = np.full(5, value)
        result = read_train_reply(
            reply_with(update), replace(fine, clipping=replace(fine.clipping, clip_norm=2.0**-10))
        )
        assert isinstance(result, NodeSum)
        assert 2.0**-40 * np.linalg.norm(result.update.astype(float)) <= 2 * 2.0**-10


def test_a_sum_holds_each_reply_as_it_is_read_alone_and_nothing_of_those_that_are_dropped() -> None:
    generator = np.random.default_rng(1)
    size = 2 * 2**16 + 3  # more than is worked on at once
    task = replace(TASK, layout=Layout(("w",), ((size,),), ("float32",)))
    fine = replace(task, clipping=replace(task.clipping, grid=Lattice(2.0**-40)))
    within, beyond = (generator.integers(-most, most, size, np.int32) for most in (2**10, 2**31 - 1))
    counted = replace(
        task, layout=Layout(("w",), ((size - 1,),), ("float32",)), clipping=replace(TASK.clipping, indicator=9)
    )
    replies = [
        (reply_with(within), task),
        (None, task),
        (reply_with(beyond), task),
        (reply_with(beyond, task={"checksum": int(beyond.sum(dtype=np.int64)) + 1}), task),
        (reply_with(within.astype(np.int64) << 20), fine),
        (reply_with(generator.integers(-(2**63), 2**63 - 1, size), task={"checksum": 3}), fine),
        (reply_with(np.full(size, -(2**63))), fine),
        (reply_with(generator.normal(size=size)), replace(task, users=("ann",))),
        (reply_with(np.append(within[1:], 18).astype(np.int32)), counted),
        (reply_with(np.append(within[1:], -19).astype(np.int32)), counted),
    ]
    total, results = sum_of_replies(replies, size)
    alone = [read_train_reply(reply, task) for reply, task in replies]
    assert results == [each.answered if isinstance(each, NodeSum) else each for each in alone]
    altered = "altered reply"
    assert results == [1, "no answer", 1, altered, 1, altered, 1, "wrong type", 1, 1]
    np.testing.assert_array_equal(total, sum(each.update for each in alone if isinstance(each, NodeSum)))
    np.testing.assert_array_equal(alone[0].update, within)
    assert [int(each.update[-1]) for each in alone[-2:]] == [18, -18]
    np.testing.assert_array_equal(sum_of_replies([], 3)[0], [0, 0, 0])


@pytest.mark.parametrize("checksum", [7, "6", 6.5, [6]])
def test_numbers_that_add_up_to_something_else_were_altered(checksum: object) -> None:
    update = np.array([1, 2, 3, 0, 0], np.int32)
    assert isinstance(read_train_reply(reply_with(update), TASK), NodeSum)
    assert read_train_reply(reply_with(update, task={"checksum": checksum}), TASK) == "altered reply"


def with_arrays(*names: str) -> Message:
    """A reply whose arrays have these names; what a node should send has one, "update"."""
    reply = reply_with()
    for name in names:
        reply.content[name] = ArrayRecord({"flat": Array(np.zeros(5, np.int32))})
    return reply


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (None, "no answer"),
        (Message(Error(code=2, reason="secret"), reply_to=request()), "client error"),
        (Message(Error(code=2, reason="training failed"), reply_to=request()), "training failed"),
        (Message(Error(code=0, reason="not finite"), reply_to=request()), "not finite"),
        (Message(Error(code=0, reason="wrong arrays"), reply_to=request()), "wrong arrays"),
        (
            Message(Error(code=0, reason="zzz, which sorts after every known reason"), reply_to=request()),
            "client error",
        ),
        (Message(Error(code=5, reason="node unavailable"), reply_to=request()), "node lost"),
        (Message(Error(code=3, reason="message unavailable"), reply_to=request()), "node lost"),
        (Message(Error(code=4, reason="reply unavailable"), reply_to=request()), "node lost"),
        (Message(Error(code=1, reason="secret"), reply_to=request()), "app crashed"),
        (Message(Error(code=8, reason="secret"), reply_to=request()), "app crashed"),
        (reply_with(np.zeros(5, np.int32), task={"round": 2}), "wrong round"),
        (reply_with(np.zeros(5, np.int32), task={"attempt": 0}), "wrong round"),
        (reply_with(np.zeros(5, np.int32), task={"answered": 3}), "more users than asked"),
        (reply_with(np.zeros(5, np.int32), task={"answered": -1}), "more users than asked"),
        (reply_with(np.zeros(5, np.int32), task={"answered": "2"}), "more users than asked"),
        (reply_with(), "wrong arrays"),
        (reply_with(arrays=ArrayRecord({"other": Array(np.zeros(5, np.float32))})), "wrong arrays"),
        (reply_with(arrays=ArrayRecord({})), "wrong arrays"),
        (with_arrays("other"), "wrong arrays"),
        (with_arrays("update", "other"), "wrong arrays"),
        (
            reply_with(arrays=ArrayRecord({"flat": Array("float32", (5,), "numpy.ndarray", b"\x93NUMPY junk")})),
            "wrong arrays",
        ),
        (reply_with(arrays=ArrayRecord({"flat": Array("float32", (5,), "pickle", b"x")})), "wrong arrays"),
        (Message(RecordDict({"update": MetricRecord({"flat": 1.0})}), reply_to=request()), "without fedcgd's mod"),
        (Message(RecordDict(), reply_to=request()), "without fedcgd's mod"),
        (reply_with(np.zeros(4, np.int32)), "wrong type"),
        (reply_with(np.zeros((5, 1), np.int32)), "wrong type"),
        (reply_with(np.zeros(5, np.float64)), "wrong type"),
        (reply_with(np.zeros(5, np.float32)), "wrong type"),
        (reply_with(np.zeros(5, np.int64)), "wrong type"),
        (reply_with(np.zeros(5, np.uint32)), "wrong type"),
        (reply_with(np.zeros(5, np.complex128)), "wrong type"),
        (reply_with(np.zeros(5, ">i4")), "wrong type"),
    ],
)
def test_broken_reply_is_dropped_with_its_cause(reply: Message | None, cause: str) -> None:
    assert read_train_reply(reply, TASK) == cause


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.binary(max_size=64), st.sampled_from(["int32", "float64", "object"]), st.integers(0, 10))
def test_no_bytes_make_the_server_raise(data: bytes, dtype: str, size: int) -> None:
    result = read_train_reply(
        reply_with(arrays=ArrayRecord({"flat": Array(dtype, (size,), "numpy.ndarray", data)})), TASK
    )
    assert not isinstance(result, NodeSum)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=5, max_size=5))
def test_no_sum_exceeds_its_share(values: list[int]) -> None:
    for task, share in ((TASK, 1.0), (ALONE, 0.5)):
        result = read_train_reply(reply_with(np.array(values, np.int32)), task)
        assert isinstance(result, NodeSum)
        assert 2.0**-20 * np.linalg.norm(result.update) <= share
