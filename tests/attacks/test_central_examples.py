"""An index is one example, all run long: its turns are counted by it."""

import random

import numpy as np
import pytest
import torch
from central_runs import Run, examples
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fedcgd.noise.keys import NoiseKey
from fedcgd.opacus.example_rows import ExampleRows

KEY = NoiseKey.generate()


def going_on(monkeypatch, tmp_path, data, again):
    """A run over `data` that was saved after an epoch, and goes on over `again`."""
    run = Run(monkeypatch, data=data, key=KEY)
    run.train()
    run.engine.save_checkpoint(path=tmp_path / "c", module=run.module, optimizer=run.optimizer)
    other = Run(monkeypatch, data=again, key=KEY)
    weight = other.model.weight.clone()
    try:
        other.engine.load_checkpoint(path=tmp_path / "c", module=other.module, optimizer=other.optimizer)
    except ValueError:
        assert torch.equal(other.model.weight, weight)
        assert other.released == 0
        raise
    return other


def in_order(data, order):
    return TensorDataset(*(part[order] for part in data.tensors))


SOME = examples(12)
HALVES = [Subset(SOME, range(6)), Subset(SOME, range(6, 12))]
OTHERS = {
    "shuffled": (SOME, in_order(SOME, torch.randperm(12, generator=torch.Generator().manual_seed(1)))),
    "turned": (SOME, in_order(SOME, torch.arange(12).flip(0))),
    "shifted": (SOME, in_order(SOME, torch.arange(12).roll(1))),
    "other people": (SOME, examples(12, seed=3)),
    "two changed places": (Subset(SOME, range(12)), Subset(SOME, [*range(5), 6, 5, *range(7, 12)])),
    "halves changed places": (ConcatDataset(HALVES), ConcatDataset(HALVES[::-1])),
}


@pytest.mark.filterwarnings("ignore:nothing says whether rounds")  # there is no record
@pytest.mark.parametrize("which", OTHERS)
def test_a_run_does_not_go_on_with_its_examples_in_another_order(which, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="with its rows in the same order"):
        going_on(monkeypatch, tmp_path, *OTHERS[which])


@pytest.mark.filterwarnings("ignore:nothing says whether rounds")  # there is no record
def test_a_run_does_not_go_on_with_one_person_less(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="there are 11 examples, and there were 12"):
        going_on(monkeypatch, tmp_path, SOME, in_order(SOME, torch.arange(11)))


def test_two_indices_of_a_part_that_changed_places_are_seen_wherever_they_are():
    data = examples(400)
    record = ExampleRows(Subset(data, range(400)), b"s").record("r")
    first, second = [i for i in range(400) if str(i) not in record["rows"]][:2]
    order = list(range(400))
    order[first], order[second] = second, first
    assert "indices of its parts" in ExampleRows(Subset(data, order), b"s").moved(record, "r")
    assert not ExampleRows(Subset(data, range(400)), b"s").moved(record, "r")


class Augmented(Dataset):
    """`data` with inputs that are moved at random, by `draw()`."""

    def __init__(self, data, draw):
        self.data, self.draw, self.reads = data, draw, 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        self.reads += 1
        inputs, label = self.data[i]
        return inputs + self.draw(), label


def drawn_by(name, seed=0):
    own = np.random.default_rng(seed)
    return {
        "nothing": lambda: 0.0,
        "torch": lambda: torch.randn(6),
        "numpy": lambda: float(np.random.normal()),
        "python": random.random,
        "its own generator": lambda: float(own.normal()),
        "its own generator, in one of three": lambda: float(own.random() < 1 / 3),
    }[name]


@pytest.mark.filterwarnings("ignore:nothing says whether rounds")  # there is no record
@pytest.mark.parametrize("name", ["nothing", "torch", "numpy", "python"])
def test_what_a_known_generator_transforms_is_compared(name, tmp_path, monkeypatch, recwarn):
    data = Augmented(SOME, drawn_by(name))
    going_on(monkeypatch, tmp_path, data, Augmented(SOME, drawn_by(name))).train()
    assert not [w for w in recwarn if "compared" in str(w.message) or "label" in str(w.message)]
    turned = in_order(SOME, torch.arange(12).flip(0))
    with pytest.raises(ValueError, match="with its rows in the same order"):
        going_on(monkeypatch, tmp_path, data, Augmented(turned, drawn_by(name)))


@pytest.mark.filterwarnings("ignore:nothing says whether rounds")  # there is no record
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["its own generator", "its own generator, in one of three"])
def test_of_what_a_generator_of_its_own_transforms_the_labels_are_compared(name, seed, tmp_path, monkeypatch):
    data = Augmented(SOME, drawn_by(name, seed))
    with pytest.warns(UserWarning, match="only the rest was compared"):
        going_on(monkeypatch, tmp_path, data, Augmented(SOME, drawn_by(name, seed + 100))).train()
    turned = in_order(SOME, torch.arange(12).flip(0))
    with pytest.raises(ValueError, match="with its rows in the same order"):
        going_on(monkeypatch, tmp_path, data, Augmented(turned, drawn_by(name, seed + 100)))


def test_a_rare_transformation_is_no_other_example():
    """One read in fifty: in most processes no read of the few rows is transformed, and sometimes one is."""
    for seed in range(100):
        own = np.random.default_rng(seed)
        data = Augmented(examples(200), lambda own=own: float(own.random() < 1 / 50))
        record = ExampleRows(data, b"s").record("r")
        assert not ExampleRows(data, b"s").moved(record, "r")


@pytest.mark.filterwarnings("ignore:nothing says whether rounds")  # there is no record
def test_a_checkpoint_of_a_version_that_noted_no_examples_is_a_warning(tmp_path, monkeypatch):
    run = Run(monkeypatch, key=KEY)
    run.engine.save_checkpoint(path=tmp_path / "c", module=run.module, optimizer=run.optimizer)
    content = torch.load(tmp_path / "c", weights_only=True)
    del content["privacy_accountant_state_dict"]["examples"]
    torch.save(content, tmp_path / "old")
    again = Run(monkeypatch, key=KEY)
    with pytest.warns(UserWarning, match="noted no examples"):
        again.engine.load_checkpoint(path=tmp_path / "old", module=again.module, optimizer=again.optimizer)


class Shifted(Dataset):
    """Index i is another example in each epoch."""

    epoch = 0

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[(i + self.epoch) % len(self.data)]


@pytest.mark.parametrize("sampler", [False, True], ids=["loader", "its sampler"])
def test_a_data_set_that_moves_its_indices_from_epoch_to_epoch_is_refused(sampler, monkeypatch):
    run = Run(monkeypatch, data=Shifted(SOME))
    run.train()
    run.data.epoch = 1
    with pytest.raises(RuntimeError, match="Index i must be the same example all run long"):
        next(iter(run.loader.batch_sampler if sampler else run.loader))
    assert run.released == 3
    run.data.epoch = 0
    run.train()
    assert run.released == 6


class Mixed(Dataset):
    """Mixup inside of the data set: a row has another row in it, by random numbers."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        inputs, label = SOME[i]
        other, second = SOME[random.randrange(12)]
        return (inputs + other) / 2, label, second


def test_mixtures_of_examples_in_a_data_set_are_a_warning(monkeypatch):
    with pytest.warns(UserWarning, match="mixup, a shuffle in __getitem__"):
        Run(monkeypatch, data=Mixed())


def test_records_tell_nothing_without_the_key_nor_of_two_runs():
    one, other = ExampleRows(SOME, b"one key"), ExampleRows(SOME, b"another")
    records = [one.record("r"), one.record("s"), other.record("r")]
    digests = [{d for row in record["rows"].values() for d in row} for record in records]
    assert all(digests)
    assert not digests[0] & digests[1]
    assert not digests[0] & digests[2]
    alike = ExampleRows(TensorDataset(torch.ones(9, 2)), b"one key").record("r")["rows"]
    assert len({d for row in alike.values() for d in row}) == len(alike)  # equal rows have no equal digests


def test_a_few_rows_are_read_and_no_more(monkeypatch):
    data = Augmented(examples(400), drawn_by("nothing"))
    ExampleRows(data, b"s")
    assert data.reads <= 3 * 18
    run = Run(monkeypatch, data=data, batch=40)
    data.reads = 0
    run.train()
    assert data.reads <= 400 + 18 + 64  # an epoch, its look at the rows, and the one at collate_fn


@pytest.mark.parametrize(
    ("value", "other", "known"),
    [
        (torch.zeros(3), torch.tensor([0.0, -0.0, 0.0]), True),
        (torch.zeros(2, 3), torch.zeros(3, 2), True),
        (np.zeros(2, np.int32), np.zeros(1, np.int64), True),
        (torch.eye(3).to_sparse(), torch.zeros(3, 3).to_sparse(), True),
        ([1, 2, [3]], [1, 2, [4]], True),
        (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object), True),
        (np.arange(3), np.arange(3.0), True),
        ("a", "b", True),
        (object(), object(), False),
    ],
)
def test_values_of_every_kind_are_compared_or_said_not_to_be(value, other, known):
    rows = ExampleRows([(value, 0)] * 3, b"s")
    record = rows.record("r")
    assert rows.uncompared(record) != known
    assert not rows.moved(record, "r")
    assert bool(ExampleRows([(other, 0)] * 3, b"s").moved(record, "r")) == known
