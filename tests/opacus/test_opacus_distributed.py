"""Training on several ranks: the bits of one process, one record, and errors that end all of them."""

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from central_ranks import Job, network, plan_of, run_rank
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

from fedcgd import BLT, LambdaCGD, NoiseKey
from fedcgd.central.releases import GRID_LOSS
from fedcgd.ledger import export, verify
from fedcgd.opacus.engine import ranks_of
from fedcgd.release import array_noise, lattice_of

DIED = -signal.SIGKILL


@pytest.fixture(scope="module")
def server():
    """Processes that have imported everything, once for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "central_ranks"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")]),
        )
        multiprocessing.forkserver.ensure_running()
    return context


@pytest.fixture
def train(server, tmp_path):
    """Run a job on so many ranks: what each says, in order; None for one that says nothing."""

    def run(ranks: int = 1, died: int | None = None, **job: Any) -> list[Any]:
        meeting = tmp_path / f"meeting-{time.monotonic_ns()}"
        processes = [
            server.Process(target=run_rank, args=(Job(**({"folder": tmp_path} | job)), rank, ranks, meeting))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            for rank, process in enumerate(processes):
                process.join(100)
                assert process.exitcode == (DIED if rank == died else 0)
        finally:
            for process in processes:
                process.kill()
        found = [meeting.with_name(f"{meeting.name}-{rank}") for rank in range(ranks)]
        return [pickle.loads(path.read_bytes()) if path.exists() else None for path in found]

    return run


def models(answers: list[Any]) -> list[Any]:
    assert not [a for a in answers if not isinstance(a, dict)], answers
    return [a["model"] for a in answers]


def recorded(folder: Path, state: str = "released") -> list[int]:
    """The rounds on record in that state, each as often as it is there."""
    return [one["round"] for one in export(folder / "run.db")["attempts"] if one["state"] == state]


def same_on_all(train, tmp_path, ranks, **job):
    """The models of one process without a group and of each number of ranks are the same, and their ε."""
    alone = train(plain=True, folder=_new(tmp_path), **job)[0]
    for count in ranks:
        for answer in train(count, folder=_new(tmp_path), **job):
            assert isinstance(answer, dict), answer
            assert answer["model"] == alone["model"]
            assert answer["epsilon"] == alone["epsilon"]
            assert answer["history"] == alone["history"]
    return alone


def _new(tmp_path: Path) -> Path:
    folder = tmp_path / str(time.monotonic_ns())
    folder.mkdir()
    return folder


def test_the_model_is_the_same_bit_for_bit_on_any_number_of_ranks(train, tmp_path):
    alone = same_on_all(train, tmp_path, [1, 2, 4], model="large")
    assert alone["model"] != [p.detach().double().numpy().tobytes() for p in network("large").parameters()]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_loader_batch_for_each_rank_is_as_many_parts_in_one_process(train, tmp_path, ranks):
    alone = train(plain=True, folder=_new(tmp_path), parts=ranks)[0]
    assert models(train(ranks, folder=_new(tmp_path), parts=1)) == [alone["model"]] * ranks


def test_poisson_batches_and_physical_batches_are_split_over_ranks(train, tmp_path):
    """Uneven parts, often empty ones: of 12 examples on average there are four parts, in physical batches of two."""
    options = {"sampling": "poisson", "mechanism": LambdaCGD(0.0), "most_rows": 2, "parts": 12}
    same_on_all(train, tmp_path, [3], **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"model": "convolutions"},
        {"mode": "ghost", "model": "large"},
        {"mode": "ghost", "model": "convolutions"},
        {"mode": "functorch"},
        {"dtype": torch.float64},
        {"noise": "buffer", "model": "large", "mechanism": BLT((0.9, 0.5), (0.2, 0.1))},
        {"noise": "cpu-buffer", "model": "large"},
        {"sampling": "balls-in-bins"},
    ],
    ids=str,
)
def test_all_ways_of_training_are_the_same_on_any_number_of_ranks(options, train, tmp_path):
    same_on_all(train, tmp_path, [1, 2, 4], **options)


def test_each_sum_has_the_noise_of_the_whole_once(train, tmp_path):
    """What is released, less what the ranks have summed, is the noise that one process makes for a sum of zeros."""
    job = Job(tmp_path, model="large", listen=True)
    answers = train(3, model="large", listen=True, parts=3)
    models(answers)
    size, nonces = sum(p.numel() for p in network("large").parameters()), answers[0]["nonces"]
    plan, lattice = plan_of(job), lattice_of(plan_of(job), size, relative_loss=GRID_LOSS)
    alone = array_noise(plan, NoiseKey.simulation(1), answers[0]["run"], lattice)
    for round in range(8):
        parts = [np.frombuffer(answer["sums"][round][0], np.int64) for answer in answers]
        released = [np.frombuffer(answer["sums"][round][1], np.int64) for answer in answers]
        expected = np.zeros(size, np.int64)
        alone.add(expected, earlier=nonces[:round], attempt=0, join=lambda _, round=round: nonces[round])
        assert [r.tobytes() for r in released] == [released[0].tobytes()] * 3
        assert (released[0] - sum(parts) == expected).all()
        assert all(part.any() for part in parts)
        stddev = plan.stddev * (1.0 if round == 0 else np.hypot(1.0, 0.8)) / lattice.step
        assert float(expected.std()) == pytest.approx(stddev, rel=0.04)  # 6003 numbers: 4.4 standard deviations


def test_a_run_goes_on_with_the_same_bits_on_another_number_of_ranks(train, tmp_path):
    whole = models(train(2, folder=_new(tmp_path)))[0]
    models(train(2, epochs=1))
    assert models(train(4, load=True)) == [whole] * 4


def test_a_secret_key_is_opened_by_all_ranks_and_stays_where_it_is(train, tmp_path):
    NoiseKey.from_file(tmp_path / "noise.key", create=True)
    answers = train(2, secret=True, epochs=1)
    assert models(answers)[0] == models(answers)[1]
    assert answers[0]["run"] == answers[1]["run"]
    assert len(set(answers[0]["nonces"])) == 4
    assert answers[0]["nonces"] == answers[1]["nonces"]
    digits = (tmp_path / "noise.key").read_text().splitlines()[0]
    for file in tmp_path.iterdir():
        if file.name != "noise.key" and file.is_file():
            assert digits.encode() not in file.read_bytes()
            assert bytes.fromhex(digits) not in file.read_bytes()


def test_a_rank_that_dies_before_the_record_leaves_no_release(train, tmp_path):
    answers = train(2, trouble="dies before the record", died=1)
    assert answers[1] is None
    assert "waited for" in answers[0]
    assert recorded(tmp_path) == [0, 1, 2]


def test_a_round_that_was_lost_is_the_same_release_or_gets_another_nonce(train, tmp_path):
    """Of the rounds after the checkpoint, the fifth was released, and the sixth was on record and not released."""
    whole = train(2, folder=_new(tmp_path))[0]
    models(train(2, epochs=1))  # four rounds, in the checkpoint
    answers = train(4, died=0, load=True, trouble="dies after the record", on_rank=0, in_round=5)
    assert answers[0] is None
    assert all("waited for" in answer for answer in answers[1:])
    assert recorded(tmp_path) == [0, 1, 2, 3, 4]

    again = train(1, load=True)[0]
    found = verify(tmp_path / "run.db")
    assert (found.problems, found.released) == ((), 8)
    assert again["nonces"][:5] == whole["nonces"][:5]
    assert again["nonces"][5] != whole["nonces"][5]


@pytest.mark.parametrize(
    ("trouble", "about"),
    [
        ("plan", "the plan"),
        ("key", "the key"),
    ],
)
def test_ranks_that_begin_differently_are_refused(trouble, about, train, tmp_path):
    answers = train(3, trouble=trouble, on_rank=2, parts=3)
    assert all(f"disagree about {about}" in answer for answer in answers)
    assert not (tmp_path / "run.db").exists()


def test_a_rank_that_leaves_out_an_example_ends_all(train, tmp_path):
    answers = train(2, trouble="fewer")
    assert answers[1].startswith("StepError")
    assert "rank 1" in answers[0]
    assert len(recorded(tmp_path)) == 3


def test_a_round_that_cannot_be_put_on_record_moves_no_rank(train, tmp_path):
    answers = train(2, trouble="no disk", on_rank=0)
    assert answers[0].startswith("OSError")
    assert "rank 0" in answers[1]
    assert recorded(tmp_path) == []


def test_a_model_of_several_processes_needs_a_process_group(monkeypatch):
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_: None)
    model = DifferentiallyPrivateDistributedDataParallel(network("linear"))
    with pytest.raises(RuntimeError, match="torchrun"):
        ranks_of(model)
    assert ranks_of(model.module) is None


@pytest.mark.parametrize(("sampling", "mode"), [("poisson", "ghost"), ("b-min-sep", "hooks")])
def test_ranks_without_an_example_have_the_bits_of_one_process(sampling, mode, train, tmp_path):
    """Of batches of as many examples as ranks on average some leave ranks without any, and some are empty."""
    options = {"sampling": sampling, "mechanism": LambdaCGD(0.0), "parts": 3, "examples": 12, "mode": mode}
    same_on_all(train, tmp_path, [3], **options)
