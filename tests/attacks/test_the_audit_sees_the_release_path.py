"""`fedcgd audit` tests the objects that a run uses: break any of them, and it refutes or fails."""

import pytest
from command_line import run

from fedcgd.mechanisms import LambdaCGD
from fedcgd.release import run_noise
from fedcgd.release.run_noise import NoiseSource

AUDIT = ["audit", "--rounds", "12", "--separation", "4", "--epsilon", "2", "--delta", "1e-5"]
PATHS = ["server", "opacus"]
BUFFERED = "banded-toeplitz:3"  # its noise is combined in buffers, not replayed


def audited(path: str, mechanism: str = "lambda-cgd:0.8") -> int:
    return run(*AUDIT, "--mechanism", mechanism, "--path", path).exit_code


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mechanism", ["lambda-cgd:0.8", BUFFERED])
def test_a_tenth_less_noise_is_refuted(mechanism: str, path: str, monkeypatch) -> None:
    assert audited(path, mechanism) == 0
    add = NoiseSource.add
    monkeypatch.setattr(NoiseSource, "add", lambda self, total, nonces, stddev: add(self, total, nonces, 0.9 * stddev))
    assert audited(path, mechanism) == 1


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_lambda_is_refuted(path: str, monkeypatch) -> None:
    row = LambdaCGD.inverse_row
    monkeypatch.setattr(LambdaCGD, "inverse_row", lambda self, round, rounds: row(LambdaCGD(0.9), round, rounds))
    assert audited(path) == 1


MIXED_UP = {
    "its own round's noise for the last ones": lambda terms: [(*terms[0][:2], sum(weight for *_, weight in terms))],
    "one noise for all rounds": lambda terms: [(0, 0, weight) for *_, weight in terms],
}


@pytest.mark.parametrize("terms_of", MIXED_UP.values(), ids=MIXED_UP)
def test_a_replay_of_other_noise_is_refuted(terms_of, monkeypatch) -> None:
    add = run_noise.add_noise

    def wrong(total, stream, terms, stddev, grid, *, start=0):
        add(total, stream, terms_of(terms), stddev, grid)

    monkeypatch.setattr(run_noise, "add_noise", wrong)
    assert audited("server") == 1
