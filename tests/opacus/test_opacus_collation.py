"""Padding to the longest of a batch, and mixing, are refused where the model lets them act; masks and fixed lengths are not."""

import pytest
import torch
from central_runs import Run, examples, private
from opacus.layers import DPLSTM
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

from fedcgd.noise.keys import NoiseKey
from fedcgd.opacus import CorrelatedPrivacyEngine, CrossExampleLeakError, check_independence

PAD = "padding to the longest of the batch"


class Texts(Dataset):
    """Texts of 3 to 12 words of twenty."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(int(i))
        return torch.randint(1, 20, (3 + (i * 7) % 10,), generator=generator), i % 3


def padded(examples):
    return pad_sequence([text for text, _ in examples], batch_first=True), torch.tensor(
        [label for _, label in examples]
    )


def with_mask(examples):
    tokens, labels = padded(examples)
    return {"tokens": tokens, "mask": tokens != 0, "labels": labels}


def with_lengths(examples):
    examples = sorted(examples, key=lambda example: -len(example[0]))
    return (*padded(examples)[:1], torch.tensor([len(text) for text, _ in examples]), padded(examples)[1])


def to_a_fixed_length(examples):
    tokens, labels = padded(examples)
    return nn.functional.pad(tokens, (0, 12 - tokens.shape[1])), labels


def mixed_up(examples):
    tokens, labels = to_a_fixed_length(examples)
    return tokens[torch.randperm(len(tokens))].maximum(tokens), labels


class Reader(nn.Module):
    """Embeds words, reads them in one of several ways, and tells the class."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.embedding, self.recurrent, self.out = nn.Embedding(20, 6), DPLSTM(6, 6, batch_first=True), nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.3)

    def forward(self, tokens, extra=None, scale=1):
        x = scale * self.dropout(self.embedding(tokens))
        match self.how:
            case "mean":
                x = x.mean(1)
            case "last state":
                x = self.recurrent(x)[0][:, -1]
            case "masked":
                x = (x * extra[..., None]).sum(1) / extra.sum(1, keepdim=True)
            case "packed":
                states, _ = self.recurrent(pack_padded_sequence(x, extra, batch_first=True))
                x = pad_packed_sequence(states, batch_first=True)[0].sum(1)
        if self.how in ("mean", "masked"):  # the other one's weights are used in any case
            x = x + 0 * self.recurrent(x[:, None])[0][:, 0]
        return self.out(x)


def reader(how, collate, mode="hooks", workers=0, **options):
    torch.manual_seed(0)
    loader = DataLoader(Texts(), batch_size=8, collate_fn=collate, num_workers=workers)
    return private(Reader(how), loader, grad_sample_mode=mode, **options)


def train(module, optimizer, loader, criterion=nn.functional.cross_entropy):
    for batch in loader:
        if isinstance(batch, dict):
            targets = batch.pop("labels")
            outputs = module(batch["tokens"], batch["mask"].float(), torch.tensor(0.5))  # which is of no example
        else:
            *inputs, targets = batch
            outputs = module(*inputs)
        criterion(outputs, targets).backward()
        optimizer.step()


LEAKS = [("mean", padded), ("last state", padded), ("mean", mixed_up)]
HONEST = [("mean", to_a_fixed_length), ("masked", with_mask), ("packed", with_lengths)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("how", "collate"), LEAKS)
def test_one_long_text_that_changes_all_rows_is_refused(how, collate, workers):
    with pytest.raises(CrossExampleLeakError, match=PAD):
        train(*reader(how, collate, workers=workers))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize(("how", "collate"), HONEST)
def test_texts_whose_padding_does_not_count_are_trained(how, collate, mode):
    module, optimizer, *_, loader = reader(how, collate, mode)
    train(module, optimizer, loader)
    assert loader.batch_sampler.rounds.releases.count == 3


class Centred(nn.Linear):
    """Takes the mean of the batch away, where it is above `least`."""

    least = -1e9

    def forward(self, inputs):
        mean = inputs.mean(0)
        return super().forward(inputs - torch.where(mean > self.least, mean, 0))


def test_physical_batches_are_looked_at(monkeypatch):
    run = Run(monkeypatch, model=Centred(6, 3))
    with (
        pytest.raises(CrossExampleLeakError, match="examples influence"),
        BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=3, optimizer=run.optimizer) as batches,
    ):
        run.step(next(iter(batches)))


def test_later_batches_are_looked_at_too(monkeypatch):
    """The tenth is the first in which examples meet."""
    data, model = examples(40, scale=1.0), Centred(6, 3)
    data.tensors[0][Run(monkeypatch, data=data, epochs=1).loader.batch_sampler.rows(9)] += 2e3
    model.least = 1e3
    run = Run(monkeypatch, data=data, epochs=1, model=model)
    with pytest.raises(CrossExampleLeakError):
        run.train()
    assert run.released == 9


def test_a_program_that_makes_its_inputs_of_the_batch_is_refused_and_its_author_can_answer(tmp_path):
    """The loop itself makes the mask, so that nobody knows how to call the model for another batch."""

    def loop(module, optimizer, loader):
        for tokens, targets in loader:
            nn.functional.cross_entropy(module(tokens, (tokens != 0).float()), targets).backward()
            optimizer.step()

    with pytest.raises(CrossExampleLeakError, match="assume_independent"):
        loop(*reader("masked", padded))
    engine = CorrelatedPrivacyEngine(NoiseKey.simulation(0))
    module, optimizer, loader = reader("masked", padded, engine=engine, assume_independent="masked in the loop")
    with pytest.warns(UserWarning, match="assumed to"):
        loop(module, optimizer, loader)
    assert engine.accountant.released == 3
    engine.save_checkpoint(path=tmp_path / "c", module=module, optimizer=optimizer)
    other = CorrelatedPrivacyEngine(NoiseKey.simulation(0))
    module, optimizer, _ = reader("masked", padded, engine=other)
    other.load_checkpoint(path=tmp_path / "c", module=module, optimizer=optimizer)
    assert other.accountant.assumed_independent == "masked in the loop"


def test_the_public_function_takes_examples_and_a_collate_fn():
    examples = [Texts()[i] for i in range(24)]
    torch.manual_seed(0)
    for how, collate in LEAKS:
        with pytest.raises(CrossExampleLeakError, match=PAD):
            check_independence(Reader(how), examples, collate)
    for how, collate in HONEST:
        call = (lambda module, batch: module(batch["tokens"], batch["mask"].float())) if collate is with_mask else None
        check_independence(Reader(how), examples, collate, **({"call": call} if call else {}))
