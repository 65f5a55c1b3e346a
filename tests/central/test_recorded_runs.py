"""A run with a record: a release is on the ledger before it is filled in, and whatever is killed when, no noise is used twice."""

import copy
import sys

import numpy as np
import pytest
import torch
from plans import make_plan
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fedcgd import LambdaCGD, Ledger, NoiseKey, Participation
from fedcgd.central import PrivateGradient, releases
from fedcgd.ledger import export, verify
from fedcgd.ledger.registry import Registry
from fedcgd.release import RunNoise

ROUNDS = 6
PLAN = make_plan(LambdaCGD(0.5), Participation(rounds=ROUNDS, min_separation=3), clip_norm=0.3, noise_multiplier=0.7)
KEY = bytes(range(32))


class KilledError(BaseException):
    pass


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(24, 5, generator=generator), torch.randint(0, 3, (24,), generator=generator))


def fresh():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.3), nn.Tanh(), nn.Linear(4, 3))


class Process:
    """A training program: model, optimizer, step, and its last checkpoint."""

    def __init__(self, record, checkpoint=None, **options):
        self.model = fresh()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.step = PrivateGradient(
            self.model, cross_entropy, options.pop("data", data()), PLAN, key=options.pop("key", NoiseKey(KEY)), record=record,
            **options,
        )  # fmt: skip
        self.saved = checkpoint
        if checkpoint is not None:
            model, optimizer, step = copy.deepcopy(checkpoint)
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
            self.step.load_state_dict(step)

    def train(self, rounds=ROUNDS, save_every=1):
        while self.step.round < rounds:
            self.step()
            self.optimizer.step()
            if self.step.round % save_every == 0:
                state = self.model.state_dict(), self.optimizer.state_dict(), self.step.state_dict()
                self.saved = copy.deepcopy(state)
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


@pytest.fixture
def sums(monkeypatch):
    """Of each (round, nonce) that made noise: the sum that got it."""
    found = {}
    add = RunNoise.add

    def noted(self, total, *, earlier, **options):
        before = bytes(np.asarray(total))
        nonce = add(self, total, earlier=earlier, **options)
        assert found.setdefault((len(earlier), nonce), before) == before, "one noise for two sums"
        return nonce

    monkeypatch.setattr(RunNoise, "add", noted)
    return found


def test_the_ledger_is_verified_and_says_what_the_plan_does(tmp_path):
    process = Process(tmp_path / "run.db")
    process.train(4)
    found = verify(tmp_path / "run.db")
    assert (found.problems, found.released, found.run.users) == ((), 4, 24)
    assert found.whole.epsilon == PLAN.guarantee().epsilon
    [note] = found.notes
    assert note.startswith("central training: what is protected is one example")
    assert found.guarantee.epsilon == process.step.guarantee().epsilon == PLAN.guarantee(released=4).epsilon
    process.train()
    records = export(tmp_path / "run.db")
    assert records["users_by_participations"] == {2: 24}
    assert [(one["round"], one["state"], one["users"]) for one in records["attempts"]] == [
        (t, "released", 8) for t in range(ROUNDS)
    ]
    assert verify(tmp_path / "run.db").problems == ()


@pytest.mark.parametrize("save_every", [1, 2, ROUNDS])
@pytest.mark.parametrize("method", ["plan_round", "record_aggregated", "record_released"])
@pytest.mark.parametrize("after", [False, True])
def test_a_run_that_is_killed_anywhere_goes_on_with_the_same_bits(
    tmp_path, monkeypatch, sums, method, after, save_every
):
    """Killed in every round, before or after each step of the ledger, with checkpoints that are now and then behind it."""
    record, checkpoint, kills = tmp_path / "run.db", None, 0
    original, skip = getattr(Ledger, method), Ledger.skip
    left = set(range(ROUNDS))

    def kill(self, round, *arguments, **options):
        nonlocal kills
        here = round in left
        left.discard(round)
        if here and not after:
            kills += 1
            raise KilledError
        result = original(self, round, *arguments, **options)
        if here:
            kills += 1
            raise KilledError
        return result

    def nothing_more(*_):
        raise KilledError  # a process that is killed skips no round

    monkeypatch.setattr(Ledger, method, kill)
    monkeypatch.setattr(Ledger, "skip", nothing_more)
    final = None
    while final is None:
        process = Process(record, checkpoint)
        try:
            final = process.train(save_every=save_every)
        except KilledError:
            checkpoint = process.saved
    assert kills == ROUNDS
    assert verify(record).problems == ()
    monkeypatch.setattr(Ledger, "skip", skip)
    again = Process(record)  # from the first round, all of which are on record
    assert torch.equal(again.train(), final)
    assert len(sums) >= ROUNDS


def test_a_round_on_record_is_not_released_again_with_another_sum(tmp_path, sums):
    record = tmp_path / "run.db"
    Process(record).train(4)
    other = Process(record, data=data(1))
    with pytest.warns(UserWarning, match="… 3"):
        other.step()
    assert other.step.round == 5
    other.train()
    assert verify(record).problems == ()
    assert sorted(round for round, _ in sums) == list(range(ROUNDS))


def test_when_all_rounds_are_on_record_another_sum_ends_the_run(tmp_path):
    record = tmp_path / "run.db"
    Process(record).train()
    other = Process(record, data=data(1))
    with pytest.warns(UserWarning, match="… 5"), pytest.raises(RuntimeError, match="6 rounds"):
        other.step()


def test_two_runs_share_neither_noise_nor_batches(tmp_path, sums):
    for name in ("a.db", "b.db", None, None):
        step = Process(tmp_path / name if name else None).step
        for _ in range(ROUNDS):
            step()
    assert len({nonce for _, nonce in sums}) == 4 * ROUNDS


def test_a_checkpoint_of_another_run_or_ahead_of_its_record_is_refused(tmp_path):
    first = Process(tmp_path / "a.db")
    first.train(3)
    other = Process(tmp_path / "b.db")
    with pytest.raises(ValueError, match="another run"):
        other.step.load_state_dict(first.step.state_dict())
    with pytest.raises(ValueError, match="older copy"):
        first.step.load_state_dict({**first.step.state_dict(), "round": 4})
    with pytest.raises(ValueError, match="older copy"):
        first.step.load_state_dict({**first.step.state_dict(), "round": -1})


def interrupted_after_the_release(process, monkeypatch) -> None:
    """A step that Ctrl-C ends when its round is released, and before the gradients are filled in."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch, "split", interrupt)
        with pytest.raises(KeyboardInterrupt):
            process.step()


def test_without_a_record_a_round_that_was_interrupted_is_lost(sums, monkeypatch):
    """It is released, and not again: nobody could tell whether the sum is the same."""
    process = Process(None)
    with pytest.raises(RuntimeError, match="without record="):
        process.step.state_dict()
    interrupted_after_the_release(process, monkeypatch)
    with pytest.warns(UserWarning, match="round 0"):
        process.step()
    assert [round for round, _ in sums] == [0, 1]
    assert process.step.round == 2


def test_wherever_it_is_interrupted_it_goes_on(tmp_path, sums):
    """Ctrl-C as each function between a sum and its release returns."""

    def interrupted_at(n, path):
        process, returns = Process(path), 0
        process.train(1)
        grad = process.model[0].weight.grad.clone()

        def trace(frame, event, _):
            nonlocal returns
            if frame.f_code.co_filename != releases.__file__:
                return None
            if event == "return":
                returns += 1
                if returns == n:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            process.step()
        except KeyboardInterrupt:
            assert torch.equal(process.model[0].weight.grad, grad)
            return process
        finally:
            sys.settrace(before)
        return None

    n = 1
    while process := interrupted_at(n, tmp_path / f"{n}.db"):
        process.train(3)
        assert verify(tmp_path / f"{n}.db").problems == ()
        n += 1
    assert n > 5


def test_a_release_that_is_not_yet_in_the_keys_register_says_how_to_go_on(tmp_path, monkeypatch, sums):
    def process(checkpoint=None):
        return Process(tmp_path / "run.db", checkpoint, key=NoiseKey.from_file(tmp_path / "noise.key", create=True))

    def interrupt(*_):
        raise KeyboardInterrupt

    first = process()
    first.train(2)
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "_write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            first.step()  # on the ledger by then
    first.step()
    with pytest.raises(ValueError, check=lambda error: error.reason == "interrupted"):
        first.step()
    process(first.saved).train()
    assert verify(tmp_path / "run.db").problems == ()


def test_what_is_no_checkpoint_is_refused(tmp_path):
    process = Process(tmp_path / "run.db")
    for state in ({}, process.model.state_dict()):
        with pytest.raises(ValueError, match="state_dict"):
            process.step.load_state_dict(state)


def test_the_same_run_begins_once_and_another_one_is_reported(tmp_path):
    def key():
        return NoiseKey.from_file(tmp_path / "noise.key", create=True)

    Process(tmp_path / "a.db", key=key()).train(2)
    with pytest.raises(ValueError, match="same run"):
        Process(tmp_path / "b.db", key=key())
    fewer = TensorDataset(*(part[:23] for part in data().tensors))
    with pytest.warns(UserWarning, match="1 earlier"):
        Process(tmp_path / "b.db", key=key(), data=fewer)


def test_too_few_examples_leave_no_ledger(tmp_path):
    with pytest.raises(ValueError, match=r"^2 examples"):
        Process(tmp_path / "run.db", data=TensorDataset(torch.zeros(2, 5), torch.zeros(2, dtype=torch.long)))
    assert not list(tmp_path.iterdir())


def test_a_step_is_not_copied(tmp_path):
    """Two copies would release the same rounds."""
    with pytest.raises(TypeError):
        copy.deepcopy(Process(tmp_path / "run.db").step)
    with pytest.raises(TypeError):
        copy.deepcopy(Process(None).step)


def test_neither_ledger_nor_checkpoint_holds_the_key(tmp_path):
    process = Process(tmp_path / "run.db")
    process.train()
    torch.save(process.saved, tmp_path / "checkpoint.pt")
    for path in tmp_path.iterdir():
        for secret in (KEY, NoiseKey(KEY).noise, NoiseKey(KEY).choices):
            assert secret not in path.read_bytes()
            assert secret.hex().encode() not in path.read_bytes()
