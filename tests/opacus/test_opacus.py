"""The Opacus engine: its training is the plain loop's, its ε is the accounting's, its loaders keep the plan."""

import numpy as np
import pytest
import torch
from central_runs import Run, examples, network
from opacus.grad_sample import GradSampleModuleFastGradientClipping as FastGradientClipping
from opacus.utils.batch_memory_manager import BatchMemoryManager
from oracles_gradients import clipped_sum
from plans import make_plan
from torch import nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, DataLoader, Subset, SubsetRandomSampler, TensorDataset

from fedcgd import NoiseKey, Participation, calibrate, compute_epsilon, select_lambda
from fedcgd.central.batches import parts_of
from fedcgd.clipping.flat_models import flatten
from fedcgd.mechanisms import BLT, BSR, DPSGD, BinaryTree, LambdaCGD, inverse_matrix
from fedcgd.mechanisms.schedule import scheduled_workload
from fedcgd.noise import NoiseStream
from fedcgd.opacus import CorrelatedPrivacyEngine
from fedcgd.opacus.clipped_sum import MARGIN
from fedcgd.opacus.plan_arguments import participation_of as planned
from fedcgd.participation.batches import ExampleRounds

KEY = NoiseKey.simulation(1)
EXAMPLES, BATCH, EPOCHS, CLIP, SIGMA, RATE = 60, 12, 2, 0.4, 0.7, 0.5
ROUNDS = EPOCHS * EXAMPLES // BATCH
MECHANISM = LambdaCGD(0.8)
MODEL, DATA = network(), examples(EXAMPLES, scale=1.0)


def participation_of(sampling="none", *, steps=EXAMPLES // BATCH, epochs=EPOCHS, groups=2):
    rounds = steps * epochs
    if sampling == "poisson":
        return Participation(rounds=rounds, sampling=sampling, sampling_rate=1 / steps)
    if sampling == "random-allocation":
        return Participation(rounds=rounds, max_participations=epochs, sampling=sampling)
    if sampling == "b-min-sep":
        return Participation(
            rounds=rounds, min_separation=groups, sampling=sampling, sampling_rate=1 / (steps - groups + 1)
        )
    if sampling == "cyclic-poisson":
        return Participation(rounds=rounds, min_separation=groups, sampling=sampling, sampling_rate=groups / steps)
    return Participation(rounds=rounds, min_separation=steps, sampling=sampling)


def plan_of(mechanism=MECHANISM, sampling="none", *, clip_norm=CLIP, sigma=SIGMA, participation=None, **shape):
    return make_plan(
        mechanism, participation or participation_of(sampling, **shape), clip_norm=clip_norm, noise_multiplier=sigma
    )


def make(*, mechanism=MECHANISM, sampling="none", key=KEY, size=EXAMPLES, epochs=EPOCHS, plan=None, **options):
    model = network()
    engine = CorrelatedPrivacyEngine(key)
    private = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        data_loader=DataLoader(examples(size, scale=1.0), batch_size=BATCH),
        plan=plan or plan_of(mechanism, sampling, epochs=epochs),
        **options,
    )
    return engine, model, private


def make_with_epsilon(**options):
    model = options.get("module", network())
    engine = CorrelatedPrivacyEngine(KEY)
    usual = {
        "module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=RATE), "mechanism": MECHANISM,
        "data_loader": DataLoader(examples(EXAMPLES, scale=1.0), batch_size=BATCH), "target_epsilon": 3.0, "target_delta": 1e-4,
        "max_grad_norm": CLIP, "epochs": EPOCHS,
    }  # fmt: skip
    return engine, model, engine.make_private_with_epsilon(**usual | options)


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


def plain_loop(mechanism, batches, *, size=EXAMPLES):
    """One backward pass per example, and the noise as a matrix product."""
    model = network()
    flat = flatten(model)
    stream = NoiseStream(KEY.noise)
    z = np.stack([stream.normal(t, 0, 0, len(flat)).astype(float) for t in range(ROUNDS)])
    smoothing = np.stack([stream.derive("smoothing").words(t, 0, 0, len(flat)) for t in range(ROUNDS)])
    noise = inverse_matrix(mechanism, ROUNDS) @ z + smoothing / 2**31 / 256
    inputs, targets = examples(size, scale=1.0).tensors
    for t, batch in enumerate(batches):
        total = clipped_sum(model, zip(inputs[batch], targets[batch], strict=True), CLIP * (1 - MARGIN))
        flat = flat - RATE * (total + CLIP * SIGMA * torch.from_numpy(noise[t])).float() / BATCH
        nn.utils.vector_to_parameters(flat.clone(), model.parameters())
    return flat


def batches_of(private, rounds=ROUNDS):
    sampler = private[-1].batch_sampler
    return [sampler.rows(t) for t in range(rounds)]


@pytest.mark.parametrize(
    ("mechanism", "sampling"),
    [
        (DPSGD(), "none"),
        (LambdaCGD(0.8), "none"),
        (DPSGD(), "balls-in-bins"),
        (LambdaCGD(0.8), "balls-in-bins"),
        (DPSGD(), "poisson"),
        (DPSGD(), "cyclic-poisson"),
        (BSR(2), "cyclic-poisson"),
        (DPSGD(), "b-min-sep"),
        (DPSGD(), "random-allocation"),
        (BSR(4), "none"),
        (BLT((0.2, 0.1), (0.9, 0.5)), "none"),
        (BinaryTree(), "none"),
    ],
    ids=str,
)
def test_the_model_is_the_plain_loops(mechanism, sampling):
    options = {"mechanism": mechanism, "sampling": sampling}
    expected, batches = participation_of(sampling), batches_of(make(**options)[2])
    own = ExampleRounds(expected, EXAMPLES, KEY.choices, parts_of(expected, EXAMPLES))
    assert all(np.array_equal(rows, own.rows(t)) for t, rows in enumerate(batches))
    assert float((run(**options) - plain_loop(mechanism, batches)).abs().max()) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"grad_sample_mode": "ghost"},
        {"grad_sample_mode": "functorch"},
        {"physical": 5},
        {"grad_sample_mode": "ghost", "physical": 5},
        {"noise": "buffer"},
        {"noise": "cpu-buffer"},
    ],
    ids=str,
)
def test_how_it_is_computed_does_not_matter(options):
    assert float((run(**options) - run()).abs().max()) < 1e-5


@pytest.mark.parametrize("physical", [None, 5])
def test_an_empty_batch_still_gets_noise_and_counts(physical):
    engine, model, private = make(sampling="balls-in-bins", epochs=1)
    sampler = private[-1].batch_sampler
    drawn = sampler.rows
    sampler.rows = lambda t: drawn(t)[: 0 if t == 2 else None]
    expected = plain_loop(LambdaCGD(0.8), batches_of(private, 5))
    train(private, epochs=1, physical=physical)
    assert engine.accountant.released == 5
    assert float((flatten(model) - expected).abs().max()) < 1e-5


def test_epsilon_is_the_accountings_at_the_delta_that_is_asked_about():
    engine, _, private = make()
    assert engine.get_epsilon(1e-5) == 0
    for released in (5, 10):
        train(private, epochs=1)
        for delta in (1e-7, 1e-3):
            expected = compute_epsilon(
                MECHANISM, participation_of(), noise_multiplier=SIGMA, delta=delta, released=released
            )
            assert engine.get_epsilon(delta) == expected.epsilon > 0


def test_a_budget_makes_the_plan():
    engine, _, private = make_with_epsilon(sampling="none")
    expected = calibrate(LambdaCGD(0.8), participation_of(), epsilon=3.0, delta=1e-4)
    assert engine.accountant.plan.noise_multiplier == expected.noise_multiplier
    assert engine.accountant.plan.delta == 1e-4
    assert engine.accountant.plan.guarantee().epsilon == pytest.approx(3.0, rel=1e-3)
    train(private)
    assert engine.get_epsilon(1e-4) == pytest.approx(3.0, rel=1e-3)
    assert engine.get_epsilon(1e-4) <= 3.0 * (1 + 1e-9)


def test_without_a_sampling_it_is_that_of_opacus():
    poisson = make_with_epsilon(mechanism=DPSGD())[0].accountant.plan
    assert poisson == make_with_epsilon(mechanism=DPSGD(), poisson_sampling=True)[0].accountant.plan
    assert poisson.participation == participation_of("poisson")
    with pytest.raises(ValueError, match="sampling"):
        make_with_epsilon()
    assert make_with_epsilon(poisson_sampling=False)[0].accountant.plan.participation == participation_of()


@pytest.mark.parametrize("physical", [None, 5])
def test_a_loop_after_the_last_round_is_refused(physical):
    _, _, private = make(epochs=1)
    train(private, epochs=1)
    with pytest.raises(RuntimeError, match="all 5"):
        train(private, epochs=1, physical=physical)
    with pytest.raises(RuntimeError, match="all 5"):
        private[1].step()


def test_an_epoch_left_early_goes_on_where_it_stopped():
    engine, model, private = make()
    module, optimizer, loader = private

    def steps(limit):
        before = engine.accountant.released
        for number, (inputs, targets) in enumerate(loader):
            if number == limit:
                break
            optimizer.zero_grad()
            functional.cross_entropy(module(inputs), targets).backward()
            optimizer.step()
        return engine.accountant.released - before

    assert [steps(limit) for limit in (3, 99, 1, 99)] == [3, 2, 1, 4]
    assert torch.equal(flatten(model), run())


@pytest.mark.parametrize("content", [{"weight": torch.zeros(2)}, nn.Linear(2, 2)])
def test_a_file_that_is_no_checkpoint_is_named(content, tmp_path):
    torch.save(content, tmp_path / "model.pt")
    engine, model, private = make()
    before = flatten(model).clone()
    with pytest.raises(ValueError, match="no checkpoint"):
        engine.load_checkpoint(path=tmp_path / "model.pt", module=private[0])
    assert torch.equal(flatten(model), before)


@pytest.mark.filterwarnings("ignore:nothing says whether rounds")  # there is no record
@pytest.mark.parametrize("noise", ["replay", "buffer"])
def test_a_checkpoint_of_a_secret_key_goes_on_with_the_noise_of_its_record(noise, tmp_path):
    """Examples that are not finite add nothing, so that the model moves by the noise alone: by rows of C⁻¹Z of one run."""
    key = NoiseKey.generate()

    def steps(count, checkpoint=None):
        engine, model, private = make(key=key, noise=noise)
        module, optimizer, loader = private
        if checkpoint:
            engine.load_checkpoint(path=checkpoint, module=module, optimizer=optimizer)
        moved = []
        for _, (inputs, targets) in zip(range(count), loader, strict=False):
            before = flatten(model)
            optimizer.zero_grad()
            functional.cross_entropy(module(inputs * torch.nan), targets).backward()
            optimizer.step()
            moved.append((flatten(model) - before).numpy())
        engine.save_checkpoint(path=tmp_path / "checkpoint", module=module, optimizer=optimizer)
        assert key._root.hex() not in str(engine.accountant.state_dict())
        return engine.accountant, moved

    first, before = steps(3)
    last, after = steps(2, tmp_path / "checkpoint")
    nonces = [*first.nonces, *last.nonces[3:]]
    assert len(set(nonces)) == 5
    stream = NoiseStream(key.noise_of(first.run))
    z = np.stack([stream.normal(t, nonce, 0, len(before[0])) for t, nonce in enumerate(nonces)])
    rows = inverse_matrix(MECHANISM, ROUNDS)[:5, :5] @ z
    np.testing.assert_allclose([*before, *after], -RATE * CLIP * SIGMA / BATCH * rows, atol=2e-4)  # the grid
    other, _, private = make(key=key)
    assert other.accountant.run != first.run == last.run
    assert not np.array_equal(batches_of(private), batches_of(make(key=key)[2]))
    stranger, _, private = make()
    with pytest.raises(ValueError, match="fingerprint"):
        stranger.load_checkpoint(path=tmp_path / "checkpoint", module=private[0], optimizer=private[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_no_example_exceeds_the_clip_norm_in_any_format(mode, dtype, monkeypatch):
    """A batch of one example: the sum before the noise is its clipped gradient."""
    generator, norms = torch.Generator().manual_seed(3), []
    for trial in range(20):
        torch.manual_seed(trial)
        model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5)).to(dtype)
        inputs = (100 * torch.randn(1, 40, generator=generator)).to(dtype)
        alone = TensorDataset(inputs, torch.tensor([trial % 5]))
        private = Run(monkeypatch, data=alone, batch=1, epochs=1, model=model, mode=mode, clip_norm=0.7)
        private.train()
        norms += private.norms()
    assert 0.7 * (1 - 1e-4) < max(norms) <= 0.7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clipping": "per_layer"}, "clipping must be flat, got 'per_layer'"),
        ({"noise": "cache"}, "mode must be replay, buffer or cpu-buffer, got 'cache'"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"groups": 2}, "groups goes with cyclic-poisson"),
        ({"sampling": "cyclic-poisson", "groups": 6}, "between 1 and the 5 steps of an epoch, got 6"),
        ({"sampling": "none", "poisson_sampling": True}, "contradicts sampling 'none'"),
        ({"sampling": "often"}, "no other sampling is accounted for"),
        ({"max_grad_norm": [1.0, 2.0]}, "max_grad_norm must be one number"),
        ({"rand_on_empty": True}, "rand_on_empty must be False"),
        ({"accumulation_steps": 2}, "divide the 5 batches of an epoch, got 2"),
        ({"accumulation_steps": 0}, "accumulation_steps must be at least 1"),
        ({"grad_sample_mode": "no_op"}, "must be hooks, functorch or ghost, got 'no_op'"),
        ({"mechanism": None}, "dp-sgd"),
        ({"mechanism": 0.9}, r"mechanism must be a value such as LambdaCGD\(0.9\) or DPSGD\(\), got 0.9"),
        ({"mechanism": LambdaCGD}, "mechanism must be a value"),
        ({"epochs": "3"}, "epochs must be a whole number, got '3'"),
        ({"epochs": 3.0}, "epochs must be a whole number, got 3.0"),
        ({"data_loader": DataLoader(DATA, batch_size=None)}, "batch_size=None"),
        ({"data_loader": DataLoader(examples(0), batch_size=8)}, "no batch: its data set has 0 examples"),
        ({"optimizer": [torch.optim.SGD(nn.Linear(6, 3).parameters())] * 2}, "one torch optimizer .*, got list"),
        ({"module": MODEL, "optimizer": torch.optim.LBFGS(MODEL.parameters())}, "LBFGS"),
        ({"module": MODEL, "optimizer": torch.optim.SGD(MODEL[2].parameters())}, r"0\.weight"),
        ({"module": nn.Sequential(nn.Embedding(7, 6, padding_idx=2)), "grad_sample_mode": "functorch"}, "padding_idx"),
        ({"module": nn.Sequential(nn.Embedding(7, 6, max_norm=1.0))}, "max_norm"),
        ({"module": nn.Sequential(nn.BatchNorm1d(6).eval(), nn.Linear(6, 3))}, "BatchNorm cannot support"),
        ({"module": nn.Sequential(nn.BatchNorm1d(6).requires_grad_(False), nn.Linear(6, 3))}, r"GroupNorm.*eval\(\)"),
        (
            {"module": FastGradientClipping(nn.Linear(6, 3)), "grad_sample_mode": "ghost"},
            r"already.*to_standard_module\(\)",
        ),
        ({"data_loader": DataLoader(DATA, batch_size=2, sampler=SubsetRandomSampler(range(4)))}, "examples shall"),
        ({"data_loader": DataLoader(Subset(DATA, [0, 1, 2, 3, 3]))}, "more than"),
        ({"data_loader": DataLoader(ConcatDataset([DATA, Subset(DATA, [5])]))}, "more than"),
        ({"data_loader": DataLoader(Subset(Subset(DATA, [5, 4, 3]), [0, 1, 0]))}, "more than"),
        ({"augmentation_multiplicity": 0}, "augmentation_multiplicity must"),
        ({"assume_independent": " "}, "must say"),
    ],
)
def test_what_is_not_accounted_for_is_refused(options, message):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        make_with_epsilon(**{"sampling": "none", **options})


def test_lambda_is_chosen_for_the_momentum_and_the_schedule_that_run():
    rounds, model = 50, network()
    participation = Participation(rounds=rounds, min_separation=5)

    def lam(optimizer=torch.optim.SGD, options=None, **changed) -> float:
        optimizer = optimizer(model.parameters(), lr=0.1, **options or {})
        usual = {"module": model, "optimizer": optimizer, "mechanism": "lambda-cgd", "sampling": "none", "epochs": 10}
        return make_with_epsilon(**usual | changed)[0].accountant.plan.mechanism.lam

    def expected(**workload) -> float:
        asked = scheduled_workload(rounds=rounds, **workload)
        return select_lambda(participation, epsilon=3.0, delta=1e-4, objective="excess", workload=asked).lam

    constant, falling = expected(schedule="constant"), expected(schedule="linear")
    assert lam() == constant
    assert lam(schedule="linear") == falling > constant
    assert lam(options={"momentum": 0.9}) == expected(schedule="constant", momentum=0.9) > constant
    assert lam(optimizer=torch.optim.Adam) == constant
    with pytest.raises(ValueError, match="constant, linear,"):
        lam(schedule="stairs")


def test_a_layer_that_sees_fewer_rows_is_named(monkeypatch):
    """As the position embeddings of Transformers' models, which look up one row of positions for the whole batch."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.positions = nn.Linear(6, 6), nn.Embedding(6, 1)

        def forward(self, inputs):
            return self.linear(inputs) + self.positions(torch.arange(6)[None])[..., 0]

    private = Run(monkeypatch, model=Positions())
    private.module(next(iter(private.loader))[0]).sum().backward()
    with pytest.raises(RuntimeError, match="weight' and"):
        private.optimizer.step()


@pytest.mark.parametrize(
    "participation",
    [
        Participation(rounds=12, min_separation=5),
        Participation(rounds=10, min_separation=6),
        Participation(rounds=10, min_separation=5, max_participations=1),
        Participation(rounds=10, min_separation=2, sampling="balls-in-bins"),
        Participation(rounds=10, sampling="poisson", sampling_rate=0.1),
        Participation(rounds=10, min_separation=2, sampling="cyclic-poisson", sampling_rate=0.2),
        Participation(rounds=10, min_separation=2, sampling="b-min-sep", sampling_rate=0.2),
        Participation(rounds=10, max_participations=5, sampling="random-allocation"),
    ],
    ids=str,
)
def test_a_plan_that_the_loader_cannot_keep_is_refused(participation):
    with pytest.raises(ValueError, match="the plan"):
        make(plan=plan_of(DPSGD(), participation=participation))


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_groups_in_turn_are_planned_at_the_rate_of_the_loader(groups):
    """In each of 5 steps a fifth of all examples, who are in one of the groups: up to all groups' examples in theirs."""
    participation = planned(5, 3, "cyclic-poisson", groups)
    assert (participation.rounds, participation.min_separation) == (15, groups)
    assert participation.sampling_rate == groups / 5


def test_by_default_an_example_rests_two_thirds_of_an_epoch() -> None:
    assert planned(5, 3, "b-min-sep", None) == Participation(
        rounds=15, min_separation=3, sampling="b-min-sep", sampling_rate=1 / 3
    )


def test_a_plan_with_a_smaller_separation_than_the_loaders_is_kept():
    plan = plan_of(participation=Participation(rounds=10, min_separation=3))
    batches = batches_of(make(plan=plan)[2])
    assert sorted(np.concatenate(batches[:5])) == list(range(EXAMPLES))
