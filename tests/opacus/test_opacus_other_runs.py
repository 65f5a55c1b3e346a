"""Two runs of one process over the same examples are told that ε of each is not what a person in both has."""

import warnings

import pytest
import torch
from central_runs import examples
from torch import nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, DataLoader, Subset

from fedcgd import NoiseKey
from fedcgd.ledger import verify
from fedcgd.opacus import CorrelatedPrivacyEngine

SHARED = "another run of this process has released rounds over some of these examples"
pytestmark = pytest.mark.filterwarnings(
    "ignore:Secure RNG", "ignore:Full backward hook", "ignore:nothing says whether rounds"
)


def private(data, *, key=None, model=None, record=None):
    """(engine, module, optimizer, loader), of two epochs of three steps."""
    model = nn.Linear(6, 3) if model is None else model
    engine = CorrelatedPrivacyEngine(key or NoiseKey.generate(), record=record)
    return engine, *engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, batch_size=4),
        mechanism="lambda-cgd:0.5", sampling="none", noise_multiplier=1.0, max_grad_norm=1.0, epochs=2, target_delta=1e-3,
    )  # fmt: skip


def step(private, inputs, targets):
    _, module, optimizer, _ = private
    optimizer.zero_grad()
    functional.cross_entropy(module(inputs), targets).backward()
    optimizer.step()


def train(private):
    for inputs, targets in private[-1]:
        step(private, inputs, targets)


def told(work):
    """How many warnings of shared examples `work` gives."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        work()
    return sum(SHARED in str(one.message) for one in said)


DATA = examples(12, seed=101)
WHOLE = examples(24, seed=102)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (DATA, DATA),
        (Subset(WHOLE, range(12)), Subset(WHOLE, range(11, 23))),
        (Subset(WHOLE, range(12)), ConcatDataset([Subset(DATA, range(3)), Subset(WHOLE, range(3, 12))])),
    ],
    ids=["object", "one in both", "parts"],
)
def test_two_trials_over_the_same_examples_are_told_once_and_before_the_second_releases_anything(first, second):
    assert told(lambda: train(private(first))) == 0
    other = private(second)
    assert told(lambda: next(iter(other[-1]))) == 1
    assert len(other[0].accountant) == 0
    assert told(lambda: [train(other), train(other), train(private(second))]) == 0


def test_what_is_told_names_joint_accounting_and_what_epsilon_covers():
    data = examples(12, seed=103)
    train(private(data))
    with pytest.warns(UserWarning, match="get_epsilon is"):
        train(private(data))


def test_loops_that_take_turns_are_told():
    first, second = (private(data) for data in [examples(12, seed=104)] * 2)

    def train_both():
        for one, other in zip(first[-1], second[-1], strict=True):
            step(first, *one)
            step(second, *other)

    assert told(train_both) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (examples(12, seed=105), examples(12, seed=106)),
        (Subset(WHOLE, range(12)), Subset(WHOLE, range(12, 24))),
    ],
    ids=["other examples", "other half"],
)
def test_other_examples_are_not_told_of(first, second):
    train(private(first))
    assert told(lambda: train(private(second))) == 0


def test_a_run_that_released_nothing_a_simulation_and_a_run_that_goes_on_are_not_told_of(tmp_path):
    data, key = examples(12, seed=109), NoiseKey.generate()
    private(data)
    train(private(data, key=NoiseKey.simulation(3)))
    run = private(data, key=key)
    assert told(lambda: train(run)) == 0
    run[0].save_checkpoint(path=tmp_path / "c", module=run[1], optimizer=run[2])
    goes_on = private(data, key=key)
    goes_on[0].load_checkpoint(path=tmp_path / "c", module=goes_on[1], optimizer=goes_on[2])
    assert told(lambda: train(goes_on)) == 0


def test_a_second_phase_of_one_model_is_told_once():
    data, model = examples(12, seed=110), nn.Linear(6, 3)
    train(private(data, model=model))
    with pytest.warns(UserWarning, match="has released"):
        second = private(data, model=model)
    assert told(lambda: train(second)) == 0


def test_a_run_goes_on_in_the_process_where_it_began(tmp_path):
    """The first engine is gone, but its optimizer, which the notebook still has, keeps the record open."""
    data, key = examples(12, seed=111), NoiseKey.generate()
    first = private(data, key=key, record=tmp_path / "releases")
    train(first)
    first[0].save_checkpoint(path=tmp_path / "c", module=first[1], optimizer=first[2])
    optimizer, loader = first[2], first[3]
    batch = next(iter(loader))
    del first
    second = private(data, key=key, record=tmp_path / "releases")
    second[0].load_checkpoint(path=tmp_path / "c", module=second[1], optimizer=second[2])
    train(second)
    assert len(second[0].accountant) == 6
    assert verify(tmp_path / "releases").released == 6
    with pytest.raises(ValueError, match="opened again"):
        step((None, optimizer._module, optimizer, None), *batch)


def test_a_record_of_another_run_is_refused_and_its_run_goes_on(tmp_path):
    first = private(DATA, record=tmp_path / "releases")
    train(first)
    with pytest.raises(ValueError, match="another run"):
        private(WHOLE, record=tmp_path / "releases")
    train(first)
    assert len(first[0].accountant) == 6
