"""An LSTM for sentences, out of Opacus' per-example LSTM."""

import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn


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
