"""The Opacus engine: its training is the plain loop's, its ε is the accounting's, its loaders keep the plan."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fedcgd.accounting import calibrate, compute_epsilon
from fedcgd.keys import NoiseKey
from fedcgd.mechanisms import BISR, BLT, BSR, DPSGD, BinaryTree, LambdaCGD, inverse_matrix
from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Grid
from fedcgd.noise.source import GeneratorNormals, GridNormals, NoiseSource
from fedcgd.opacus import CorrelatedPrivacyEngine
from fedcgd.parameters import flatten
from fedcgd.participation import Participation

KEY = NoiseKey.simulation(1)
EXAMPLES, BATCH, EPOCHS, CLIP, SIGMA, RATE = 60, 12, 2, 0.4, 0.7, 0.5
ROUNDS = EPOCHS * EXAMPLES // BATCH
MECHANISM = LambdaCGD(0.8)
STEP = 2.0**-15  # the largest power of two with STEP·√53 ≤ 0.4/1024


def data(size=EXAMPLES):
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))


def make(*, mechanism=MECHANISM, key=KEY, size=EXAMPLES, epochs=EPOCHS, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine = CorrelatedPrivacyEngine(key=key)
    arguments = {"noise_multiplier": SIGMA} if "target_epsilon" not in options else {}
    method = engine.make_private_with_epsilon if "target_epsilon" in options else engine.make_private
    private = method(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data(size), batch_size=BATCH),
        mechanism=mechanism,
        max_grad_norm=CLIP,
        epochs=epochs,
        **arguments,
        **options,
    )
    return engine, model, private


def train(private, *, epochs=EPOCHS, physical=None):
    module, optimizer, loader = private[0], private[1], private[-1]
    loss = private[2] if len(private) == 4 else nn.CrossEntropyLoss()
    module.train()
    for _ in range(epochs):
        batches = loader
        if physical:
            batches = BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
            ).__enter__()
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss(module(inputs), targets).backward()
            optimizer.step()


def run(*, physical=None, **options):
    _, model, private = make(**options)
    train(private, physical=physical)
    return flatten(model)


def plain_loop(mechanism, batches, *, size=EXAMPLES, clip=CLIP, whole=False):
    """One backward pass per example, and the noise as a matrix product; all rounded to the grid, or only the `whole` sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    flat = flatten(model)
    stream = NoiseStream(KEY.noise)
    noise = inverse_matrix(mechanism, ROUNDS) @ np.stack(
        [stream.normal(t, 0, 0, len(flat)).astype(float) for t in range(ROUNDS)]
    )
    smoothing = np.stack([stream.derive("smoothing").normal(t, 0, 0, len(flat)) for t in range(ROUNDS)])
    noise = STEP * sum(np.rint(CLIP * SIGMA * part / STEP) for part in (noise, smoothing / 256))
    inputs, targets = data(size).tensors
    for t, batch in enumerate(batches):
        total = torch.zeros_like(flat)
        for i in batch:
            model.zero_grad()
            functional.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]).backward()
            gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            clipped = gradient * min(1.0, clip / float(gradient.norm()))
            total += clipped if whole else STEP * torch.trunc(clipped / STEP)
        total = STEP * torch.trunc(total / STEP)
        flat = flat - RATE * (total + torch.from_numpy(noise[t]).float()) / BATCH
        nn.utils.vector_to_parameters(flat.clone(), model.parameters())
    return flat


def batches_of(private, rounds=ROUNDS):
    sampler = private[-1].batch_sampler
    return [sampler.batch(t) for t in range(rounds)]


SAMPLINGS = [{"sampling": "none"}, {"sampling": "balls-in-bins"}, {"poisson_sampling": True}]
SAMPLINGS.append({"sampling": "cyclic-poisson", "groups": 2})


@pytest.mark.parametrize("options", SAMPLINGS, ids=lambda o: str(next(iter(o.values()))))
@pytest.mark.parametrize("mechanism", [DPSGD(), LambdaCGD(0.8)])
def test_the_model_is_the_plain_loops(mechanism, options):
    expected = plain_loop(mechanism, batches_of(make(mechanism=mechanism, **options)[2]))
    assert float((run(mechanism=mechanism, **options) - expected).abs().max()) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"grad_sample_mode": "functorch"},
        {"physical": 5},
        {"noise": "buffer"},
        {"noise": "cpu-buffer"},
    ],
    ids=str,
)
def test_how_it_is_computed_does_not_matter(options):
    assert float((run(**options) - run()).abs().max()) < 1e-5


@pytest.mark.parametrize("physical", [None, 5])
def test_ghost_clipping_gives_the_same_up_to_the_grid(physical):
    """Its sum is rounded as a whole, for which it clips to 1/1024 less."""
    clip = CLIP * (1 - 2.0**-10 - 2.0**-16)
    expected = plain_loop(MECHANISM, batches_of(make()[2]), clip=clip, whole=True)
    # In each of ten rounds the sum may fall to the other side of a step.
    assert float((run(grad_sample_mode="ghost", physical=physical) - expected).abs().max()) < 10 * STEP * RATE / BATCH


@pytest.mark.parametrize("physical", [None, 5])
def test_an_empty_batch_still_gets_noise_and_counts(physical):
    engine, model, private = make(sampling="balls-in-bins", epochs=1)
    groups = private[-1].batch_sampler.groups()
    groups[2] = groups[2][:0]
    expected = plain_loop(LambdaCGD(0.8), batches_of(private, 5))
    train(private, epochs=1, physical=physical)
    assert engine.accountant.released == 5
    assert float((flatten(model) - expected).abs().max()) < 1e-5


def test_lambda_zero_has_the_distribution_of_opacus_dp_sgd():
    """With gradients of zero, one step moves each weight by N(0, (σζ·rate/batch)²) in both engines."""
    stddev = SIGMA * CLIP * RATE / BATCH

    def moves(private, model):
        before = flatten(model)
        inputs = torch.zeros(BATCH, 400)
        module, optimizer = private[0], private[1]
        optimizer.zero_grad()
        (0 * module(inputs)).sum().backward()
        optimizer.step()
        return (flatten(model) - before) / stddev

    def prepared(engine, **options):
        model = nn.Linear(400, 50)
        dataset = TensorDataset(torch.zeros(EXAMPLES, 400))
        private = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
            data_loader=DataLoader(dataset, batch_size=BATCH),
            noise_multiplier=SIGMA,
            max_grad_norm=CLIP,
            **options,
        )
        return moves(private, model)

    ours = prepared(CorrelatedPrivacyEngine(key=KEY), mechanism=LambdaCGD(0.0), epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(7)
        theirs = prepared(PrivacyEngine(), poisson_sampling=False)
    # 20,050 draws: the mean is known to 0.0071 and the standard deviation to 0.005; four times that is allowed.
    for sample in (ours, theirs):
        assert abs(float(sample.mean())) < 0.028
        assert abs(float(sample.std()) - 1) < 0.02
    order = [torch.sort(sample).values for sample in (ours, theirs)]
    assert float((order[0] - order[1]).abs()[500:-500].max()) < 0.1


def test_epsilon_is_the_accountings():
    engine, _, private = make()
    participation = Participation(rounds=ROUNDS, min_separation=EXAMPLES // BATCH)
    assert engine.get_epsilon(1e-5) == 0
    train(private, epochs=1)
    expected = compute_epsilon(LambdaCGD(0.8), participation, noise_multiplier=SIGMA, delta=1e-5, released=5)
    assert engine.get_epsilon(1e-5) == expected.epsilon
    train(private, epochs=1)
    assert (
        engine.get_epsilon(1e-5)
        == compute_epsilon(LambdaCGD(0.8), participation, noise_multiplier=SIGMA, delta=1e-5).epsilon
    )
    assert engine.get_epsilon(1e-5) > expected.epsilon


def test_a_budget_sets_the_noise():
    engine, _, private = make(target_epsilon=3.0, target_delta=1e-4)
    participation = Participation(rounds=ROUNDS, min_separation=EXAMPLES // BATCH)
    expected = calibrate(LambdaCGD(0.8), participation, epsilon=3.0, delta=1e-4)
    assert engine.accountant.plan.noise_multiplier == expected.noise_multiplier
    train(private)
    assert engine.get_epsilon(1e-4) == pytest.approx(3.0, rel=1e-3)
    assert engine.get_epsilon(1e-4) <= 3.0 * (1 + 1e-9)


def test_a_step_after_the_last_round_is_refused():
    _, _, private = make(epochs=1)
    train(private, epochs=1)
    module, optimizer, _ = private
    inputs, targets = data().tensors
    optimizer.zero_grad()
    functional.cross_entropy(module(inputs[:BATCH]), targets[:BATCH]).backward()
    with pytest.raises(RuntimeError, match="all 5 rounds of the plan have been released"):
        optimizer.step()
    assert list(private[-1]) == []


def test_an_epoch_left_early_goes_on_where_it_stopped():
    _, model, private = make()
    module, optimizer, loader = private

    def steps(limit):
        for number, (inputs, targets) in enumerate(loader):
            if number == limit:
                return
            optimizer.zero_grad()
            functional.cross_entropy(module(inputs), targets).backward()
            optimizer.step()

    steps(3)
    steps(99)
    steps(1)
    steps(99)
    assert torch.equal(flatten(model), run())


def test_a_checkpoint_goes_on_in_the_right_round(tmp_path):
    engine, _, private = make()
    train(private, epochs=1)
    engine.save_checkpoint(path=tmp_path / "checkpoint", module=private[0], optimizer=private[1])
    for noise in ("replay", "buffer"):
        other, model, again = make(noise=noise)
        other.load_checkpoint(path=tmp_path / "checkpoint", module=again[0], optimizer=again[1])
        train(again, epochs=1)
        assert torch.allclose(flatten(model), run(), atol=1e-6)
    stranger, _, private = make(mechanism=DPSGD())
    with pytest.raises(ValueError, match="another plan"):
        stranger.load_checkpoint(path=tmp_path / "checkpoint", module=private[0], optimizer=private[1])


def test_an_example_that_is_not_finite_adds_nothing():
    def spoilt(value):
        _, model, private = make(sampling="none")
        module, optimizer, loader = private
        inputs, targets = next(iter(loader))
        if value is None:
            inputs, targets = inputs[1:], targets[1:]
        else:
            inputs[0, 0] = value
        optimizer.zero_grad()
        functional.cross_entropy(module(inputs), targets).backward()
        optimizer.step()
        return flatten(model)

    without = spoilt(None)
    for value in (float("nan"), float("inf")):
        assert torch.allclose(spoilt(value), without, atol=1e-6)


def first_steps(key, count=1, checkpoint=None):
    """Engine, and what the model moved by in its first `count` steps."""
    engine, model, private = make(key=key)
    if checkpoint:
        engine.load_checkpoint(path=checkpoint, module=private[0], optimizer=private[1])
    before = flatten(model)
    module, optimizer, loader = private
    for (inputs, targets), _ in zip(loader, range(count), strict=False):
        optimizer.zero_grad()
        functional.cross_entropy(module(inputs), targets).backward()
        optimizer.step()
    return engine, private, flatten(model) - before


def test_two_runs_under_one_key_have_other_noise_and_other_batches():
    key = NoiseKey.generate()
    (_, one, first), (_, other, second) = first_steps(key), first_steps(key)
    noise = RATE * CLIP * SIGMA / BATCH
    assert float((first - second).std()) > noise  # independent noise: 1.4 of it, and the batches differ
    assert not np.array_equal(one[-1].batch_sampler.batch(0), other[-1].batch_sampler.batch(0))
    simulated = [first_steps(NoiseKey.simulation(5))[2] for _ in range(2)]
    assert torch.equal(*simulated)


def test_an_engine_makes_one_run():
    engine, _, _ = make()
    model = nn.Linear(6, 3)
    with pytest.raises(RuntimeError, match="make another engine"):
        engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), mechanism=DPSGD(), epochs=1,
            data_loader=DataLoader(data(), batch_size=BATCH), noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip


def test_a_checkpoint_loaded_twice_goes_on_with_fresh_noise_in_the_same_run(tmp_path):
    key = NoiseKey.generate()
    engine, private, _ = first_steps(key)
    engine.save_checkpoint(path=tmp_path / "c", module=private[0], optimizer=private[1])
    assert key._root.hex() not in str(engine.accountant.state_dict())
    again = [first_steps(key, checkpoint=tmp_path / "c") for _ in range(2)]
    for loaded, parts, _ in again:
        assert loaded.accountant.run == engine.accountant.run
        assert loaded.accountant.nonces[0] == engine.accountant.nonces[0]
        assert np.array_equal(parts[-1].batch_sampler.batch(3), private[-1].batch_sampler.batch(3))
    noise = RATE * CLIP * SIGMA / BATCH
    assert float((again[0][2] - again[1][2]).std()) > noise
    stranger, _, private = make()
    with pytest.raises(ValueError, match="simulation key"):
        stranger.load_checkpoint(path=tmp_path / "c", module=private[0], optimizer=private[1])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("physical", [None, 5])
def test_a_step_left_out_stops_the_loop(workers, physical):
    model = nn.Linear(6, 3)
    module, optimizer, loader = CorrelatedPrivacyEngine(key=KEY).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data(), batch_size=BATCH, num_workers=workers),
        mechanism=MECHANISM,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        epochs=2,
    )
    batches = loader
    if physical:
        batches = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
        ).__enter__()

    def loop():
        steps = 0
        for inputs, targets in batches:
            if steps == 2:
                continue  # as a loop does that leaves out a loss that is not finite
            optimizer.zero_grad()
            functional.cross_entropy(module(inputs), targets).backward()
            optimizer.step()
            steps += 1

    with pytest.raises(RuntimeError, match=r"take one optimizer step for each batch"):
        loop()


def test_workers_may_prepare_batches_ahead():
    model = nn.Linear(6, 3)
    module, optimizer, loader = CorrelatedPrivacyEngine(key=KEY).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data(), batch_size=BATCH, num_workers=2),
        mechanism=MECHANISM,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        epochs=2,
    )
    everything = data().tensors[0]
    for round, (inputs, targets) in enumerate(loader):
        assert torch.equal(inputs, everything[loader.batch_sampler.batch(round)])
        optimizer.zero_grad()
        functional.cross_entropy(module(inputs), targets).backward()
        optimizer.step()
    assert optimizer.releases.released == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_no_example_exceeds_the_clip_norm_in_any_format(mode, dtype):
    """A batch of one example: the sum before the noise is its clipped gradient."""
    generator = torch.Generator().manual_seed(3)
    worst = 0.0
    for trial in range(20):
        torch.manual_seed(trial)
        model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5)).to(dtype)
        arguments = {
            "module": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
            "data_loader": DataLoader(TensorDataset(torch.zeros(1, 40)), batch_size=1),
            "mechanism": DPSGD(), "noise_multiplier": 1.0, "max_grad_norm": 0.7, "epochs": 1, "grad_sample_mode": mode,
        }  # fmt: skip
        if mode == "ghost" and dtype in (torch.bfloat16, torch.float16):
            with pytest.raises(ValueError, match="ghost clipping needs float32"):
                CorrelatedPrivacyEngine(key=KEY).make_private(**arguments)
            return
        module, optimizer, *criterion, _ = CorrelatedPrivacyEngine(key=KEY).make_private(**arguments)
        inputs = (100 * torch.randn(1, 40, generator=generator)).to(dtype)
        loss = criterion[0] if criterion else nn.CrossEntropyLoss()
        loss(module(inputs), torch.tensor([trial % 5])).backward()
        if mode != "ghost":
            optimizer.clip_and_accumulate()
        total = [p.grad if mode == "ghost" else p.summed_grad for p in optimizer.params]
        unit = 1.0 if mode == "ghost" else optimizer.grid.step
        worst = max(worst, unit * float(torch.cat([g.double().reshape(-1) for g in total]).norm()))
    assert 0.7 * (1 - (2e-3 if mode == "ghost" else 1e-3)) < worst <= 0.7


def test_the_batches_keep_the_participation():
    none = batches_of(make(sampling="none")[2])
    assert all(np.array_equal(none[t], none[t + 5]) for t in range(5))
    assert sorted(np.concatenate(none[:5])) == list(range(EXAMPLES))
    bins = batches_of(make(sampling="balls-in-bins")[2])
    assert all(np.array_equal(bins[t], bins[t + 5]) for t in range(5))
    assert sorted(np.concatenate(bins[:5])) == list(range(EXAMPLES))
    assert len({len(part) for part in bins}) > 1
    cyclic = batches_of(make(sampling="cyclic-poisson", groups=2)[2])
    even, odd = (set(np.concatenate(cyclic[start::2])) for start in (0, 1))
    assert not even & odd


@pytest.mark.parametrize(
    ("options", "together"),
    [
        ({"sampling": "poisson"}, 0.2 * 0.2),
        ({"sampling": "balls-in-bins"}, 0.0),
        ({"sampling": "none"}, 0.0),
        ({"sampling": "cyclic-poisson", "groups": 2}, 0.0),
    ],
)
def test_examples_are_drawn_at_the_rate_that_is_accounted_for(options, together):
    """Each example with probability 1/5 in a round, and in two rounds with probability `together`."""
    size = 20_000
    model = nn.Linear(6, 3)
    loader = CorrelatedPrivacyEngine(key=KEY).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data(size), batch_size=size // 5),
        mechanism=DPSGD(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        epochs=2,
        **options,
    )[2]
    batches = [set(loader.batch_sampler.batch(t)) for t in range(5)]
    for batch, following in pairwise(batches):
        assert abs(len(batch) - size / 5) < 4 * (size * 0.2 * 0.8) ** 0.5
        assert abs(len(batch & following) - size * together) <= 4 * (size * together) ** 0.5


def test_generator_noise_is_the_rounds_own_whatever_came_before():
    source = GeneratorNormals(KEY.noise, torch.device("cpu"))

    def draw(source, *terms):
        total = torch.zeros(17)
        source.add(total, terms, 2.0)
        return total

    z = [draw(source, (t, 0, 0.5)) for t in range(3)]
    assert torch.equal(draw(GeneratorNormals(KEY.noise, torch.device("cpu")), (1, 0, 0.5)), z[1])
    assert torch.equal(source.vector(torch.zeros(17), 1, 0), z[1])
    assert torch.allclose(draw(source, (2, 0, 1.0), (1, 0, -0.8)), 2 * z[2] - 1.6 * z[1], atol=1e-6)
    assert not torch.equal(draw(GeneratorNormals(bytes(32), torch.device("cpu")), (1, 0, 0.5)), z[1])
    assert not torch.equal(draw(source, (1, 7, 0.5)), z[1])
    assert not torch.equal(draw(source, (1, 2**127, 0.5)), z[1])
    assert not torch.equal(z[0], z[1])


NONCES = [0, 5, 0, 2**128 - 1, 0, 0, 3, 0, 0]


@pytest.mark.parametrize(
    "mechanism", [LambdaCGD(0.8), BISR(3), BSR(4), BLT((0.2, 0.1), (0.9, 0.5)), BinaryTree()], ids=str
)
@pytest.mark.parametrize("mode", ["buffer", "cpu-buffer"])
def test_a_buffer_gives_what_replay_gives_also_after_a_restart(mode, mechanism):
    normals = GeneratorNormals(KEY.noise, torch.device("cpu"))
    replay, buffer = NoiseSource(mechanism, 9, normals, "replay"), NoiseSource(mechanism, 9, normals, mode)
    for t in range(9):
        if t == 6:
            buffer = NoiseSource(mechanism, 9, normals, mode)
        expected, got = torch.ones(11), torch.ones(11)
        replay.add(expected, NONCES[: t + 1], 3.0)
        buffer.add(got, NONCES[: t + 1], 3.0)
        assert torch.allclose(got, expected, atol=2e-5)
        assert not torch.allclose(got, torch.ones(11), atol=0.1)


def test_a_buffer_makes_one_vector_a_round_and_keeps_the_mechanisms_few():
    made = []

    class Counting(GridNormals):
        def vector(self, total, round, nonce):
            made.append(round)
            return super().vector(total, round, nonce)

    mechanism = BSR(4)  # its inverse has as many bands as there are rounds
    buffer = NoiseSource(mechanism, 50, Counting(NoiseStream(KEY.noise), Grid(2.0**-20)))
    assert buffer.mode == "buffer"
    for t in range(50):
        buffer.add(np.zeros(3, np.int64), [0] * (t + 1), 1.0)
        assert len(buffer._state.buffers) <= 3
    assert made == list(range(50))


@pytest.mark.parametrize("mechanism", [BSR(4), BLT((0.2, 0.1), (0.9, 0.5)), BinaryTree()], ids=str)
def test_mechanisms_with_buffers_train_as_the_plain_loop(mechanism):
    expected = plain_loop(mechanism, batches_of(make(mechanism=mechanism)[2]))
    assert float((run(mechanism=mechanism) - expected).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clipping": "per_layer"}, "clipping must be flat, got 'per_layer'"),
        ({"noise": "cache"}, "mode must be replay, buffer or cpu-buffer, got 'cache'"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"groups": 2}, "groups goes with cyclic-poisson"),
        ({"sampling": "cyclic-poisson", "groups": 6}, "between 1 and the 5 steps of an epoch, got 6"),
        ({"sampling": "none", "poisson_sampling": True}, "contradicts sampling 'none'"),
        ({"sampling": "shuffle"}, "no other sampling is accounted for"),
        ({"noise_generator": torch.Generator()}, "the noise comes from the engine's key"),
    ],
)
def test_what_is_not_accounted_for_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
