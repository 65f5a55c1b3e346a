"""A model that cuts its batch to the longest row acts on all rows by it, unless what is cut off does not count."""

import pytest
import torch
from central_runs import Run
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import nn
from torch.utils.data import TensorDataset

from fedcgd.opacus import CrossExampleLeakError, check_independence

LONGEST, ROWS = 30, 24


def texts(seed, *, longest=LONGEST, rows=ROWS, left=False):
    """Tokens from 1 to 19, with zeros where a text has ended, or before it begins; shape (rows, LONGEST)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 20, (rows, LONGEST), generator=generator)
    lengths = torch.randint(1, longest + 1, (rows, 1), generator=generator)
    tokens = tokens * (torch.arange(LONGEST) < lengths)
    return tokens.flip(1) if left else tokens


class Trimmed(nn.Module):
    """Reads a batch as far as its longest row goes, in one of several ways."""

    def __init__(self, way, dropout=0.0, left=False):
        super().__init__()
        self.way, self.left = way, left
        torch.manual_seed(0)
        self.embedding, self.out = nn.Embedding(20, 8), nn.Linear(8, 3)
        if "att" in way:
            self.attention = DPMultiheadAttention(8, 1, batch_first=True)
        if way == "convolution":
            self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        if way == "largest":
            nn.init.constant_(self.embedding.weight[0], 9.0)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens):
        longest = int((tokens != 0).sum(1).max())
        tokens = tokens[:, LONGEST - longest :] if self.left else tokens[:, :longest]
        real = (tokens != 0)[..., None]
        x = self.dropout(self.embedding(tokens))
        match self.way:
            case "mean":
                x = x.mean(1)
            case "mean of all":
                x = self.out(x).mean(1)[:, None].expand(-1, 2, -1)
                return x.flatten(1)
            case "largest":
                x = x.amax(1)
            case "length":
                x = x[:, 0] / longest
            case "padding attends":
                x = self.attention(x, x, x)[0].mean(1)
            case "convolution":
                x = torch.tanh(self.convolution(x.transpose(1, 2))).mean(2)
            case "logits":
                return self.out(x + x.mean(1, keepdim=True))
            case "real tokens":
                x = (x * real).sum(1) / real.sum(1).clamp(min=1)
            case "masked attention":
                x = self.attention(x, x, x, key_padding_mask=~real[..., 0])[0]
                x = (x * real).sum(1) / real.sum(1).clamp(min=1)
            case "first":
                x = x[:, -1 if self.left else 0]
            case "logits of tokens":
                return self.out(x)
        return self.out(x)


LEAKS = ["mean", "mean of all", "largest", "length", "padding attends", "convolution", "logits"]
HONEST = ["real tokens", "masked attention", "first", "logits of tokens"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("way", LEAKS)
def test_a_cut_to_the_longest_row_that_counts_is_refused(way, dropout, seed):
    with pytest.raises(CrossExampleLeakError, match="changes the"):
        check_independence(Trimmed(way, dropout), texts(seed))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("way", HONEST)
def test_a_cut_of_what_does_not_count_is_not_refused(way, left, dropout, seed, recwarn):
    check_independence(Trimmed(way, dropout, left), texts(seed, left=left))
    assert not recwarn


class Read(nn.Module):
    """Reads words one by one, as far as the longest text goes: forwards only, or backwards too, from the padding on."""

    def __init__(self, both):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.out = nn.Embedding(20, 8), nn.Linear(16 if both else 8, 3)
        self.states = DPLSTM(8, 8, batch_first=True, bidirectional=both)

    def forward(self, tokens):
        lengths = (tokens != 0).sum(1)
        states, _ = self.states(self.embedding(tokens[:, : int(lengths.max())]))
        return self.out(states[torch.arange(len(tokens)), lengths - 1])


@pytest.mark.parametrize("both", [False, True])
def test_a_recurrent_layer_that_begins_in_the_padding_is_refused_and_one_that_ends_before_is_not(both):
    if both:
        with pytest.raises(CrossExampleLeakError, match="changes the"):
            check_independence(Read(both), texts(1))
    else:
        check_independence(Read(both), texts(1))


@pytest.mark.parametrize("way", ["mean", "real tokens"])
def test_the_longest_may_be_there_several_times(way):
    """Of 24 rows 20 are as long as can be: one that is shorter, and stands alone, tells."""
    tokens = texts(1)
    tokens[:20] = torch.randint(1, 20, (20, LONGEST))
    if way == "mean":
        with pytest.raises(CrossExampleLeakError):
            check_independence(Trimmed(way), tokens)
    else:
        check_independence(Trimmed(way), tokens)


@pytest.mark.parametrize("batch", [12, 24])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_the_engine_refuses_it_in_the_first_batch(mode, batch, monkeypatch):
    """One long text moved the sum by 3.6 clip norms in a batch of 128, by 10.3 in one of 512."""
    data = TensorDataset(texts(3), torch.arange(ROWS) % 3)
    run = Run(monkeypatch, data=data, batch=batch, model=Trimmed("mean"), mode=mode)
    with pytest.raises(CrossExampleLeakError):
        run.train()
    assert run.sums == []
