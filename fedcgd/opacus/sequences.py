"""The loss of a language model as a mean of one loss a sequence, so that no sequence's length acts on the others' gradients."""

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
