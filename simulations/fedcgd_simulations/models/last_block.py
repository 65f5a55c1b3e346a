"""MiniLM's last block and a linear layer above it, for states that the blocks below have made beforehand."""

import torch
from torch import Tensor, nn

from fedcgd_simulations.minilm import minilm_model
from fedcgd_simulations.models.softmax import softmax_regression


class LastBlock(nn.Module):
    """States (batch, length, width), all zero behind the end of a text → logits, from the unit mean of what `block` makes.

    `block` is a layer of Transformers' BERT, that takes states and an additive mask.
    """

    def __init__(self, block: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.block = block
        self.head = softmax_regression(width, classes)

    def forward(self, states: Tensor) -> Tensor:
        real = (states != 0).any(dim=2)
        mask = torch.zeros(real.shape, device=states.device).masked_fill(~real, torch.finfo(torch.float32).min)
        after = self.block(states, mask[:, None, None, :].expand(-1, 1, states.shape[1], -1))
        mean = (after * real.unsqueeze(-1)).sum(dim=1) / real.sum(dim=1, keepdim=True).clamp(min=1)
        logits: Tensor = self.head(mean)
        return logits


def minilm_last_block(classes: int) -> nn.Module:
    """The pretrained block, 1.8 M weights, all of them trained, and the linear layer at zero.

    So it starts as softmax regression on the sentence embeddings starts.
    """
    model = minilm_model()
    return LastBlock(model.encoder.layer[-1], model.config.hidden_size, classes)
