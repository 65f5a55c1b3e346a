"""Losses that are a mean of one loss an example, so that no example acts on the gradients of others."""

from typing import Any

from torch import Tensor
from torch.nn import functional


def sequence_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """(1/B)·Σ_i (mean over the tokens of sequence i of −log p(token | those before it)), of B sequences.

    Transformers' own loss is a mean over the tokens of the *whole batch*: a longer sequence makes the gradients of the others
    smaller, before they are clipped, which ε does not cover.

    Args:
        outputs: of a causal language model: an object with `logits`, or the logits; shape (B, T, vocabulary).
        labels: the tokens, shape (B, T); −100 where there is padding, and wherever no loss is wanted. They are shifted here.
        num_items_in_batch: what Transformers' Trainer counts in all sequences; not used.

    Returns:
        A scalar, float32; a sequence without tokens counts as zero.
    """
    logits, targets = getattr(outputs, "logits", outputs)[:, :-1], labels[:, 1:]
    losses = functional.cross_entropy(logits.float().transpose(1, 2), targets, ignore_index=-100, reduction="none")
    tokens = (targets != -100).sum(1).clamp(min=1)
    return (losses.sum(1) / tokens).sum() / max(len(targets), 1)


class GhostLoss:
    """`criterion` as Opacus returns it with ghost clipping: it takes the `shape` of the logits of sequences too.

    `criterion` has a `reduction` that can be set to "none"; then it returns one loss per example, or per token with `shape`.
    """

    def __init__(self, criterion: Any, reduction: str) -> None:
        if getattr(criterion, "reduction", reduction) != reduction:
            raise ValueError(f"loss_reduction is {reduction!r}, and the criterion's is {criterion.reduction!r}")
        self.criterion, self.reduction = criterion, reduction

    def __call__(self, *args: Any, shape: Any = None, **kwargs: Any) -> Tensor:
        """The loss of the batch, whose examples are rows; with `shape` (examples, length, …) each of `length` rows."""
        self.criterion.reduction = "none"
        losses: Tensor = self.criterion(*args, **kwargs)
        self.criterion.reduction = self.reduction
        if shape is not None and len(losses) == shape[0] * shape[1]:
            losses = losses.view(shape[0], shape[1])
            if self.reduction == "sum":
                losses = losses.sum(1)
            else:
                targets = kwargs.get("target", args[1] if len(args) > 1 else None)
                ignored = getattr(self.criterion, "ignore_index", None)
                if targets is None or ignored is None:
                    losses = losses.mean(1)
                else:
                    losses = losses.sum(1) / (targets.view(losses.shape) != ignored).sum(1).clamp(min=1)
        return losses.mean() if self.reduction == "mean" else losses.sum()
