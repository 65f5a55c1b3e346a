"""Losses that are a mean of one loss an example, next to loops over the tokens."""

import pytest
import torch

from fedcgd.opacus.losses import GhostLoss, sequence_loss

SKIP = -100


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> list[float]:
    """−log p of each token that counts."""
    logs = logits.log_softmax(-1)
    return [-float(row[int(token)]) for row, token in zip(logs, targets, strict=True) if token != SKIP]


def test_each_sequence_counts_alike_however_many_tokens_it_has() -> None:
    """Three tokens, one, and none, of which each is told by what stands before it."""
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 1, 2, 3], [0, SKIP, SKIP, 4], [1, SKIP, SKIP, SKIP]])
    by_sequence = [token_losses(one[:-1], own[1:]) for one, own in zip(logits, labels, strict=True)]
    expected = sum(sum(one) / max(len(one), 1) for one in by_sequence) / 3
    assert float(sequence_loss(logits, labels)) == pytest.approx(expected, rel=1e-5)
    assert sequence_loss(logits[:0], labels[:0]) == 0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_criterion_of_tokens_is_one_of_sequences_under_ghost_clipping(reduction: str) -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2], [3, SKIP, SKIP]])
    by_sequence = [token_losses(one, own) for one, own in zip(logits, targets, strict=True)]
    found = GhostLoss(torch.nn.CrossEntropyLoss(reduction=reduction), reduction)(
        logits.reshape(6, 5), targets.reshape(6), shape=logits.shape
    )
    means = [sum(one) / len(one) for one in by_sequence]
    expected = sum(map(sum, by_sequence)) if reduction == "sum" else sum(means) / 2
    assert float(found) == pytest.approx(expected, rel=1e-5)
