"""Programs that Opacus users have: each works as it did, or gets an error that says what to do."""

import pytest
import torch
from central_runs import MODES, Run, network
from opacus.layers import DPLSTM
from oracles_gradients import clipped_sum
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from fedcgd.clipping.flat_models import flatten
from fedcgd.opacus.clipped_sum import FactoredGradients, SparseGradients


def trained(monkeypatch, epochs=2, **options):
    run = Run(monkeypatch, model=network(), rate=0.05, **options)
    for _ in range(epochs):
        run.train()
    return run


@pytest.mark.parametrize("mode", MODES)
def test_a_learning_rate_scheduler_on_either_optimizer(mode, monkeypatch):
    weights = []
    for which in ("optimizer", "base"):
        run = Run(monkeypatch, model=network(), rate=1.0, mode=mode)
        scheduler = torch.optim.lr_scheduler.StepLR(getattr(run, which), step_size=3, gamma=0.5)
        for _ in range(2):
            run.train(then=scheduler.step)
        assert run.optimizer.param_groups[0]["lr"] == 0.25
        weights.append(flatten(run.model))
    assert torch.equal(*weights)


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_between_and_inside_epochs(mode, monkeypatch):
    def evaluate():
        run.module.eval()
        with torch.no_grad():
            for inputs, targets in DataLoader(run.data, batch_size=5):
                functional.cross_entropy(run.module(inputs), targets)
        run.module.train()

    run = Run(monkeypatch, model=network(), rate=0.05, mode=mode)
    for _ in range(2):
        run.train(then=evaluate)
    assert torch.equal(flatten(run.model), flatten(trained(monkeypatch, mode=mode).model))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_optimizers_with_state_and_their_checkpoint(optimizer, tmp_path, monkeypatch):
    """The state of the wrapped optimizer is saved and loaded; the gradients it sees are finite and of the model's type."""
    straight, resumed = (Run(monkeypatch, model=network(), optimizer=optimizer) for _ in range(2))
    straight.train()
    straight.engine.save_checkpoint(path=tmp_path / "c", module=straight.module, optimizer=straight.optimizer)
    straight.train()
    resumed.engine.load_checkpoint(path=tmp_path / "c", module=resumed.module, optimizer=resumed.optimizer)
    resumed.train()
    assert torch.equal(flatten(straight.model), flatten(resumed.model))


class Words(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(int(i))
        return {"tokens": torch.randint(0, 20, (7,), generator=generator), "label": torch.tensor(i % 3)}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lstm = DPLSTM(6, 5, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, tokens):
        return self.out(self.lstm(self.embedding(tokens))[0][:, -1])


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.mix = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 3)

    def forward(self, tokens):
        x = self.embedding(tokens)
        weights = torch.softmax(x @ self.mix(x).mT, dim=-1)
        return self.out(self.norm(weights @ x).mean(1))


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.convolution = nn.Conv1d(6, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, tokens):
        return self.out(torch.relu(self.norm(self.convolution(self.embedding(tokens).mT))).mean(-1))


class Wide(nn.Module):
    """A layer that is larger than what it sees of an example, so that ghost clipping takes its norms from Gram matrices."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 20)
        self.mix = nn.Linear(20, 20)
        self.out = nn.Linear(20, 3)

    def forward(self, tokens):
        return self.out(torch.tanh(self.mix(self.embedding(tokens))).mean(1))


@pytest.mark.parametrize("make", [Recurrent, Attentive, Convolutional, Wide])
def test_models_of_words_with_batches_that_are_dictionaries(make, monkeypatch):
    """Each sum is that of a plain loop over the examples."""
    sums = {}
    for mode in ("hooks", "ghost"):
        torch.manual_seed(6)
        run = Run(monkeypatch, data=Words(), batch=4, epochs=1, model=make(), mode=mode, clip_norm=0.05, rate=0.0)
        for batch in run.loader:
            run.loss(run.module(batch["tokens"]), batch["label"]).backward()
            run.optimizer.step()
        sums[mode] = run.sums
    torch.manual_seed(6)
    model = make()
    for t, total in enumerate(sums["hooks"]):
        batch = [Words()[i] for i in run.loader.batch_sampler.rows(t)]
        expected = clipped_sum(model, [(one["tokens"], one["label"]) for one in batch], 0.05)
        assert float((total - expected).norm()) < 1e-4 * float(expected.norm())
        assert float((sums["ghost"][t] - expected).norm()) < 1e-3 * float(expected.norm())


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_the_gradient_of_a_table_is_kept_as_the_rows_looked_up(monkeypatch, mode, wrap):
    run = Run(monkeypatch, data=Words(), batch=4, epochs=1, model=Wide(), mode=mode, clip_norm=0.05, wrap_model=wrap)
    batch = next(iter(run.loader))
    run.loss((run.module if wrap else run.model)(batch["tokens"]), batch["label"]).backward()
    kept = run.model.embedding.weight.grad_sample
    looked_up = {(i, int(token)) for i, tokens in enumerate(batch["tokens"]) for token in tokens}
    assert isinstance(kept, SparseGradients)
    assert len(kept.values) == len(looked_up)
    assert set(zip(kept.example.tolist(), kept.index.tolist(), strict=True)) == looked_up
    assert isinstance(run.model.mix.weight.grad_sample, FactoredGradients if mode == "ghost" else Tensor)
    assert isinstance(run.model.out.weight.grad_sample, FactoredGradients)  # which sees one vector of each example


def test_hooks_without_a_wrapper(monkeypatch):
    for mode in ("hooks", "functorch", "ghost"):
        run = Run(monkeypatch, model=network(), rate=0.05, mode=mode, wrap_model=False)
        run.module = run.model
        for _ in range(2):
            run.train()
        assert torch.allclose(flatten(run.model), flatten(trained(monkeypatch, mode=mode).model), atol=1e-6)
