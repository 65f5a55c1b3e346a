"""The release protocol: nonce, record, noise, release, in this order and nowhere else."""

import ast
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from plans import make_plan

from fedcgd import NoiseKey, Participation, Plan
from fedcgd.ledger import Ledger, verify
from fedcgd.mechanisms import BLT, DPSGD, LambdaCGD, inverse_matrix
from fedcgd.noise import NoiseStream
from fedcgd.noise import tensors as noise_tensors
from fedcgd.noise.quantisation import Lattice
from fedcgd.noise.tensors import TensorNormals
from fedcgd.release import NoiseSource, ReleaseProtocol, RunNoise, array_noise, lattice_of

ROOT = Path(__file__).resolve().parents[2]
ROUNDS, SIZE = 4, 50
KEY = NoiseKey(bytes(range(32)))
PLAN = make_plan(LambdaCGD(0.5), Participation(rounds=ROUNDS), clip_norm=0.5, noise_multiplier=3.0)


def tensor_noise(plan: Plan, key: NoiseKey, stream_id: str, lattice: Lattice) -> RunNoise:
    """As `array_noise`, for tensors."""
    return RunNoise(plan, key, stream_id, TensorNormals(NoiseStream(key.noise_of(stream_id)), lattice))


def opened(path: Path, plan: Plan = PLAN) -> Ledger:
    return Ledger.open(path, plan=plan, configuration={}, key=KEY)


def assert_noise(found: np.ndarray, nonces: Sequence[int], stream_id: str, lattice: Lattice) -> None:
    """It is C⁻¹Z written out; half a step of rounding and a dither of at most 2⁻⁸ standard deviations may move it."""
    stream = NoiseStream(KEY.noise_of(stream_id))
    z = np.stack([stream.normal(t, nonce, 0, SIZE) for t, nonce in enumerate(nonces)]).astype(np.float64)
    expected = PLAN.stddev * (inverse_matrix(PLAN.mechanism, len(nonces)) @ z) / lattice.step
    assert np.abs(found - expected).max() <= 0.5 + 2**-8 * PLAN.stddev / lattice.step + 1e-6
    assert np.abs(expected).max() > 100


def released(releases: ReleaseProtocol, total: np.ndarray, user: str) -> np.ndarray:
    attempt = releases.plan_round([user])
    releases.add_noise(total, attempt, lattice_of(PLAN, SIZE))
    releases.record(attempt, total.tobytes())
    return total


def test_what_is_released_is_the_sum_and_the_rows_of_the_inverse(tmp_path: Path) -> None:
    sums = np.random.default_rng(1).integers(-1000, 1000, (ROUNDS, SIZE))
    with opened(tmp_path / "run.db") as ledger:
        releases = ReleaseProtocol(ledger, PLAN, KEY)
        found = [released(releases, row.copy(), f"user-{i}") for i, row in enumerate(sums)]
        nonces = ledger.resume().nonces
        assert releases.count == ROUNDS
        assert len(set(nonces)) == ROUNDS
        assert_noise(np.array(found) - sums, nonces, ledger.stream_id, lattice_of(PLAN, SIZE))
    assert verify(tmp_path / "run.db").problems == ()


def test_the_nonce_is_on_record_before_there_is_noise_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **named: order.append(name) or original(*args, **named))

    watch(NoiseKey, "nonce_of")
    watch(Ledger, "record_aggregated")
    watch(NoiseSource, "add")
    watch(Ledger, "record_released")
    with opened(tmp_path / "run.db") as ledger:
        released(ReleaseProtocol(ledger, PLAN, KEY), np.zeros(SIZE, np.int64), "ann")
    assert order == ["nonce_of", "record_aggregated", "add", "record_released"]


@pytest.mark.parametrize("tensors", [False, True])
def test_a_nonce_that_cannot_be_recorded_makes_no_noise(tensors: bool) -> None:
    make = tensor_noise if tensors else array_noise
    noise = make(PLAN, KEY, "run", lattice_of(PLAN, SIZE))
    total = torch.ones(SIZE, dtype=torch.int64) if tensors else np.ones(SIZE, np.int64)

    def full(nonce: int) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        noise.add(total, earlier=[], attempt=0, record=full)
    assert (np.asarray(total) == 1).all()
    assert noise.add(total, earlier=[], attempt=0) > 0
    assert (np.asarray(total) != 1).any()


def test_a_list_of_nonces_that_record_appends_to_is_taken_as_it_was() -> None:
    """The round's own nonce among the earlier ones was a row too many: noise that is silently not correlated."""
    noise, nonces = array_noise(PLAN, KEY, "run", lattice_of(PLAN, SIZE)), list[int]()
    growing = np.zeros((2, SIZE), np.int64)
    for total in growing:
        noise.add(total, earlier=nonces, attempt=0, record=nonces.append)
    assert len(nonces) == len(set(nonces)) == 2
    assert_noise(growing, nonces, "run", noise.lattice)


def test_arrays_and_tensors_have_the_same_noise() -> None:
    """Of a simulation, whose nonces are numbers of tries."""
    key, lattice = NoiseKey.simulation(3), lattice_of(PLAN, SIZE)
    for mechanism in (LambdaCGD(0.5), BLT((0.3,), (0.9,))):
        plan = make_plan(mechanism, PLAN.participation, clip_norm=0.5, noise_multiplier=3.0)
        one, other = array_noise(plan, key, "", lattice), tensor_noise(plan, key, "", lattice)
        nonces: list[int] = []
        for attempt in (2, 0, 1):
            array, tensor = np.arange(SIZE), torch.arange(SIZE)
            nonce = one.add(array, earlier=nonces, attempt=attempt)
            assert nonce == other.add(tensor, earlier=nonces, attempt=attempt) == attempt
            np.testing.assert_array_equal(array, tensor.numpy())
            nonces.append(nonce)


def test_a_round_that_fails_is_tried_again_under_another_nonce(tmp_path: Path) -> None:
    with opened(tmp_path / "run.db") as ledger:
        releases = ReleaseProtocol(ledger, PLAN, KEY)
        total, again = np.zeros(SIZE, np.int64), np.zeros(SIZE, np.int64)
        attempt = releases.plan_round(["ann"])
        releases.add_noise(total, attempt, lattice_of(PLAN, SIZE))
        releases.abandon("its inner strategy failed")
        with pytest.raises(ValueError, match="add_noise"):
            releases.record(attempt, b"")
        assert releases.count == 0
        assert not np.array_equal(total, released(releases, again, "ann"))
        assert releases.count == 1
        # A second owner goes on from the ledger, and from its nonces.
        assert ReleaseProtocol(ledger, PLAN, KEY).count == 1
    releases.abandon("after the ledger was closed: what is raised elsewhere is not hidden")


def test_a_sum_that_has_no_noise_is_not_recorded_as_released(tmp_path: Path) -> None:
    """Noise that was made before the run was resumed, or for the round before, is none."""
    with opened(tmp_path / "run.db") as ledger:
        releases, total = ReleaseProtocol(ledger, PLAN, KEY), np.zeros(SIZE, np.int64)
        attempt = releases.plan_round(["alice"])
        releases.add_noise(total, attempt, lattice_of(PLAN, SIZE))
        releases.resume()
        with pytest.raises(ValueError, match="no noise"):
            releases.record(attempt, total.tobytes())
        releases.skip("a test")
        released(releases, total, "alice")
        attempt = releases.plan_round(["bob"])
        with pytest.raises(ValueError, match="no noise"):
            releases.record(attempt, total.tobytes())
        assert releases.count == len(ledger.resume().nonces) == 1


def test_a_resumed_run_is_not_opening_what_was_opened_before(tmp_path: Path) -> None:
    with opened(tmp_path / "run.db") as ledger:
        releases = ReleaseProtocol(ledger, PLAN, KEY)
        releases.leave_noise_to_others(7)
        assert releases.is_consumed
        releases.resume()
        assert not releases.is_consumed


def test_noise_is_in_steps_of_the_lattice_that_the_sum_is_on(tmp_path: Path) -> None:
    """Also where a round's lattice is another one than that of the round before."""
    size = 20_000
    first = lattice_of(PLAN, size)
    with opened(tmp_path / "run.db") as ledger:
        releases = ReleaseProtocol(ledger, PLAN, KEY)
        for lattice, rows in ((first, 1), (Lattice(4 * first.step), 2), (first, 2)):
            total = np.zeros(size, np.int64)
            attempt = releases.plan_round([f"user-{releases.count}"])
            releases.add_noise(total, attempt, lattice)
            releases.record(attempt, total.tobytes())
            stddev = PLAN.stddev * np.sqrt(1 + 0.5**2 * (rows - 1))  # of Z_t − ½·Z_{t−1}
            assert lattice.step * total.std() == pytest.approx(stddev, rel=0.03)


def test_only_this_package_makes_nonces_of_sums_and_records_them() -> None:
    """The training, the evaluation, the engine and the audit had copies of it. Keepers bind theirs to a list of seeds.

    A run of the engine without noise has nonces that only tell attempts apart. The pure step's sums are tensors of several
    processes, which agree on a nonce between the record's two lines.
    """
    found: dict[str, set[str]] = {"nonce_of": set(), "record_aggregated": set(), "record_released": set()}
    for root in ("fedcgd", "strategies", "simulations"):
        for path in (ROOT / root).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in found:
                    found[node.attr].add(str(path.relative_to(ROOT)))
    assert found == {
        "nonce_of": {"fedcgd/release/run_noise.py", "fedcgd/keepers/keeper.py"},
        "record_aggregated": {"fedcgd/release/protocol.py", "fedcgd/central/releases.py"},
        "record_released": {"fedcgd/release/protocol.py", "fedcgd/central/releases.py"},
    }


@pytest.mark.parametrize("clip_norm", [0.3, 1.0, 7.7e5])
@pytest.mark.parametrize("size", [1, 50, 123_457])
def test_lattices_are_what_they_were(clip_norm: float, size: int) -> None:
    """The step is the largest power of two that moves an update by at most its part of the clip norm."""
    plan = make_plan(DPSGD(), Participation(rounds=3), clip_norm=clip_norm)
    for loss in (2.0**-10, 2.0**-17):
        step = lattice_of(plan, size, relative_loss=loss).step
        assert step * size**0.5 <= loss * clip_norm < 2 * step * size**0.5
    assert lattice_of(plan, size) == Lattice.fitting(clip_norm=clip_norm, size=size, stddev=plan.stddev)


@pytest.mark.parametrize(("mechanism", "growth"), [(DPSGD(), 1.0), (LambdaCGD(0.9), 1.9)])
def test_noise_that_the_lattice_does_not_hold_is_refused_by_its_largest_row(mechanism, growth: float) -> None:
    """2⁴⁰ steps are the limit for σ times the largest row sum of |C⁻¹|: 1 for independent noise, 1 + λ for λ-CGD."""
    step = Lattice.fitting(clip_norm=1.0, size=SIZE, stddev=1.0).step

    def plan(part: float) -> Plan:
        """σ's share of what may just be."""
        return make_plan(mechanism, Participation(rounds=6), noise_multiplier=part * 2.0**40 * step / growth)

    stddev = plan(0.99).stddev
    assert stddev == pytest.approx(0.99 * 2.0**40 * step / growth)
    assert lattice_of(plan(0.99), SIZE).step == step
    with pytest.raises(ValueError, match="lattice"):
        lattice_of(plan(1.01), SIZE)


def test_several_processes_make_the_noise_of_one_nonce() -> None:
    lattice = lattice_of(PLAN, SIZE)
    on_record: list[int] = []

    def noise(**options) -> np.ndarray:
        total = np.zeros(SIZE, np.int64)
        array_noise(PLAN, KEY, "run", lattice).add(total, earlier=[], attempt=0, record=on_record.append, **options)
        return total

    np.testing.assert_array_equal(noise(join=lambda own: 7), noise(join=lambda own: 7))
    assert (noise(join=lambda own: 7) != noise()).any()
    assert on_record[:3] == [7, 7, 7]


def test_the_hashes_of_a_sum_are_keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a nonce is bound to hashes of the sum: whoever knew their coefficients could find two sums with one nonce."""
    keys = []

    def digest(total, key):
        keys.append(key)
        return total.numpy()

    monkeypatch.setattr(noise_tensors, "sum_digest", digest)
    total = torch.zeros(SIZE, dtype=torch.int64)
    tensor_noise(PLAN, KEY, "run", lattice_of(PLAN, SIZE)).add(total, earlier=[], attempt=0)
    assert keys == [KEY.noise_of("run")]
