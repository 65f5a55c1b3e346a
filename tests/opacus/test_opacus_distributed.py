"""Training on several ranks: the bits of one process, one record, and errors that end all of them."""

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from central_ranks import Job, network, run_rank
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

from fedcgd import BLT, LambdaCGD, NoiseKey
from fedcgd.ledger import export, verify
from fedcgd.opacus.engine import ranks_of

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


@pytest.mark.parametrize(
    ("sampling", "mode", "parts", "more"),
    [
        # Uneven parts, often empty ones: of 12 examples on average there are four parts, in physical batches of two.
        ("poisson", "hooks", 12, {"most_rows": 2}),
        # Of batches of as many examples as ranks on average some leave ranks without any, and some are empty.
        ("poisson", "ghost", 3, {"examples": 12}),
        ("b-min-sep", "hooks", 3, {"examples": 12}),
    ],
)
def test_batches_of_any_size_are_split_over_ranks(sampling, mode, parts, more, train, tmp_path):
    same_on_all(train, tmp_path, [3], sampling=sampling, mode=mode, parts=parts, mechanism=LambdaCGD(0.0), **more)


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
