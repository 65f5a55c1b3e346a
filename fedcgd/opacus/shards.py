"""A model whose parameters are spread over the ranks by FSDP2 (`torch.distributed.fsdp.fully_shard`).

FSDP puts a group of parameters together for its forward and backward pass: a layer then has others, whole ones, in the place of
its shards. Each rank clips the examples of its part of the batch, and has all that their norms need. The clipped sum of a
parameter is whole only until it is added up: a rank keeps the sums, the noise and the gradients of its own shards.

A parameter's sum is added up once a step and not after each part of a batch, if the clipped gradients of the parts, as they are
(factors, with ghost clipping), take no more memory than the sums of a rank's shards. They are copied until then: what was
measured is what is added.

Unclipped gradients are dropped where autograd makes them, and FSDP finds none to add up.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from fedcgd.central.ranks import Ranks
from fedcgd.opacus.clipped_sum import Clipped, copy_of, octets_of
from fedcgd.opacus.ghost import layer_type


class Shards:
    """The shards on this rank of the `trained` parameters of `module`, and their sums."""

    def __init__(self, module: nn.Module, trained: Sequence[nn.Parameter], ranks: Ranks) -> None:
        self._module, self._trained, self._ranks = module, trained, ranks
        ranks.pieces = _pieces(trained)  # of all trained parameters, flat, one after the other
        for layer in _spread_layers(module):
            layer.set_custom_all_gather(_AllGather(ranks))  # type: ignore[arg-type]

    def whole_parameters(self) -> list[nn.Parameter]:
        """What a layer has in the place of each of the trained ones during a pass. All ranks make them together."""
        names = {id(p): name for name, p in self._module.named_parameters()}
        for layer in _spread_layers(self._module):
            layer.unshard()
        named = dict(self._module.named_parameters())
        whole = [named[names[id(p)]] for p in self._trained]
        reshard(self._module)
        for p, together in zip(self._trained, whole, strict=True):
            together.__dict__ = p.__dict__  # Opacus notes things in whichever of them it finds in a layer
        return whole

    def add(
        self,
        part: list[Clipped],
        kept: list[list[Clipped]],
        totals: Sequence[Tensor],
        to_steps: Callable[[Tensor], None],
        *,
        last: bool,
    ) -> None:
        """Add the ranks' sums of `part` to `totals`, or keep it for later. All ranks do this together.

        Args:
            part: the passes of one part of a round's batch, which may be none here.
            kept: those of earlier parts that are not in `totals`.
            totals: of each trained parameter, the sum in this rank's shard, flat, float64; in whole steps.
            to_steps: what makes the sum of a part whole steps of the lattice, in place.
            last: nothing may be kept: the round has no other part.
        """
        octets = sum(octets_of(rows) for passes in (*kept, part) for one in passes for rows in one.rows)
        too_many = octets > sum(total.numel() * total.element_size() for total in totals)
        if last or any(self._ranks.all_of(too_many)):
            self._add_up([*kept, part], totals, to_steps)
            kept.clear()
        else:
            kept.append([one._replace(rows=list(map(copy_of, one.rows))) for one in part])

    def _add_up(self, parts: list[list[Clipped]], totals: Sequence[Tensor], to_steps: Callable[[Tensor], None]) -> None:
        shapes = [_numbers_of_ranks(p) for p in self._trained]
        room = totals[0].new_empty(2, max(len(numbers) * numbers[0] for numbers in shapes))
        for i, (p, numbers, total) in enumerate(zip(self._trained, shapes, totals, strict=True)):
            whole = room[0, : p.numel()]
            for n, part in enumerate(parts):
                one = room[min(n, 1), : p.numel()].zero_()
                for passes in part:
                    passes.add_to(one, i)
                to_steps(one)
                if n:
                    whole += one
            theirs = room[1, : len(numbers) * len(total)]
            with self._ranks.together("add up a parameter's sum (nothing of the round is released)"):
                dist.all_to_all_single(theirs, whole, [len(total)] * len(numbers), numbers)
            for one in theirs.view(len(numbers), len(total)):
                total += one


class _AllGather:
    """torch's, for FSDP, with an error that says what was waited for."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name until torch 2.13
        with self._ranks.together("put the parameters of a layer together (nothing of the round is released)"):
            if input_tensor.device.type == "cpu":
                return _send_to_all(output_tensor, input_tensor, group)
            return gather(output_tensor, input_tensor, group=group, async_op=async_op)


def _send_to_all(whole: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
    """An all-gather in main memory, from and to where the numbers lie: Gloo's own copies them, and takes 1.4 times as long."""
    rank, parts = dist.get_rank(group), list(whole.chunk(dist.get_world_size(group)))
    own = parts.pop(rank)
    others = [other for other in range(len(parts) + 1) if other != rank]
    sent = [dist.P2POp(dist.isend, mine, group=group, group_peer=other) for other in others]
    received = [
        dist.P2POp(dist.irecv, part, group=group, group_peer=other) for part, other in zip(parts, others, strict=True)
    ]
    for work in dist.batch_isend_irecv(sent + received) if others else []:
        work.wait()
    if own.data_ptr() != mine.data_ptr():  # FSDP has put it in its place
        own.copy_(mine)


def reshard(module: nn.Module) -> None:
    """Put the shards in the places of whole parameters: after a forward pass without a backward one, some are whole."""
    for layer in _spread_layers(module):
        layer.reshard()


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
        numbers, rank = _numbers_of_ranks(p), _tensor_of(p).device_mesh.get_local_rank()
        start = first + sum(numbers[:rank])
        pieces.append(slice(start, start + numbers[rank]))
        first += p.numel()
    return pieces


def _numbers_of_ranks(parameter: nn.Parameter) -> list[int]:
    """How many numbers of `parameter` each rank has: as many rows as the ranks before it, while there are."""
    ranks, rows = _tensor_of(parameter).device_mesh.size(), len(parameter)
    each = -(-rows // ranks)
    return [max(0, min(each, rows - rank * each)) * (parameter.numel() // rows) for rank in range(ranks)]


def _tensor_of(parameter: nn.Parameter) -> DTensor:
    assert isinstance(parameter.data, DTensor)
    return parameter.data
