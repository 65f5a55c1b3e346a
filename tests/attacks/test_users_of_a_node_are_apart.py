"""Whatever the code that runs for one user of a node does, the other users' parts of the sum stay as they are, bit by bit.

At ζ = 1 with 50 users on a node, one user's label out of range took away the whole node's sum (norm 49.6), and one that trained
in place, or wrote to the configuration, moved it by 46 and by 100.
"""

import asyncio
import contextlib
import os
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fedcgd.clipping.flat_models import flatten
from fedcgd.clipping.per_sample_gradients import example_loss
from fedcgd.noise.quantisation import Lattice
from fedcgd_flower import LocalTask, one_gradient_step, sequential_training
from fedcgd_flower.clipping import Clipping
from fedcgd_flower.layout import Layout

STEP = 2.0**-24
LAYOUT = Layout(("w", "b"), ((2, 3), (2,)), ("float32", "float32"))
MODEL = np.linspace(-1, 1, LAYOUT.size).astype(np.float32)
USERS = tuple(f"u{i}" for i in range(7))
CLIP_NORM = 1.0


def task(users: tuple[str, ...] = USERS, model: np.ndarray = MODEL, layout: Layout = LAYOUT) -> LocalTask:
    return LocalTask(
        model=model.copy(),
        layout=layout,
        users=users,
        clipping=Clipping(clip_norm=CLIP_NORM, grid=Lattice(STEP)),
        config=ConfigRecord({"direction": 1.0, "list": [1.0, 2.0]}),
    )


def context() -> Context:
    state = RecordDict({"scale": ConfigRecord({"value": 1.0})})
    return Context(run_id=1, node_id=1, node_config={"scale": 1.0}, state=state, run_config={"scale": 1.0})


def honest(model: ArrayRecord, user: str, config: ConfigRecord, context: Context) -> ArrayRecord:
    """Training that uses all that another user could have spoiled: its arguments, random numbers, settings of the process."""
    scale = context.node_config["scale"] * context.run_config["scale"] * context.state["scale"]["value"]
    parameter = torch.ones(3, requires_grad=True)
    total = (parameter * torch.randn(3)).sum()
    assert total.requires_grad
    total.backward()
    with np.errstate():
        noise = random.random() + float(np.random.normal()) + float(parameter.grad.double().sum())
    noise += len(os.environ.get("FEDCGD_ATTACK", "")) + len(str(Path.cwd())) + torch.get_num_threads()
    noise += float(torch.tensor(0.1).double())  # depends on torch's default dtype
    noise += float((torch.full((1, 1), 0.1) @ torch.ones(1, 1)).double())  # and this on autocast
    step = config["direction"] * sum(config["list"]) * scale * noise * (1 + USERS.index(user))
    return ArrayRecord({name: Array(array.numpy() + np.float32(step)) for name, array in model.items()})


def mutates(model, user, config, context) -> ArrayRecord:
    for array in model.values():
        array.data = b"nothing"
    model["w"] = Array(np.full((2, 3), 1e6, np.float32))
    del model["b"]
    config["direction"] = -1e6
    config["list"].append(1e6)
    context.node_config["scale"] = context.run_config["scale"] = -1e6
    context.state["scale"]["value"] = -1e6
    return model


def global_state(model, user, config, context) -> ArrayRecord:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()  # as code does that raises before it leaves
    np.seterr(all="raise")
    warnings.simplefilter("error")
    os.environ["FEDCGD_ATTACK"] = "x" * 99
    os.chdir("/")
    return ArrayRecord({name: Array(array.numpy()) for name, array in model.items()})


def hangs(model, user, config, context) -> ArrayRecord:
    deadline = time.monotonic() + 20  # should the time limit fail, the test does
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            time.sleep(20)
    return model


def raises(error: BaseException) -> Callable[..., ArrayRecord]:
    def train(*_) -> ArrayRecord:
        raise error

    return train


def returns(value) -> Callable[..., object]:
    return lambda *_: value


def record(**arrays) -> ArrayRecord:
    shapes = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.float32)}
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in (shapes | arrays).items()})


BEHAVIOURS = {
    "raises": raises(ValueError("private text")),
    "exits": raises(SystemExit(1)),
    "is cancelled": raises(asyncio.CancelledError()),  # not an Exception
    "runs out of memory": raises(MemoryError()),
    "stops": raises(StopIteration()),
    "mutates": mutates,
    "global state": global_state,
    "nothing": returns(None),
    "a number": returns(1.0),
    "no arrays": returns(ArrayRecord()),
    "wrong shape": returns(record(w=np.zeros((3, 2), np.float32))),
    "wrong dtype": returns(record(w=np.full((2, 3), "text"))),
    "complex": returns(record(w=np.full((2, 3), 1j))),
    "NaN": returns(record(w=np.full((2, 3), np.nan, np.float32))),
    "infinite": returns(record(b=np.array([np.inf, 0], np.float64))),
    "beyond float32": returns(record(b=np.array([1e300, 0], np.float64))),
    "junk": returns(ArrayRecord({"w": Array("float32", (2, 3), "numpy.ndarray", b"junk"), "b": Array(np.zeros(2))})),
    "a lying header": returns(
        ArrayRecord(
            {"w": Array("float32", (2, 3), "numpy.ndarray", Array(np.zeros(10**6)).data), "b": Array(np.zeros(2))}
        )
    ),
    "huge": returns(record(w=np.full((2, 3), 3e38, np.float32))),
}


def alone(user: str) -> np.ndarray:
    """What a user adds on a node on which nobody else is."""
    total, answered = sequential_training(honest)(task((user,)), context())
    assert answered == 1
    assert total.any()
    return total


def one_by_one_with(
    behaviours: dict[str, str], time_limit: float = 600.0
) -> tuple[np.ndarray, int, dict[str, np.ndarray]]:
    """The sum when some users behave badly; and what each of those adds, measured with it alone."""

    def train(model, user, config, context):
        return (
            (BEHAVIOURS | {"hangs": hangs})[behaviours[user]](model, user, config, context)
            if user in behaviours
            else honest(model, user, config, context)
        )

    summed = sequential_training(train, time_limit=time_limit)
    parts = {user: summed(task((user,)), context())[0] for user in behaviours}
    total, answered = summed(task(), context())
    return total, answered, parts


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(USERS), st.sampled_from(sorted(BEHAVIOURS)), min_size=1, max_size=4))
def test_training_of_one_user_does_not_reach_another(behaviours: dict[str, str]) -> None:
    total, answered, parts = one_by_one_with(behaviours)
    others = sum(alone(user) for user in USERS if user not in behaviours)
    np.testing.assert_array_equal(total - sum(parts.values()), others)
    for part in parts.values():
        assert STEP * np.linalg.norm(part) <= CLIP_NORM
    assert len(USERS) - len(behaviours) <= answered <= len(USERS)


def test_a_user_that_hangs_is_ended_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    total, answered, _ = one_by_one_with({"u2": "hangs"}, time_limit=0.2)
    assert answered == len(USERS) - 1
    np.testing.assert_array_equal(total, sum(alone(user) for user in USERS if user != "u2"))
    assert "took longer" in caplog.text
    total, answered = gradient_sum({"u4": "hangs"}, time_limit=0.2)
    assert answered == len(USERS) - 1
    np.testing.assert_array_equal(total, sum(part for user, part in contributions().items() if user != "u4"))


def test_the_process_is_left_as_it_was() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(12345)  # where no user's training has left them
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    before = Path.cwd(), torch.get_default_dtype(), torch.is_grad_enabled(), np.geterr(), dict(os.environ)
    one_by_one_with({"u1": "global state"})
    assert state == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert before == (Path.cwd(), torch.get_default_dtype(), torch.is_grad_enabled(), np.geterr(), dict(os.environ))


def test_each_user_of_each_round_draws_numbers_of_its_own() -> None:
    """From Python, NumPy and torch; the same ones again only for the same user and model."""
    drawn: list[tuple[float, float, float]] = []

    def drawing(model: ArrayRecord, user: str, config: ConfigRecord, context: Context) -> ArrayRecord:
        drawn.append((random.random(), float(np.random.random()), float(torch.rand(()))))
        return model

    for model in (MODEL, MODEL + 1, MODEL):
        sequential_training(drawing)(task(USERS[:2], model=model), context())
    assert drawn[4:] == drawn[:2]
    for numbers in zip(*drawn[:4], strict=True):
        assert len(set(numbers)) == 4


def test_interrupting_the_node_is_not_a_users_failure() -> None:
    with pytest.raises(KeyboardInterrupt):
        sequential_training(raises(KeyboardInterrupt()))(task(), context())


torch.manual_seed(3)
NETWORK = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
FLAT = flatten(NETWORK).numpy()
NETWORK_LAYOUT = Layout(("flat",), ((len(FLAT),),), ("float32",))
INPUTS, LABELS = torch.randn(len(USERS), 5), torch.randint(0, 3, (len(USERS),))
LOSS = example_loss(NETWORK, lambda outputs, targets: 9 * functional.cross_entropy(outputs, targets, reduction="none"))


def honest_data(users, context: Context) -> tuple[torch.Tensor, ...]:
    scale = context.node_config["scale"] * context.run_config["scale"] * context.state["scale"]["value"]
    rows = [USERS.index(user) for user in users]
    return scale * INPUTS[rows] + torch.randn(len(rows), 5) / 100, LABELS[rows]


def bad_data(inputs=None, labels=None):
    def data(users, context):
        honest_inputs, honest_labels = honest_data(users, context)
        return (honest_inputs if inputs is None else inputs), (honest_labels if labels is None else labels)

    return data


DATA = {
    "raises": raises(OSError("private text")),
    "exits": raises(SystemExit(1)),
    "nothing": returns(None),
    "no tensors": returns(()),
    "lists": returns(([[1.0]], [2])),
    "label out of range": bad_data(labels=torch.tensor([99])),
    "negative label": bad_data(labels=torch.tensor([-7])),
    "label of another type": bad_data(labels=torch.tensor([0.5])),
    "NaN": bad_data(inputs=torch.full((1, 5), torch.nan)),
    "infinite": bad_data(inputs=torch.full((1, 5), torch.inf)),
    "huge": bad_data(inputs=torch.full((1, 5), 1e30)),
    "sparse": bad_data(inputs=torch.ones(1, 5).to_sparse()),
    "two rows": bad_data(inputs=torch.ones(2, 5)),
    "wrong shape": bad_data(inputs=torch.ones(1, 6)),
    "another dtype": bad_data(inputs=torch.ones(1, 5, dtype=torch.float64)),
    "mutates": lambda users, context: mutates(ArrayRecord(), users[0], ConfigRecord({"list": [1.0]}), context),
    "global state": lambda users, context: (global_state(ArrayRecord(), users[0], None, context), honest_data)[1](
        users, context
    ),
}


def gradient_sum(behaviours: dict[str, str], time_limit: float = 600.0) -> tuple[np.ndarray, int]:
    def data(users, context):
        [user] = users
        if behaviours.get(user) == "hangs":
            time.sleep(20)
        return DATA[behaviours[user]](users, context) if user in behaviours else honest_data(users, context)

    return one_gradient_step(LOSS, data, time_limit=time_limit)(task(USERS, FLAT, NETWORK_LAYOUT), context())


HONEST = {}


def contributions() -> dict[str, np.ndarray]:
    """What each user adds: the honest sum less the sum where only that user's example is not finite."""
    if not HONEST:
        total, answered = gradient_sum({})
        assert answered == len(USERS)
        HONEST.update({user: total - gradient_sum({user: "NaN"})[0] for user in USERS})
        np.testing.assert_array_equal(sum(HONEST.values()), total)
    return HONEST


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(USERS[1:]), st.sampled_from(sorted(DATA)), min_size=1, max_size=3),
    st.sampled_from(USERS),
)
@example({"u3": "label out of range"}, "u0")
@example({"u3": "wrong shape"}, "u6")
def test_an_example_of_one_user_does_not_reach_another(behaviours: dict[str, str], user: str) -> None:
    """However the others behave, taking a user away takes away what it adds when all are honest, to the bit."""
    assume(user not in behaviours)
    with_it, answered = gradient_sum(behaviours)
    without_it, _ = gradient_sum(behaviours | {user: "NaN"})
    np.testing.assert_array_equal(with_it - without_it, contributions()[user])
    honest = sum(part for other, part in contributions().items() if other not in behaviours)
    assert STEP * np.linalg.norm(with_it - honest) <= CLIP_NORM * len(behaviours)
    assert len(USERS) - len(behaviours) <= answered <= len(USERS)


def test_a_loss_that_raises_for_everybody_is_an_error() -> None:
    """A mistake in the loss must not look like a training in which nobody has anything to say."""
    with pytest.raises(IndexError, match="mistake"):
        one_gradient_step(raises(IndexError("mistake")), honest_data)(task(USERS, FLAT, NETWORK_LAYOUT), context())
