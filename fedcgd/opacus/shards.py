"""A model whose parameters are spread over the ranks by FSDP2 (`torch.distributed.fsdp.fully_shard`).

FSDP puts a group of parameters together for its forward and backward pass: a layer then has others, whole ones, in the place of
its shards. Each rank clips the examples of its part of the batch, and has all that their norms need. The clipped sum of a
parameter is whole only until it is added up: a rank keeps the sums, the noise and the gradients of its own shards.

Unclipped gradients are dropped where autograd makes them, and FSDP finds none to add up.
"""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Shard


class Shards:
    """The shards on this rank of the `trained` parameters of `module`, and their whole counterparts."""

    def __init__(self, module: nn.Module, trained: Sequence[nn.Parameter]) -> None:
        names = {id(p): name for name, p in module.named_parameters()}
        for layer in _spread_layers(module):
            layer.unshard()
        whole = dict(module.named_parameters())
        self.whole: list[nn.Parameter] = [whole[names[id(p)]] for p in trained]
        reshard(module)
        for p, together in zip(trained, self.whole, strict=True):
            together.__dict__ = p.__dict__  # Opacus notes things in whichever of them it finds in a layer
        self.pieces = _pieces(trained)
        """Of all trained parameters, flat, one after the other: which coordinates are here."""


def reshard(module: nn.Module) -> None:
    """Put the shards in the places of whole parameters: after a forward pass without a backward one, some are whole."""
    for layer in _spread_layers(module):
        layer.reshard()


def add_up_shard(parameter: nn.Parameter, total: Tensor) -> Tensor:
    """What the ranks' `total`, whole steps of the lattice, flat, for all of `parameter`, add up to in this rank's shard."""
    shard = _tensor_of(parameter)
    mine = DTensor.from_local(total.view(shard.shape), shard.device_mesh, [Partial()], run_check=False)
    return local(mine.redistribute(placements=shard.placements)).reshape(-1)


def set_gradient(parameter: nn.Parameter, values: Tensor) -> None:
    """Make `values`, flat, the gradient of this rank's part of `parameter`: of all of it, if it is not spread."""
    here = local(parameter)
    gradient = values.view_as(here).to(here.dtype, copy=True)
    if isinstance(parameter.data, DTensor):
        whole = parameter.data
        gradient = DTensor.from_local(
            gradient, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    parameter.grad = gradient


def local(value: Tensor) -> Tensor:
    """What of `value` is on this rank."""
    return value.to_local().detach() if isinstance(value, DTensor) else value


def layer_type(layer: nn.Module) -> type[nn.Module]:
    """The class of `layer`, which `fully_shard` may have replaced by one of its own."""
    return type(layer).__mro__[2] if isinstance(layer, FSDPModule) else type(layer)


def check_shards(module: nn.Module, ranks: int, mode: str, known: Collection[type[nn.Module]]) -> None:
    """Raise unless `module` is one model whose trained parameters are spread over all of `ranks`, by rows.

    `mode` is how the gradients of examples are made, `known` the layers whose gradients need no copy of the layer.
    """
    if mode not in ("hooks", "ghost"):
        raise ValueError(
            f"grad_sample_mode {mode!r} copies layers, and those of a model in fully_shard are spread over the processes: take "
            "'ghost', or 'hooks'"
        )
    for name, layer in module.named_modules():
        for spread in layer.parameters(recurse=False):
            if not spread.requires_grad:
                continue
            if not (
                isinstance(spread, DTensor)
                and spread.device_mesh.mesh.tolist() == list(range(ranks))
                and spread.placements == (Shard(0),)
            ):
                raise TypeError(
                    f"a trained parameter of {name!r} is not spread by its rows over all {ranks} processes: call fully_shard of "
                    "the whole model, on a mesh of one dimension, and leave no trained parameter out (ignored_params)"
                )
            if layer_type(layer) not in known:
                raise TypeError(
                    f"{name!r} is {layer_type(layer).__name__}, whose gradients of examples need a copy of the layer, which a "
                    "model in fully_shard has not: freeze it, or take DifferentiallyPrivateDistributedDataParallel"
                )


def refuse_shards(module: Any) -> None:
    """Raise TypeError for a model whose state is spread: a checkpoint of one rank has a part of it."""
    if isinstance(module, nn.Module) and _spread_layers(module):
        raise TypeError(
            "the state of a model in fully_shard is spread over the processes: save and load model and optimizer with "
            "torch.distributed.checkpoint, and the run with engine.accountant's state_dict and load_state_dict"
        )


def _spread_layers(module: nn.Module) -> list[FSDPModule]:
    return [layer for layer in module.modules() if isinstance(layer, FSDPModule)]


def _pieces(parameters: Sequence[nn.Parameter]) -> list[slice]:
    pieces, first = [], 0
    for p in parameters:
        spread = _tensor_of(p)
        rows = -(-len(spread) // spread.device_mesh.size())
        start = first + min(spread.device_mesh.get_local_rank() * rows, len(spread)) * (spread.numel() // len(spread))
        pieces.append(slice(start, start + local(spread).numel()))
        first += spread.numel()
    return pieces


def _tensor_of(parameter: nn.Parameter) -> DTensor:
    assert isinstance(parameter.data, DTensor)
    return parameter.data
