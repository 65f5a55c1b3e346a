"""What goes wrong is said in words of the program, before anything is changed, and not by whichever line breaks first."""

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from central_runs import Run, examples, private
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader

from fedcgd.opacus.rounds import Epoch
from fedcgd.opacus.validation import epoch_of

MODES = ["hooks", "functorch", "ghost"]


@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_second_backward_pass(mode, penalty, monkeypatch):
    run = Run(monkeypatch, model=nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), mode=mode)
    inputs, targets = next(iter(run.loader))
    loss = functional.cross_entropy(run.module(inputs.requires_grad_()), targets)
    if penalty:
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        loss = loss + slope.square().sum()
    else:
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, inputs):
        return self.first(inputs), self.second(inputs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cured", [False, True])
def test_a_head_that_the_loss_leaves_out(cured, mode, monkeypatch):
    run = Run(monkeypatch, model=Heads(), mode=mode, epochs=1)

    def step(batch):
        first, second = run.module(batch[0])
        (run.loss(first, batch[1]) + (0 * second.sum() if cured else 0)).backward()
        run.optimizer.step()

    if cured:
        run.train(step)
        assert run.released == 3
    else:
        with pytest.raises(RuntimeError, match="weight' gives,"):
            run.train(step)


def test_accelerate_before_the_engine():
    accelerator, model = Accelerator(cpu=True), nn.Linear(6, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="make_private first,"):
        private(model, DataLoader(examples(8), batch_size=4), optimizer=optimizer)


@pytest.mark.parametrize("spread", ["replicated", "inside another", "sharded"])
def test_a_model_of_several_processes_whose_sums_nobody_would_add_up(spread, tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "meeting"), 1), rank=0, world_size=1)
    try:
        model = {
            "replicated": nn.DataParallel,
            "inside another": lambda layer: nn.Sequential(DifferentiallyPrivateDistributedDataParallel(layer)),
            "sharded": lambda layer: fully_shard(layer, mesh=init_device_mesh("cpu", (1,))),
        }[spread](nn.Linear(6, 3))
        with pytest.raises(TypeError, match="is not supported there"):
            private(model, DataLoader(examples(8), batch_size=4))
    finally:
        dist.destroy_process_group()


def test_parts_of_a_batch_that_ranks_cannot_share():
    loader = DataLoader(examples(12), batch_size=2)
    with pytest.raises(ValueError, match="a multiple of the 2 processes"):
        epoch_of(loader, accumulation_steps=3, ranks=2)
    assert epoch_of(loader, accumulation_steps=2, ranks=2) == Epoch(examples=12, steps=3, parts=2)
    assert epoch_of(loader, accumulation_steps=1, ranks=4) == Epoch(examples=12, steps=6, parts=4)


@pytest.mark.parametrize("name", ["lambda-cgd", "band-inv-mf"])
def test_a_mechanism_without_its_number(name):
    model = nn.Linear(6, 3)
    with pytest.raises(
        ValueError, match=rf"make_private_with_epsilon\(mechanism='{name}', target_epsilon=…\) chooses it"
    ):
        private(model, DataLoader(examples(8), batch_size=4), mechanism=name)


def test_an_average_of_the_private_module(monkeypatch):
    """torch's copy of the module is no part of the run: it may be called, and averages what is released."""
    run = Run(monkeypatch)
    average = torch.optim.swa_utils.AveragedModel(run.module)
    run.train(then=lambda: average.update_parameters(run.module))
    average(run.data.tensors[0]).sum().backward()
    assert run.released == 3
    assert not any(hasattr(p, "grad_sample") and p.grad_sample is not None for p in run.model.parameters())
