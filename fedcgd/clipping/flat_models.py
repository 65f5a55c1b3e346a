"""A model's trained parameters as one flat float32 vector, and back."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a module's trainable parameters, in the module's own order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Number of entries of each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        """Number of entries of the flat vector."""
        return sum(self.sizes)


def layout(model: nn.Module) -> Layout:
    """The layout of the parameters of `model` that are trained (`requires_grad`)."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return Layout(tuple(trained), tuple(tuple(parameter.shape) for parameter in trained.values()))


def flatten(model: nn.Module) -> Tensor:
    """A copy of the trained parameters of `model` as one vector, shape (layout(model).size,), float32."""
    trained = [parameter.detach().reshape(-1).float() for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat(trained) if trained else torch.zeros(0)


def unflatten(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The named parameters of a flat vector of shape (layout.size,), as views of it. Works under `torch.func`."""
    if flat.shape != (layout.size,):
        raise ValueError(f"a flat model of this layout has shape ({layout.size},), got {tuple(flat.shape)}")
    parts = torch.split(flat, layout.sizes)
    return {name: part.reshape(shape) for name, part, shape in zip(layout.names, parts, layout.shapes, strict=True)}
