"""`benchmarks/gpu.sh`, as far as a machine without a GPU can tell: it says what is missing, and gets through when it is dry."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(results: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [BENCHMARKS / "gpu.sh", results],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PATH": path} | environment,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the command would measure for half an hour")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 2
    assert "CUDA GPU" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_dry_it_gets_through_and_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "correct.txt").write_text("tests were run\n")
    done = run(tmp_path, DRY="1")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "runtime.jsonl").read_text().splitlines()]
    assert [record["model"] for record in records] == ["cnn", "bert-tiny"]
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {"correct.txt", "noise-5000.json", "runtime.jsonl"} <= set(before)
    assert run(tmp_path, DRY="1").returncode == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
