"""The gradient of each example alone, whatever the model: by vmap, or in a loop over examples."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call, grad, vmap

from fedcgd.clipping.per_sample_gradients import refuse_batch_statistics

Named = Mapping[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) of one row → its loss: one number, or several, whose sum counts."""


class ExampleGradients:
    """∇ of the loss of each example, computed so that no example can see another.

    An example is (*inputs, target), each tensor with its copies as rows, shape (copies, …). Its loss is the mean over the copies
    of `loss`(model(*inputs), target) of one copy, as a batch of one. It is the gradient of one example, mapped by
    `torch.func.vmap`; or in a loop over the examples, where vmap refuses the model (GRU; branches on an example's own values).

    The model is called with copies of its buffers and of what is trained, in a loop with fresh ones for each example, so that
    nothing in it changes; what writes to one of them, or to a frozen parameter, is refused. A buffer that was not there before a
    call is not there after it.

    Args:
        model: as it will be called; trained parameters are given with each call.
        loss: of one row.
        spread: whether `fully_shard` may spread the model's parameters over processes: then what is called is its structure as it
            is now, without parameters of its own.

    Raises:
        ValueError: for BatchNorm in training.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, spread: bool = False) -> None:
        refuse_batch_statistics(model)
        self._model, self._loss = model, loss
        self._looped = False
        self._structure = _without_parameters(model) if spread else None

    def __call__(self, trained: Named, examples: Sequence[Tensor]) -> list[Tensor]:
        """Rows of gradients, one array for each of `trained`, shape (examples, its size).

        Args:
            trained: the trained parameters, by their names.
            examples: (*inputs, targets), each of shape (examples, copies, …).

        Raises:
            ValueError: if the model writes to a parameter or a buffer.
            Exception: what model or loss raise.
        """
        if not self._looped:
            kept = self._kept()
            try:
                mapped = vmap(grad(self._mean_loss), (None, None, *[0] * len(examples)), randomness="different")
                rows = mapped(trained, kept, *examples)
                self._refuse_changed({**kept, **trained})
                return [rows[name].flatten(1).detach() for name in trained]
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                failure = error
        one_by_one = self._one_by_one(trained, examples)
        if not self._looped:
            self._looped = True
            warnings.warn(
                f"torch.func.vmap refuses the model, and its examples are computed one by one, which is slower: {failure}",
                stacklevel=2,
            )
        return one_by_one

    def _one_by_one(self, trained: Named, examples: Sequence[Tensor]) -> list[Tensor]:
        found = [value.new_empty(len(examples[0]), value.numel()) for value in trained.values()]
        for i, example in enumerate(zip(*examples, strict=True)):
            leaves = {name: value.clone().requires_grad_() for name, value in trained.items()}
            kept = {name: value.clone() for name, value in {**self._kept(), **self._frozen}.items()}
            copies = [
                self._loss_of(leaves, kept, *one) for one in zip(*(part.split(1) for part in example), strict=True)
            ]
            loss = torch.stack(copies).mean()
            gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            self._refuse_changed({**kept, **leaves})
            for rows, gradient in zip(found, gradients, strict=True):
                rows[i] = gradient.flatten()
        return found

    def _mean_loss(self, trained: Named, kept: Named, *example: Tensor) -> Tensor:
        if len(example[0]) == 1:
            return self._loss_of(trained, kept, *example)
        in_dims, copies = (None, None, *[0] * len(example)), [part.unsqueeze(1) for part in example]
        return vmap(self._loss_of, in_dims, randomness="different")(trained, kept, *copies).mean()

    def _loss_of(self, trained: Named, kept: Named, *inputs_and_target: Tensor) -> Tensor:
        *inputs, target = inputs_and_target
        values = {**self._frozen, **kept, **trained}
        placed = {place: values[name] for place, name in self._places.items()}
        tensors: list[dict[str, Any]] = [
            held for layer in self._called.modules() for held in (layer._parameters, layer._buffers)
        ]
        slots = [(held, {**held}) for held in tensors]
        try:
            # A module with two names would keep what `functional_call` puts in both: so all of its tensors are named here, once.
            return self._loss(functional_call(self._called, placed, tuple(inputs), tie_weights=False), target).sum()
        finally:  # a tensor that was not there has no name here, and would be there for the next example
            for held, before in slots:
                held.clear()
                held.update(before)

    def begin(self, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Copies of the values of `trained`, for the calls of one round; all processes over which they are spread do this."""
        self._versions: dict[str, int] = {}
        self._frozen: dict[str, Tensor] = {}
        spread = False
        for name, p in self._model.named_parameters():
            self._versions[name] = p._version
            spread |= isinstance(p, DTensor)
            if name not in trained:
                self._frozen[name] = _whole(p)
        self._called = self._model
        if spread:
            if self._structure is None:
                raise ValueError(
                    "the model is in fully_shard already: make PrivateGradient with group= before, and then shard"
                )
            for module, structure in zip(self._model.modules(), self._structure.modules(), strict=True):
                structure.training = module.training
            self._called = self._structure
        self._places = _places(self._model)  # as the model is now: another layer may have come since the round before
        return {name: _whole(p).clone() for name, p in trained.items()}

    def _kept(self) -> dict[str, Tensor]:
        """Copies of the buffers."""
        return {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    def _refuse_changed(self, copies: Named) -> None:
        changed = [name for name, value in copies.items() if value._version]
        changed += [name for name, p in self._model.named_parameters() if p._version != self._versions[name]]
        if changed:
            raise ValueError(
                f"the model writes to {changed[0]!r} in a forward pass, which would carry an example into those that follow: put "
                "the layer in eval mode, or take one that keeps nothing (GroupNorm in the place of BatchNorm, an embedding "
                "without max_norm)"
            )


def _places(model: nn.Module) -> dict[str, str]:
    """Where the model has parameters and buffers, each module once, and the name of what is there."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    names = {id(tensor): name for name, tensor in tensors}
    return {
        f"{path}.{name}" if path else name: names[id(tensor)]
        for path, module in model.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }


def _whole(value: Tensor) -> Tensor:
    """All of a tensor that may be spread over processes, which then do this together."""
    found: Tensor = value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
    return found


def as_spread(value: Tensor, like: Tensor) -> Tensor:
    """`value`, which every process has all of, spread as `like` is."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _without_parameters(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters and buffers have no values, and take no memory."""
    empty: dict[int, Tensor] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    empty |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    return copy.deepcopy(model, empty)
