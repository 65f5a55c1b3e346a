"""The plan's numbers hold for what moves: parameters, norm, noise and model that change after make_private are refused."""

import copy

import pytest
import torch
from central_runs import MODES, Run, network, private, refused
from torch import nn
from torch.utils.data import DataLoader

CHANGES = {
    "unfrozen": lambda run: run.model[0].requires_grad_(True),
    "frozen": lambda run: run.model[2].bias.requires_grad_(False),
    "another group": lambda run: run.optimizer.add_param_group(
        {"params": [*run.model[0].requires_grad_(True).parameters()]}
    ),
    "another group of the wrapped": lambda run: run.base.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
    "another layer": lambda run: run.model.__setitem__(2, nn.Linear(5, 3)),
    "another dtype": lambda run: run.model.double().register_forward_pre_hook(lambda _, given: given[0].double()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("mode", MODES)
def test_parameters_that_change_after_make_private_are_refused(mode, change, monkeypatch):
    model = network()
    model[0].requires_grad_(False)
    run = Run(monkeypatch, model=model, mode=mode)
    run.train()
    change(run)
    with refused("parameters"):
        run.train()
    assert len(run.sums) == 3
    assert max(run.norms()) <= 4.0


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_parameter_never_moves(mode, monkeypatch):
    model = network()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    run = Run(monkeypatch, model=model, mode=mode, everything=True)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    for batch in run.loader:
        run.backward(batch)
        run.optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_norm_noise_and_cohort_cannot_be_assigned(monkeypatch):
    """As the schedulers of Opacus do."""
    run = Run(monkeypatch)
    for name, value in (("max_grad_norm", 50.0), ("noise_multiplier", 0), ("expected_batch_size", 3)):
        with pytest.raises(ValueError, match=name):
            setattr(run.optimizer, name, value)
    assert (run.optimizer.max_grad_norm, run.optimizer.noise_multiplier) == (1.0, 1.0)
    assert run.optimizer.expected_batch_size == 4


def test_a_second_model_ends_the_run_of_the_first(monkeypatch):
    """Whatever an engine releases is on its account."""
    run = Run(monkeypatch)
    private(nn.Linear(6, 3), DataLoader(run.data, batch_size=4), engine=run.engine)
    with pytest.raises(RuntimeError, match="private again"):
        run.train()
    assert run.sums == []


@pytest.mark.parametrize("what", ["loader", "accountant", "engine", "optimizer"])
def test_only_the_module_of_a_run_is_copied(what, monkeypatch):
    """Two copies of anything else would release a round twice."""
    run = Run(monkeypatch)
    part = run.engine.accountant if what == "accountant" else getattr(run, what)
    with pytest.raises(TypeError, match="copied or"):
        copy.deepcopy(part)
    assert copy.deepcopy(run.module).state_dict().keys() == run.module.state_dict().keys()
