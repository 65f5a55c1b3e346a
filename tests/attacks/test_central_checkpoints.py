"""A checkpoint is data: loading it runs no code, goes on in the right round, and never goes back behind a release."""

import pickle
from pathlib import Path

import pytest
import torch
from central_runs import Run, examples, refused
from torch import nn
from torch.utils.data import DataLoader

from fedcgd.noise.keys import NoiseKey
from fedcgd.opacus import CorrelatedPrivacyEngine


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("options", [{}, {"torch_load_kwargs": {"weights_only": False}}])
@pytest.mark.parametrize("field", ["module_state_dict", "privacy_accountant_state_dict", "anything"])
def test_loading_runs_no_code(field, options, tmp_path, monkeypatch):
    run = Run(monkeypatch)
    run.engine.save_checkpoint(path=tmp_path / "good", module=run.module, optimizer=run.optimizer)
    content = torch.load(tmp_path / "good", weights_only=True)
    torch.save({**content, field: Evil(tmp_path / "executed")}, tmp_path / "evil")
    with pytest.raises(ValueError, match="plain values") as raised:
        run.engine.load_checkpoint(path=tmp_path / "evil", module=run.module, optimizer=run.optimizer, **options)
    assert isinstance(raised.value.__cause__, pickle.UnpicklingError)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("record", [True, False])
def test_a_round_is_released_once_also_by_who_goes_back(record, tmp_path, monkeypatch):
    """With a record the same sum is the same release, and another one is none; without, nothing is computed again."""
    run = Run(monkeypatch, key=NoiseKey.generate(), record=tmp_path / "run.db" if record else None)
    for number, batch in enumerate(run.loader):
        if number == 1:
            run.engine.save_checkpoint(path=tmp_path / "early", module=run.module, optimizer=run.optimizer)
        run.step(batch)
    weight, nonces = run.model.weight.clone(), run.engine.accountant.nonces
    run.engine.load_checkpoint(path=tmp_path / "early", module=run.module, optimizer=run.optimizer)
    assert len(run.engine.accountant.state_dict()["nonces"]) == 1  # a checkpoint made now goes on from there
    if record:
        run.train()
        assert torch.equal(run.model.weight, weight)
    else:
        before = run.model.weight.clone()
        with pytest.warns(UserWarning, match="round 1"):
            run.train()
        assert torch.equal(run.model.weight, before)
        assert run.engine.accountant.rounds.next == 3
    assert run.engine.accountant.nonces == nonces
    run.train()
    assert run.released == 6


def test_a_checkpoint_that_its_record_does_not_know_is_refused(tmp_path, monkeypatch):
    run = Run(monkeypatch, key=NoiseKey.generate(), record=tmp_path / "run.db")
    run.train()
    state = run.engine.accountant.state_dict()
    for nonces in ([*state["nonces"][:2], f"{0:032x}"], [*state["nonces"], f"{0:032x}"]):
        with pytest.raises(ValueError, match="older copy"):
            run.engine.accountant.load_state_dict(state | {"nonces": nonces})


@pytest.mark.filterwarnings("ignore:another run of this process")  # on purpose
@pytest.mark.parametrize(("clip_norm", "words"), [(1.0, "another run"), (2.0, "another plan")])
def test_an_engine_that_released_does_not_take_over_another_run(clip_norm, words, tmp_path, monkeypatch):
    key = NoiseKey.generate()
    other = Run(monkeypatch, key=key, clip_norm=clip_norm)
    other.train()
    other.engine.save_checkpoint(path=tmp_path / "other", module=other.module, optimizer=other.optimizer)
    run = Run(monkeypatch, key=key)
    run.step(next(iter(run.loader)))
    weight = run.model.weight.clone()
    with pytest.raises(ValueError, match=words):
        run.engine.load_checkpoint(path=tmp_path / "other", module=run.module, optimizer=run.optimizer)
    assert torch.equal(run.model.weight, weight)


@pytest.mark.filterwarnings("ignore:another run of this process")  # on purpose
def test_the_batches_after_loading_are_those_of_the_checkpoints_run(tmp_path, monkeypatch):
    """Also where the loader has drawn those of its own run before: an example in two splits takes part too often.

    Without a record nothing knows which rounds were released after the checkpoint: a warning. Nor does the run get one then.
    """
    key = NoiseKey.generate()
    run, again = Run(monkeypatch, key=key), Run(monkeypatch, key=key)
    run.step(next(iter(run.loader)))
    run.engine.save_checkpoint(path=tmp_path / "c", module=run.module, optimizer=run.optimizer)
    next(iter(again.loader))
    with pytest.warns(UserWarning, match="record="):
        again.engine.load_checkpoint(path=tmp_path / "c", module=again.module, optimizer=again.optimizer)
    inputs = [run.data[i][0] for i in run.loader.batch_sampler.rows(1)]
    assert torch.equal(next(iter(again.loader))[0], torch.stack(inputs))
    late = Run(monkeypatch, key=key, record=tmp_path / "begun.db")
    with pytest.raises(ValueError, match="another run"):
        late.engine.load_checkpoint(path=tmp_path / "c", module=late.module, optimizer=late.optimizer)


def test_a_checkpoint_whose_noise_this_version_does_not_make_is_refused(tmp_path, monkeypatch):
    """Its rounds would be replayed as other noise, and nothing would cancel."""
    run = Run(monkeypatch)
    run.engine.save_checkpoint(path=tmp_path / "good", module=run.module, optimizer=run.optimizer)
    content = torch.load(tmp_path / "good", weights_only=True)
    content["privacy_accountant_state_dict"]["noise stream"] = "aes-256-ctr"
    torch.save(content, tmp_path / "old")
    with pytest.raises(ValueError, match="aes-256-ctr"):
        run.engine.load_checkpoint(path=tmp_path / "old", module=run.module, optimizer=run.optimizer)


@pytest.mark.parametrize("digit", "0f")
def test_any_other_run_without_a_record_is_a_warning(digit, monkeypatch):
    accountant = Run(monkeypatch, key=NoiseKey.generate()).engine.accountant
    with pytest.warns(UserWarning, match="record="):
        accountant.load_state_dict(accountant.state_dict() | {"run": 32 * digit})
    assert accountant.run == 32 * digit


@pytest.mark.parametrize("other", [{"batch": 2}, {"size": 11}])
def test_a_run_goes_on_with_the_epochs_that_it_began_with(other, tmp_path, monkeypatch):
    """Else an example of a late round of one epoch may be in an early one of the next, nearer than the plan says."""
    key = NoiseKey.generate()
    run = Run(monkeypatch, key=key, epochs=4)
    run.train()
    run.engine.save_checkpoint(path=tmp_path / "saved", module=run.module, optimizer=run.optimizer)
    model = nn.Linear(6, 3)
    engine = CorrelatedPrivacyEngine(key)
    loader = DataLoader(examples(other.get("size", 12)), batch_size=other.get("batch", 4))
    module, optimizer, _ = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), data_loader=loader, plan=run.plan
    )
    with pytest.raises(ValueError, match="batch_size"):
        engine.load_checkpoint(path=tmp_path / "saved", module=module, optimizer=optimizer)
    assert engine.accountant.released == 0


def test_a_loop_that_began_before_loading_is_over(tmp_path, monkeypatch):
    """Its workers may have prepared batches of another run's split."""
    run = Run(monkeypatch)
    run.engine.save_checkpoint(path=tmp_path / "c", module=run.module, optimizer=run.optimizer)
    batches = iter(run.loader)
    run.backward(next(batches))
    run.engine.load_checkpoint(path=tmp_path / "c", module=run.module, optimizer=run.optimizer)
    with refused("no batch"):
        run.optimizer.step()
    with refused("another loop"):
        next(batches)
