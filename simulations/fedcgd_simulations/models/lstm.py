"""An LSTM for sentences, out of Opacus' per-example LSTM."""

from collections.abc import Sequence

import torch
from opacus.grad_sample import register_grad_sampler
from opacus.layers import DPLSTM
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn


@register_grad_sampler(RNNLinear)  # type: ignore[untyped-decorator]
def per_example_gradients(
    layer: RNNLinear, activations: Sequence[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Those of a layer that is applied once a word, shape (batch, out, in): Σ over words, made at the last word in one product.

    In the place of Opacus' own, which makes a matrix for each example at each word and adds it to the last, and takes most of the
    time of a step. Until the last word (Opacus goes back to the first one) nothing is returned.
    """
    if not hasattr(layer, "words"):
        layer.words = []
    layer.words.append((activations[0].to(backprops.dtype), backprops))
    if layer.activations:
        return {}
    inputs, outputs = (torch.stack(part, dim=1) for part in zip(*layer.words, strict=True))
    del layer.words
    gradients = {layer.weight: torch.bmm(outputs.transpose(1, 2), inputs)}
    if layer.bias is not None:
        gradients[layer.bias] = outputs.sum(dim=1)
    return gradients


class SentenceLSTM(nn.Module):
    """Token ids (batch, length), 0 for padding → logits, from the mean of the LSTM's states over the real tokens."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=0)
        self.lstm = DPLSTM(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        real = (tokens != 0).unsqueeze(-1)
        mean = (states * real).sum(dim=1) / torch.clamp(real.sum(dim=1), min=1)
        logits: Tensor = self.head(mean)
        return logits


def lstm(vocabulary: int, classes: int = 2, embedding: int = 100, hidden: int = 128) -> nn.Module:
    """About 1 M weights for a vocabulary of 8192."""
    return SentenceLSTM(vocabulary, embedding, hidden, classes)
