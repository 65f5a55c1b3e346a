"""Idioms of honest programs: each works, or is refused in words that name the remedy."""

import copy
from functools import partial

import pytest
import torch
from central_runs import MODES, Run, examples, network
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from fedcgd.clipping.flat_models import flatten
from fedcgd.noise.keys import NoiseKey
from fedcgd.opacus import CorrelatedPrivacyEngine

PHASED = "an earlier run has released"


def made(run, model, optimizer=None, mode="hooks", engine=None, **options):
    engine = engine or CorrelatedPrivacyEngine(NoiseKey.simulation(3))
    inner = getattr(model, "_module", model)
    return engine.make_private(
        module=model, optimizer=optimizer or torch.optim.SGD([p for p in inner.parameters() if p.requires_grad], lr=0.05),
        data_loader=DataLoader(run.data, batch_size=4), plan=run.plan, grad_sample_mode=mode, **options,
    )  # fmt: skip


def train(private):
    module, optimizer, loader = private[0], private[1], private[-1]
    for inputs, targets in loader:
        optimizer.zero_grad()
        functional.cross_entropy(module(inputs), targets).backward()
        optimizer.step()


@pytest.mark.parametrize("which", ["model", "wrapped", "standard"])
@pytest.mark.parametrize("mode", MODES)
def test_a_second_phase_on_one_model(mode, which, monkeypatch):
    """As a run of its own that begins with those weights; what the first one hung on the model is gone."""
    run = Run(monkeypatch, model=network(), mode=mode)
    run.train()
    alone = copy.deepcopy(run.model)
    model = {"model": run.model, "wrapped": run.module, "standard": None}[which] or run.module.to_standard_module()
    with pytest.warns(UserWarning, match=f"{PHASED} 3 rounds"):
        second = made(run, model, mode=mode)
    train(second)
    alone = nn.Sequential(*map(fresh, alone))
    train(made(run, alone, mode=mode))
    assert torch.equal(flatten(run.model), flatten(alone))
    with pytest.raises(RuntimeError, match="private again"):
        run.train()
    with pytest.raises(RuntimeError, match="private again"):
        run.optimizer.step()
    assert run.released == 3


def fresh(layer):
    """A layer like it, without any hooks."""
    other = nn.Linear(layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else nn.Tanh()
    other.load_state_dict(layer.state_dict())
    return other


def test_a_second_phase_with_a_new_head(monkeypatch):
    """The backbone belongs to the first run still, and the model around it is another."""
    model = network()
    run = Run(monkeypatch, model=model)
    run.train()
    with pytest.warns(UserWarning, match=PHASED):
        train(made(run, nn.Sequential(model[0], nn.Tanh(), nn.Linear(5, 3))))


@pytest.mark.filterwarnings("ignore:Secure RNG")
def test_the_cells_of_a_notebook_run_again(monkeypatch):
    """All of them, with a new engine or with the one that has released nothing, and after Opacus' own engine."""
    run = Run(monkeypatch, model=network())
    for engine in (None, run.engine, run.engine):
        private = made(run, run.model, optimizer=run.base, engine=engine)
    train(private)
    assert run.released == 3
    with pytest.raises(RuntimeError, match="another engine"):
        made(run, run.model, engine=run.engine)
    model = network()
    PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(run.data, batch_size=4),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    train(made(run, model))


class FrozenStatistics(nn.Module):
    """A pretrained layer with a frozen BatchNorm, which the model's own train() may leave in eval mode."""

    def __init__(self, stays):
        super().__init__()
        self.stays = stays
        self.norm, self.out = nn.BatchNorm1d(6).requires_grad_(False), nn.Linear(6, 3)
        self.norm.running_mean.copy_(torch.arange(6.0))
        self.norm.eval()

    def train(self, mode=True):
        super().train(mode)
        if self.stays:
            self.norm.eval()
        return self

    def forward(self, inputs):
        return self.out(self.norm(inputs))


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_batch_norm_in_eval_mode(mode, monkeypatch):
    run = Run(monkeypatch, model=FrozenStatistics(True), mode=mode)
    run.module.eval()
    run.module(torch.ones(2, 6))
    run.module.train()
    run.train()
    assert run.released == 3
    run = Run(monkeypatch, model=FrozenStatistics(False), mode=mode)
    run.module.train()
    with pytest.raises(RuntimeError, match=r"norm|out"):
        run.train()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_training_in_eval_mode_is_refused_with_the_remedy(mode, monkeypatch):
    run = Run(monkeypatch, model=network(), mode=mode)
    run.module.eval()
    with pytest.raises(RuntimeError, match="call module"):
        run.train()
    run.module.train()
    run.train()
    assert run.released == 3


@pytest.mark.parametrize("attack", ["grad", "backward", "eval"])
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_adversarial_examples_are_made_in_the_loop(mode, attack, monkeypatch):
    """The sum is that of a run on the adversarial examples of the same model (FGSM)."""

    def attacked(model, inputs, targets):
        inputs = inputs.clone().requires_grad_()
        loss = functional.cross_entropy(model(inputs), targets)
        if attack == "grad":
            (slope,) = torch.autograd.grad(loss, inputs)
        else:
            loss.backward()
            slope = inputs.grad
        return (inputs + 0.5 * slope.sign()).detach()

    run = Run(monkeypatch, model=network(), mode=mode, epochs=1, size=4)
    inputs, targets = next(iter(run.loader))
    if attack == "eval":
        run.module.eval()
    adversarial = attacked(run.module, inputs, targets)
    run.module.train()
    run.step([adversarial, targets])  # which calls zero_grad first
    plain = Run(monkeypatch, model=network(), mode=mode, epochs=1, size=4)
    next(iter(plain.loader))
    plain.step([attacked(network(), inputs, targets), targets])
    assert torch.equal(run.sums[0], plain.sums[0])


def test_an_attack_without_zero_grad_is_refused_with_the_remedy(monkeypatch):
    run = Run(monkeypatch, model=network())
    inputs, targets = next(iter(run.loader))
    inputs.requires_grad_()
    (slope,) = torch.autograd.grad(functional.cross_entropy(run.module(inputs), targets), inputs)
    run.backward([(inputs + slope.sign()).detach(), targets])
    with pytest.raises(RuntimeError, match="zero_grad after"):
        run.optimizer.step()


class Checkpointed(nn.Module):
    """Keeps only the inputs of its first half, whose layer it uses twice."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(1)
        self.reentrant, self.inner, self.again, self.out = reentrant, nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def half(self, inputs):
        return torch.tanh(self.again(torch.tanh(self.inner(torch.tanh(self.again(inputs))))))

    def forward(self, inputs):
        if self.reentrant is None:
            return self.out(self.half(inputs))
        return self.out(checkpoint(self.half, inputs.requires_grad_(), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_activations_that_are_computed_again(mode, whole, reentrant, monkeypatch):
    sums = []
    for how in (reentrant, None):
        run = Run(monkeypatch, model=Checkpointed(None if whole else how), mode=mode, epochs=1)
        if whole and how is not None:
            run.module = partial(checkpoint, run.module, use_reentrant=how)
        for inputs, targets in run.loader:
            run.step((inputs.requires_grad_(), targets))
        sums.append(torch.stack(run.sums))
    assert torch.allclose(*sums, atol=1e-5)


@pytest.mark.parametrize("where", ["layer", "function"])
def test_overwriting_a_layers_output_is_refused_with_the_remedy(where, monkeypatch):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.relu = nn.Linear(6, 5), nn.Linear(5, 3), nn.ReLU(inplace=True)

        def forward(self, inputs):
            hidden = self.first(inputs)
            return self.last(self.relu(hidden) if where == "layer" else hidden.relu_())

    run = Run(monkeypatch, model=InPlace())
    if where == "layer":  # which is switched, with the same numbers
        run.train()
        assert run.released == 3
    else:
        with pytest.raises(RuntimeError, match=r"use nn\.ReLU\(inplace=False\)"):
            run.train()


def test_physical_batches_are_counted_as_in_opacus(monkeypatch):
    """60 examples in batches of 12, at most 5 at once: ⌈5 · 12 / 5⌉ by its length; schedulers step where the model moves."""
    run = Run(monkeypatch, size=60, batch=12)
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer) as batches:
        assert len(batches) == 12
        moved = [not run.optimizer._is_last_step_skipped for batch in batches if run.step(batch) is None]
    assert moved == [False, False, True] * 5


def test_the_same_batch_after_running_out_of_memory(monkeypatch):
    """In the same turn of the loop it is refused with the remedy; with the loader's next batch, which is the same, it works."""
    straight = Run(monkeypatch, model=network())
    straight.train()
    run = Run(monkeypatch, model=network())
    batch = next(iter(run.loader))
    failing = run.model[1].register_full_backward_hook(out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        run.step(batch)
    failing.remove()
    with pytest.raises(RuntimeError, match="loader again,"):
        run.step(batch)
    run.train()
    assert torch.equal(torch.stack(run.sums), torch.stack(straight.sums))


def out_of_memory(*_):
    raise torch.OutOfMemoryError


@pytest.mark.filterwarnings("ignore:NO NOISE")
@pytest.mark.parametrize(
    ("accumulation", "clip_norm", "mode"),
    [(1, 100.0, "hooks"), (2, 100.0, "hooks"), (1, 1e20, "hooks"), (1, 1e8, "ghost")],
)
def test_without_noise_the_batches_are_those_of_plain_sgd(accumulation, clip_norm, mode, monkeypatch):
    """No noise, a clip norm that cuts nothing, the loader's own batches in its order: the model of the loop without privacy."""
    data = examples(20, scale=1.0)
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for _ in range(2):
        for number, (inputs, targets) in enumerate(DataLoader(data, batch_size=5)):
            (functional.cross_entropy(plain(inputs), targets) / accumulation).backward()
            if (number + 1) % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
    run = Run(
        monkeypatch, data=data, model=network(), batch=5, rate=0.05, noise_multiplier=0.0, clip_norm=clip_norm,
        accumulation=accumulation, mode=mode,
    )  # fmt: skip
    assert list(run.loader.batch_sampler.rows(0))[:5] == [0, 1, 2, 3, 4]
    for _ in range(2):
        run.train()
    assert torch.allclose(flatten(run.model), flatten(plain), atol=1e-6)
    assert run.engine.get_epsilon(1e-5) == float("inf")


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.wide, self.out = nn.Embedding(9, 8), nn.Linear(8, 20), nn.Linear(20, 3)

    def forward(self, tokens):
        return self.out(torch.tanh(self.wide(self.embedding(tokens))).mean(1))


@pytest.mark.parametrize(("mode", "words"), [*((mode, False) for mode in MODES), ("hooks", True), ("ghost", True)])
def test_copies_of_an_example_are_averaged_before_they_are_clipped(mode, words, monkeypatch):
    """Augmentation multiplicity: min(1, ζ/‖ḡ‖)·ḡ for the mean ḡ over an example's copies, by a plain loop."""
    generator = torch.Generator().manual_seed(1)
    shape = (8, 3, 5) if words else (8, 3, 6)
    inputs = torch.randint(0, 9, shape, generator=generator) if words else torch.randn(shape, generator=generator)
    targets = torch.arange(8) % 3
    data = [[(copy, target) for copy in copies] for copies, target in zip(inputs, targets, strict=True)]
    make = Words if words else network
    run = Run(
        monkeypatch, data=data, model=make(), batch=4, epochs=1, mode=mode, clip_norm=0.3, rate=0.0,
        augmentation_multiplicity=3,
    )  # fmt: skip

    run.train()
    model = make()
    for t, total in enumerate(run.sums):
        expected = torch.zeros_like(total)
        for i in run.loader.batch_sampler.rows(t):
            model.zero_grad()
            functional.cross_entropy(model(inputs[i]), targets[i].repeat(3)).backward()  # the mean over the copies
            gradient = torch.cat([p.grad.reshape(-1).double() for p in model.parameters()])
            expected += gradient * min(1.0, 0.3 / float(gradient.norm()))
        assert float((total - expected).norm()) < 1e-3 * float(expected.norm())


def test_copies_are_checked(monkeypatch):
    run = Run(monkeypatch, model=network(), augmentation_multiplicity=3)
    inputs, targets = next(iter(run.loader))
    with pytest.raises(RuntimeError, match="of augmentation_multiplicity=3"):
        run.step([inputs[:4], targets[:4]])


def test_copies_of_one_example_may_act_on_each_other_but_not_on_other_examples(monkeypatch):
    class Within(nn.Module):
        """Takes the mean over two rows that follow one another, the first of them at `start`."""

        def __init__(self, start):
            super().__init__()
            self.start, self.out = start, nn.Linear(6, 3)

        def forward(self, inputs):
            turned = inputs.roll(self.start, 0)
            centred = turned - turned.view(-1, 2, 6).mean(1).repeat_interleave(2, 0)
            return self.out(centred.roll(-self.start, 0))

    for start in (0, 1):
        run = Run(monkeypatch, model=Within(start), augmentation_multiplicity=2)
        inputs, targets = next(iter(run.loader))
        batch = [inputs + (torch.arange(len(inputs)) % 2)[:, None], targets]
        if start:
            with pytest.raises(RuntimeError, match="examples influence"):
                run.step(batch)
        else:
            run.step(batch)
            assert run.released == 1
