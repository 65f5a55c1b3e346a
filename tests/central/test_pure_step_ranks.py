"""Several processes train one model to the bits of one process, each with its part of the rows and of the noise."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fedcgd.central.ranks import Ranks
from fedcgd.ledger import verify

PROGRAM = Path(__file__).parents[1] / "helpers" / "pure_ranks.py"
KINDS = ["own", "recorded", "noiseless"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Of each kind: the models of one process and of each of two."""
    found = {}
    for count, kinds in ((0, KINDS), (2, [*KINDS, "sharded", "failing"])):
        folder = tmp_path_factory.mktemp(f"ranks{count}")
        ranks = [
            subprocess.Popen([sys.executable, str(PROGRAM), str(folder), str(rank), str(count), ",".join(kinds)])
            for rank in range(max(count, 1))
        ]
        assert [rank.wait(timeout=250) for rank in ranks] == [0] * len(ranks)
        for kind in kinds:
            for rank in range(len(ranks)):
                found[kind, count, rank] = torch.load(folder / f"{kind}-{rank}-of-{count}.pt")
        found["folder", count] = folder
    return found


@pytest.mark.parametrize("kind", ["own", "recorded", "sharded"])
def test_two_processes_have_the_bits_of_one(models, kind):
    one = models["own" if kind == "sharded" else kind, 0, 0]
    for rank in range(2):
        assert isinstance(models[kind, 2, rank], torch.Tensor), models[kind, 2, rank]
        assert torch.equal(models[kind, 2, rank], one)


@pytest.mark.parametrize("other", [1, 3])
def test_ranks_that_say_other_things_are_told_so(other, monkeypatch):
    def gather(said, mine, group):
        said[:] = [mine, {**mine, "the round": other}]

    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(RuntimeError, match="ranks 0 and 1 disagree about the round"):
        Ranks(object()).agree({"its sum": "the same", "the round": 2})


def test_shares_of_the_noise_are_all_coordinates_once(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda _: 3)
    for size in (1, 1536, 1537, 10_000, 100_001):
        shares = []
        for rank in range(3):
            monkeypatch.setattr(dist, "get_rank", lambda _, rank=rank: rank)
            shares.append(range(size)[Ranks(object()).share(size)])
        assert [i for share in shares for i in share] == list(range(size))
        assert max(map(len, shares)) <= size / 3 + 1536


def test_without_noise_they_differ_by_rounding_alone(models):
    for rank in range(2):
        torch.testing.assert_close(models["noiseless", 2, rank], models["noiseless", 0, 0], rtol=1e-5, atol=1e-7)


def test_rank_0_keeps_the_ledger_of_all(models):
    found = verify(models["folder", 2] / "recorded.db")
    assert (found.problems, found.released, found.run.users) == ((), 6, 36)


def test_what_fails_on_one_rank_is_released_on_none(models):
    assert "IndexError" in models["failing", 2, 1] or "bounds" in models["failing", 2, 1]
    assert "rank 1" in models["failing", 2, 0]
