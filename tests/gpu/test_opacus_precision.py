"""Gradients of low precision are clipped as others are: TF32 and bfloat16 round what they are, in another way each time, not ε.

Whoever measures one tensor and adds another (two products of the same matrices, say) exceeds the clip norm here.
"""

import pytest
import torch
from central_runs import Run
from gpu_runs import Reader
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset

from fedcgd.clipping.flat_models import flatten
from fedcgd.clipping.per_sample_gradients import clipped_gradient_sum, example_loss
from fedcgd.noise.quantisation import Lattice
from fedcgd_simulations.models.small_cnn import tanh_cnn

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:In CPU autocast")

ops = torch.ops.aten
PRODUCTS = {
    ops.mm.default, ops.addmm.default, ops.bmm.default, ops.mv.default, ops.dot.default, ops.convolution.default,
    ops.convolution_backward.default,
}  # fmt: skip
BITS = 13  # that float32 has and TF32 has not


class TensorCores(TorchDispatchMode):
    """Products of float32 tensors have operands of 10 bits, all of them larger or all smaller than they were, by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            self.products += 1
            more = int(torch.randint(2, ())) * (2**BITS - 1)
            args = tree_map(lambda x: self._rounded(x, more), args)
        return func(*args, **(kwargs or {}))

    def _rounded(self, x, more: int):
        if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.numel() < 2:
            return x
        return ((x.detach().contiguous().view(torch.int32) + more) >> BITS << BITS).view(torch.float32)


def one_example_a_batch(model: nn.Module, mode: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    if isinstance(model, Reader):
        data = TensorDataset(torch.randint(0, 20, (5, 5)), torch.randint(0, 3, (5,)))
    else:
        data = TensorDataset(30 * torch.randn(5, 3, 6), torch.randint(0, 3, (5,)))
    return Run(monkeypatch, data=data, batch=1, epochs=1, clip_norm=0.01, model=model, mode=mode)


def sequences() -> nn.Module:
    """Linear layers on sequences: ghost clipping keeps factors of the first, the product of the second, with few outputs."""
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3), nn.Flatten(), nn.Linear(9, 3))


@pytest.mark.parametrize("make", [Reader, sequences])
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("low", [TensorCores, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["tf32", "autocast"])
def test_no_example_exceeds_the_clip_norm(low, mode: str, make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around whole steps, which takes in what the engine computes."""
    torch.manual_seed(0)
    run = one_example_a_batch(make(), mode, monkeypatch)
    with low() as cores:
        run.train()
    assert low is not TensorCores or cores.products > 20
    assert len(run.sums) == 5
    for norm in run.norms():
        assert 0.0099 < norm <= 0.01


def test_a_users_gradient_does_not_exceed_the_clip_norm_with_tf32() -> None:
    torch.manual_seed(0)
    model, grid = tanh_cnn(), Lattice(2.0**-30)
    loss = example_loss(model, lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="none"))
    with torch.no_grad():
        flat = flatten(model)
    for seed in range(3):
        example = torch.randn(1, 1, 28, 28), torch.tensor([seed])
        with TensorCores() as cores:
            total, _ = clipped_gradient_sum(loss, flat, example, clip_norm=0.01, grid=grid)
        assert cores.products >= 4
        assert 0.0099 < float(total.double().norm()) * grid.step <= 0.01


def test_a_grad_scaler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    scaler = torch.amp.GradScaler("cpu")
    batch = next(iter(run.loader))
    scaler.scale(run.loss(run.module(batch[0]), batch[1])).backward()
    with pytest.raises(RuntimeError, match="bfloat16"):
        scaler.step(run.optimizer)
    assert run.released == 0
    run.train()
    assert run.released == run.steps


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU, to which torch.load brings what was saved on one"
)
def test_a_checkpoint_of_a_gpu_is_loaded_without_one(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    saved, loaded = Run(monkeypatch, epochs=2), Run(monkeypatch, epochs=2)
    saved.train()
    packages = list(torch.serialization._package_registry)
    torch.serialization.register_package(0, lambda storage: "cuda:0", lambda storage, place: None)
    try:
        saved.engine.save_checkpoint(path=tmp_path / "run.pt", module=saved.module, optimizer=saved.optimizer)
    finally:
        torch.serialization._package_registry[:] = packages
    with pytest.raises(RuntimeError, match="CUDA device"):
        torch.load(tmp_path / "run.pt")
    loaded.engine.load_checkpoint(path=tmp_path / "run.pt", module=loaded.module, optimizer=loaded.optimizer)
    for run in (saved, loaded):
        run.train()
    assert loaded.released == 2 * loaded.steps
    for p, q in zip(saved.model.parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("noise", ["replay", "buffer"])
def test_a_module_may_be_moved_after_it_was_made_private(monkeypatch: pytest.MonkeyPatch, noise: str) -> None:
    """As with Opacus: the sum, and its noise, are where the parameters are when a round begins."""
    moved, stayed = (Run(monkeypatch, noise=noise) for _ in range(2))
    releases = moved.engine.accountant.rounds.releases
    for run in (moved, stayed):
        run.train()
    releases._begin(releases.run, torch.device("meta"))  # where the parameters were before
    for run in (moved, stayed):
        run.train()
        assert run.released == 2 * run.steps
    for p, q in zip(moved.model.parameters(), stayed.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert releases._device == torch.device("cpu")
