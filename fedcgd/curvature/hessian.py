"""The Hessian of a model's mean loss, as products with vectors: exact over all the examples, and never written out."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp

from fedcgd.clipping.flat_models import layout, unflatten

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) → one number per example, or their mean: `nn.functional.cross_entropy` with any reduction but a sum."""


class Hessian:
    """H of 1/N·Σ weights_i·loss(module(inputs_i), targets_i) in the trained parameters of `module`, as they are now.

    In a module of float32 products are exact to about 1e-7 of the largest eigenvalue: give a module and inputs of float64 where
    smaller ones matter.

    Args:
        module: the model; it is copied, and evaluated without dropout.
        loss: (outputs, targets) → one number per example, or their mean.
        inputs: one row for each of the N examples. They should be public: what is measured here is not private, and no ε covers
            it.
        targets: one row for each example.
        weights: shape (N,); 1 if not given. With `clip_factors` this is the curvature that descent along clipped gradients meets.
        chunk: examples that go through at once, which bounds the memory; products do not depend on it but for rounding.

    Raises:
        ValueError: for examples or parameters that are not there.

    >>> line = nn.Linear(2, 1, bias=False)
    >>> squares = lambda outputs, targets: (outputs[:, 0] - targets) ** 2 / 2
    >>> hessian = Hessian(line, squares, torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.zeros(2))
    >>> hessian.product(torch.tensor([1.0, 1.0]))
    tensor([4.5000, 0.5000])
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        inputs: Tensor,
        targets: Tensor,
        *,
        weights: Tensor | None = None,
        chunk: int = 500,
    ) -> None:
        if len(inputs) != len(targets) or not len(inputs):
            raise ValueError(
                f"there must be a target for each example, got {len(inputs)} examples, {len(targets)} targets"
            )
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 example, got {chunk}")
        self._module = copy.deepcopy(module).eval()
        self._layout = layout(self._module)
        if not self._layout.size:
            raise ValueError("the module has no trained parameters (requires_grad), and so no Hessian")
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self._at = torch.cat([parameter.detach().reshape(-1) for parameter in trained])
        self._loss = loss
        if weights is not None and weights.shape != (len(inputs),):
            raise ValueError(f"there must be a weight for each of {len(inputs)} examples, got {tuple(weights.shape)}")
        device = self._at.device
        self._chunks = [
            (
                inputs[i : i + chunk].to(device),
                targets[i : i + chunk].to(device),
                None if weights is None else weights[i : i + chunk].to(self._at),
            )
            for i in range(0, len(inputs), chunk)
        ]
        self._kept: Callable[[Tensor], Tensor] | None = None
        self.examples = len(inputs)
        self.products = 0
        """How many products with a vector have been asked for."""

    @property
    def dimension(self) -> int:
        """d: the number of trained parameters."""
        return self._layout.size

    @property
    def dtype(self) -> torch.dtype:
        """That of the parameters, and of products."""
        return self._at.dtype

    @property
    def device(self) -> torch.device:
        """That of the parameters, where products are made."""
        return self._at.device

    def product(self, vector: Tensor) -> Tensor:
        """H·v.

        Args:
            vector: v, shape (dimension,).

        Returns:
            Shape (dimension,), of the module's dtype, on its device.

        Raises:
            ValueError: for another shape.
        """
        if vector.shape != (self.dimension,):
            raise ValueError(
                f"the Hessian is {self.dimension} × {self.dimension}, got a vector of shape {tuple(vector.shape)}"
            )
        self.products += 1
        vector = vector.to(self.device, self.dtype)
        if len(self._chunks) == 1:  # the derivatives at the point are kept: a product is half the work
            self._kept = self._kept or self._differentiated(*self._chunks[0])
            return self._kept(vector)
        total = torch.zeros_like(vector)
        for part in self._chunks:
            total += self._differentiated(*part)(vector)
        return total

    def matrix(self) -> Tensor:
        """H itself, symmetric to the last bit, by d products. For small models.

        Returns:
            Shape (dimension, dimension), in main memory.
        """
        columns = torch.empty(self.dimension, self.dimension, dtype=self.dtype)
        unit = torch.zeros(self.dimension, dtype=self.dtype, device=self.device)
        for j in range(self.dimension):
            unit[j] = 1
            columns[j] = self.product(unit)
            unit[j] = 0
        return (columns + columns.T) / 2

    def _differentiated(self, inputs: Tensor, targets: Tensor, weights: Tensor | None) -> Callable[[Tensor], Tensor]:
        """v → this chunk's part of H·v: the gradient of ⟨∇f, v⟩, for f its part of the mean loss."""
        share = len(inputs) / self.examples

        def part_of_mean_loss(flat: Tensor) -> Tensor:
            outputs = functional_call(self._module, unflatten(flat, self._layout), (inputs,))
            losses = self._loss(outputs, targets)
            if not losses.dim():
                if weights is None:
                    return losses * share
                ones = (slice(i, i + 1) for i in range(len(inputs)))
                losses = torch.stack([self._loss(outputs[one], targets[one]) for one in ones])
            if losses.shape != (len(inputs),):
                raise ValueError(
                    f"the loss must give one number for each of {len(inputs)} examples, or their mean, got shape "
                    f"{tuple(losses.shape)}"
                )
            return (losses if weights is None else losses * weights).mean() * share

        pull_back = vjp(grad(part_of_mean_loss), self._at)[1]
        return lambda vector: pull_back(vector)[0].detach()


def clip_factors(module: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, *, clip_norm: float) -> Tensor:
    """min(1, ζ/‖∇loss_i‖) of each example: how much of its gradient is left by clipping.

    A quadratic with these weights curves about as the sum of clipped gradients does: clipping slows steep examples down.

    Args:
        module: the model; it is copied, and evaluated without dropout.
        loss: as in `Hessian`.
        inputs: one row for each example.
        targets: one row for each example.
        clip_norm: ζ, positive.

    Returns:
        Shape (examples,).

    Raises:
        ValueError: for a clip norm that is not positive.
    """
    if not clip_norm > 0:
        raise ValueError(f"clip_norm must be positive, got {clip_norm}")
    module = copy.deepcopy(module).eval()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    factors = torch.ones(len(inputs), dtype=trained[0].dtype)
    for i in range(len(inputs)):
        example, target = inputs[i : i + 1].to(trained[0].device), targets[i : i + 1].to(trained[0].device)
        gradients = torch.autograd.grad(loss(module(example), target).sum(), trained, allow_unused=True)
        norm = torch.stack([g.norm() for g in gradients if g is not None]).norm()
        factors[i] = min(1.0, clip_norm / max(float(norm), 1e-30))
    return factors
