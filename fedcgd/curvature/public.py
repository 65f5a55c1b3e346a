"""Public examples without labels: random labels for them, and a model that has learned those."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedcgd.curvature.hessian import Hessian, Loss, clip_factors


@dataclass(frozen=True, eq=False)
class Public:
    """What a spectrum is measured with: a model, its loss, and public examples, of which none may be private.

    Args:
        module: the model.
        loss: (outputs, targets) → one number per example, or their mean.
        inputs: the examples, one row each.
        classes: how many there are, where there are no targets: the labels are then random.
        targets: one row for each of `inputs`.

    Raises:
        ValueError: unless there are examples and either classes (at least 2) or a target for each.
    """

    module: nn.Module
    loss: Loss
    inputs: Tensor
    classes: int | None = None
    targets: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.classes is None) == (self.targets is None):
            raise ValueError("say either how many classes there are, for random labels, or what the targets are")
        if not len(self.inputs):
            raise ValueError("there are no public examples")
        if self.classes is not None and self.classes < 2:
            raise ValueError(f"there must be at least 2 classes, got {self.classes}")
        if self.targets is not None and len(self.targets) != len(self.inputs):
            raise ValueError(f"there must be a target for each of {len(self.inputs)} examples, got {len(self.targets)}")

    def labels(self, seed: int) -> Tensor:
        """The targets; random labels where there are none.

        Args:
            seed: what random labels depend on, and nothing else.

        Returns:
            One row for each example.
        """
        if self.targets is not None:
            return self.targets
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.classes or 0, (len(self.inputs),), generator=generator)

    def hessian(self, *, clip_norm: float | None = None, seed: int = 0, chunk: int = 500) -> Hessian:
        """The Hessian of the mean loss over all examples, at the module's parameters.

        Args:
            clip_norm: ζ, with which each example counts with its `clip_factors`, as in training with clipped gradients.
            seed: of random labels.
            chunk: examples that go through at once.
        """
        labels, weights = self.labels(seed), None
        if clip_norm is not None:
            weights = clip_factors(self.module, self.loss, self.inputs, labels, clip_norm=clip_norm)
        return Hessian(self.module, self.loss, self.inputs, labels, weights=weights, chunk=chunk)


def pretrained(
    public: Public,
    *,
    epochs: int = 20,
    learning_rate: float = 0.1,
    batch: int = 50,
    seed: int = 0,
    report: Callable[[str], None] | None = None,
) -> Public:
    """`public` with a copy of its module that was trained on its labels, by plain SGD without any noise.

    Labels without meaning teach a model to be unsure, and where a model is unsure its loss is most curved, so that the Hessian
    there bounds those of a later training. Costs no privacy, since nothing private is looked at; do not give it private examples.

    Section 5.1 of Gu et al., "Correlating Cross-Iteration Noise for DP-SGD using Model Curvature", 2026, arXiv:2510.05416.

    Args:
        public: the model as it is at first, and the examples.
        epochs: passes over the examples.
        learning_rate: of SGD.
        batch: examples in a step.
        seed: of random labels, and of the order.
        report: is called with a line of text after each epoch.

    Raises:
        ValueError: for numbers out of range, and if the loss is no longer finite.
    """
    if epochs < 0 or batch < 1 or not learning_rate > 0:
        raise ValueError(
            f"epochs must be at least 0, batch at least 1 and learning_rate positive, got {epochs}, {batch}, {learning_rate}"
        )
    module = copy.deepcopy(public.module).train()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("the module has no trained parameters (requires_grad)")
    device = parameters[0].device
    inputs, labels = public.inputs.to(device), public.labels(seed).to(device)
    optimizer = torch.optim.SGD(parameters, lr=learning_rate)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        total = 0.0
        order = torch.randperm(len(inputs), generator=generator).to(device)
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            optimizer.zero_grad()
            loss = public.loss(module(inputs[rows]), labels[rows]).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(loss.detach()) * len(rows)
        if not total < float("inf"):
            raise ValueError(
                f"the loss on public examples is {total} in epoch {epoch + 1}; lower the learning rate {learning_rate}"
            )
        if report is not None:
            report(f"random labels: epoch {epoch + 1} of {epochs}, loss {total / len(inputs):.4f}")
    return replace(public, module=module.train(public.module.training))
