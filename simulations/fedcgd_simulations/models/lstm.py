"""An LSTM for sentences, out of Opacus' per-example LSTM."""

from collections.abc import Sequence

import torch
from opacus.grad_sample import register_grad_sampler
from opacus.layers import DPLSTM
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn


class WordLinear(RNNLinear):  # type: ignore[misc]
    """A layer that is applied once a word, all sentences of a batch having as many words, padding included.

    Opacus' own makes a matrix for each example at each word and adds it to the last, which takes most of the time of a step.
    """

    words: list[tuple[Tensor, Tensor]]
    """Inputs and back-propagated gradients of the words that a backward pass has gone through."""


@register_grad_sampler(WordLinear)  # type: ignore[untyped-decorator]
def per_example_gradients(
    layer: WordLinear, activations: Sequence[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Those of the layer, shape (batch, out, in): Σ over words, made at the last word in one product.

    Until the last word (Opacus goes back to the first one) nothing is returned.
    """
    layer.words.append((activations[0].to(backprops.dtype), backprops))
    if layer.activations:
        return {}
    inputs, outputs = (torch.stack(part, dim=1) for part in zip(*layer.words, strict=True))
    layer.words = []
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
        for layer in self._by_word(RNNLinear):
            layer.__class__ = WordLinear
        self.head = nn.Linear(hidden, classes)

    def _by_word(self, kind: type[RNNLinear]) -> list[RNNLinear]:
        return [layer for layer in self.lstm.modules() if isinstance(layer, kind)]

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self._by_word(WordLinear):
            layer.words = []  # a backward pass that broke off may have left some, of other examples
        states, _ = self.lstm(self.embedding(tokens))
        real = (tokens != 0).unsqueeze(-1)
        mean = (states * real).sum(dim=1) / torch.clamp(real.sum(dim=1), min=1)
        logits: Tensor = self.head(mean)
        return logits


def lstm(vocabulary: int, classes: int = 2, embedding: int = 100, hidden: int = 128) -> nn.Module:
    """About 1 M weights for a vocabulary of 8192."""
    return SentenceLSTM(vocabulary, embedding, hidden, classes)
