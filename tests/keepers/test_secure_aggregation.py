"""Lattice integers under masks: the sum modulo 2³² of what nodes send masked is exactly the sum that the server adds noise to."""

import copy
import hashlib
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from fake_grid import FakeGrid, FakeNode
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Lattice, add_noise

SIZE = 300
STREAM = NoiseStream(b"k" * 32)
MODULUS = 2**32


def to_modular(values: np.ndarray) -> np.ndarray:
    return values.astype(np.uint32)  # NumPy wraps two's complement, which is the residue


def from_modular(residues: np.ndarray) -> np.ndarray:
    """The numbers in −2³¹ … 2³¹ − 1 with these residues modulo 2³²."""
    return residues.astype(np.uint32).view(np.int32).astype(np.int64)


def pair_mask(one: int, other: int, size: int) -> np.ndarray:
    """What two nodes alone know: uniform in Z_{2³²}, from a secret of theirs."""
    secret = hashlib.sha256(f"{one} {other}".encode()).digest()
    return np.random.default_rng(list(secret)).integers(0, MODULUS, size, dtype=np.uint32)


def masked(values: list[np.ndarray]) -> list[np.ndarray]:
    """Each node's integers modulo 2³², plus its mask with each later node, minus its mask with each earlier one."""
    sent = [to_modular(value) for value in values]
    for one, other in combinations(range(len(values)), 2):
        mask = pair_mask(one, other, len(values[0]))
        sent[one] = sent[one] + mask
        sent[other] = sent[other] - mask
    return sent


def clipped_updates(nodes: int, size: int = SIZE, clip_norm: float = 1.0) -> list[np.ndarray]:
    generator = np.random.default_rng(nodes)
    updates = [generator.normal(size=size) for _ in range(nodes)]
    return [update * min(1, clip_norm / np.linalg.norm(update)) for update in updates]


@pytest.mark.parametrize("nodes", [2, 3, 30])
def test_masked_sum_is_the_sum_of_the_grid_integers_and_gives_the_same_release(nodes: int) -> None:
    grid = Lattice.fitting(clip_norm=1.0, size=SIZE, stddev=1.0)
    integers = [grid.to_steps(update) for update in clipped_updates(nodes)]
    plain = np.sum(integers, axis=0)
    secure = from_modular(np.sum(masked(integers), axis=0, dtype=np.uint32))
    np.testing.assert_array_equal(secure, plain)
    assert plain.min() < 0 < plain.max()

    released = []
    for total in (plain, secure):
        add_noise(total, STREAM, [(1, 0, 1.0), (0, 0, -0.9)], 1.0, grid)
        released.append(grid.from_steps(total))
    np.testing.assert_array_equal(released[0], released[1])


@settings(derandomize=True, max_examples=200)
@given(st.lists(st.lists(st.integers(-(2**28), 2**28), min_size=4, max_size=4), min_size=2, max_size=7))
def test_any_integers_whose_sum_fits_are_added_exactly(rows: list[list[int]]) -> None:
    values = [np.array(row, np.int64) for row in rows]
    secure = from_modular(np.sum(masked(values), axis=0, dtype=np.uint32))
    assert secure.tolist() == [sum(column) for column in zip(*rows, strict=True)]


def test_the_largest_cohort_does_not_wrap_and_a_larger_one_would() -> None:
    most = Lattice(2.0**-20).to_steps(np.array([1.0, -1.0]))  # all of the norm in one coordinate, of all users
    assert from_modular(to_modular(2047 * most)).tolist() == [2047 * 2**20, -2047 * 2**20]
    assert from_modular(to_modular(2048 * most)).tolist() == [-(2**31), -(2**31)]


def test_what_one_node_sends_is_uniform_whatever_its_update() -> None:
    for update in (np.zeros(100_000, np.int64), np.full(100_000, 12_345)):
        [sent, _] = masked([update, np.zeros_like(update)])
        for byte in range(4):
            counts = np.bincount((sent >> (8 * byte)) & 255, minlength=256)
            assert stats.chisquare(counts).pvalue > 1e-3


def test_without_one_node_nothing_is_known_until_its_masks_are_given_up() -> None:
    """Why a round needs key shares (SecAgg) or must fail when a node is silent: the clear sum just drops it."""
    grid = Lattice.fitting(clip_norm=1.0, size=SIZE, stddev=1.0)
    integers = [grid.to_steps(update) for update in clipped_updates(4)]
    arrived = np.sum(masked(integers)[:3], axis=0, dtype=np.uint32)
    expected = np.sum(integers[:3], axis=0)
    assert np.count_nonzero(from_modular(arrived) == expected) <= 1
    for node in range(3):
        arrived = arrived - pair_mask(node, 3, SIZE)
    np.testing.assert_array_equal(from_modular(arrived), expected)


# Flower's own SecAgg+.


class Remembering:
    """A ClientApp whose context lasts from message to message, as on a SuperNode."""

    def __init__(self, app: ClientApp) -> None:
        self._app = app
        self._state = RecordDict()

    def __call__(self, message: Message, context: Context) -> Message:
        message.content = copy.deepcopy(message.content)
        context.state = self._state
        return self._app(message, context)


def secagg_node(update: np.ndarray, weight: float) -> FakeNode:
    app = ClientApp()

    @app.train(mods=[secaggplus_mod])
    def train(message: Message, context: Context) -> Message:
        content = {
            "fitres.parameters": ArrayRecord({"flat": Array(update)}),
            "fitres.num_examples": MetricRecord({"num_examples": int(weight)}),
            "fitres.metrics": ConfigRecord(),
            "fitres.status": ConfigRecord({"code": 0, "message": ""}),
        }
        return Message(RecordDict(content), reply_to=message)

    return FakeNode(Remembering(app))


def flower_secagg_mean(updates: list[np.ndarray], workflow: SecAggPlusWorkflow) -> np.ndarray:
    """The mean of the nodes' updates by Flower's workflow, which needs a strategy of Flower's former, legacy kind."""
    grid = FakeGrid({i + 1: secagg_node(update, workflow.max_weight) for i, update in enumerate(updates)})
    empty = ndarrays_to_parameters([np.zeros_like(updates[0])])
    means = []

    def aggregate_fit(round, results, failures):
        assert not failures
        means.append(parameters_to_ndarrays(results[0][1].parameters)[0])
        return None, {}

    legacy = SimpleNamespace(
        configure_fit=lambda round, parameters, manager: [
            (SimpleNamespace(node_id=node), FitIns(empty, {})) for node in grid.nodes
        ],
        aggregate_fit=aggregate_fit,
    )
    state = RecordDict({"config": ConfigRecord({"current_round": 1}), "parameters": ArrayRecord()})
    context = Context(run_id=1, node_id=1, node_config={}, state=state, run_config={})
    manager = SimpleNamespace(num_available=lambda: len(updates))
    workflow(grid, LegacyContext(context, strategy=legacy, client_manager=manager))
    [mean] = means
    return mean


def test_flowers_secagg_would_carry_grid_integers_without_loss() -> None:
    """With equal weights and a quantiser of exactly one step it neither rounds nor clips: n times its mean is the sum."""
    nodes, target = 5, 2**26
    grid = Lattice.fitting(clip_norm=1.0, size=SIZE, stddev=1.0)
    assert nodes * target <= MODULUS
    integers = [grid.to_steps(update) for update in clipped_updates(nodes)]
    workflow = SecAggPlusWorkflow(
        num_shares=nodes,
        reconstruction_threshold=3,
        max_weight=1.0,
        clipping_range=grid.step * target / 2,
        quantization_range=target,
    )
    mean = flower_secagg_mean([grid.from_steps(values) for values in integers], workflow)
    total = np.rint(nodes * mean / grid.step).astype(np.int64)
    np.testing.assert_array_equal(total, np.sum(integers, axis=0))


def test_flowers_masks_have_no_more_than_32_secret_bits() -> None:
    """Why it is not offered: seeds of 256 bits are folded to 32, so that one of 2³² known masks is on every update."""
    seed = bytes(range(32))
    fold = np.bitwise_xor.reduce(np.frombuffer(seed, "<u4"))
    other = bytes(28) + int(fold).to_bytes(4, "little")
    assert seed != other
    masks = [pseudo_rand_gen(s, MODULUS, [(SIZE,)])[0] for s in (seed, other)]
    np.testing.assert_array_equal(masks[0], masks[1])
    known = np.random.RandomState(int(fold)).randint(0, MODULUS - 1, (SIZE,), dtype=np.int64)
    np.testing.assert_array_equal(masks[0], known)
