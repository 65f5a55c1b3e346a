"""What the command line prints about a claim is all of it; its messages, examples and completions are a user's."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from command_line import figures, run
from keeper_runs import RealKeepers
from keeper_services import Services
from plans import make_plan
from shared import record

from fedcgd import DPSGD, LambdaCGD, Ledger, NoiseKey, Participation, accounting
from fedcgd.cli import app, budget
from fedcgd.keepers import KeeperKey
from fedcgd.keepers.service import KeeperService
from fedcgd.optimisation.catalogue import TABLE
from fedcgd.quadratic import Spectrum

pytestmark = pytest.mark.usefixtures("own_cache")

BUDGET = ["--epsilon", "4", "--delta", "1e-5"]


def words_of(result: Result) -> str:
    return " ".join(result.stdout.replace("│", " ").split())


def test_json_says_what_the_claim_rests_on() -> None:
    run_ = ["--rounds", "40", "--separation", "10", "--participations", "3"]
    found = figures("calibrate", "--mechanism", "lambda-cgd:0.5", *run_, *BUDGET)
    expected = {
        "rounds": 40, "participations": 3, "min_separation": 10, "sampling": "none", "sampling_rate": None,
        "parameters": {"lam": 0.5}, "sensitivity_exact": True, "exact": True, "released": 40,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    [row] = figures("compare", "--mechanism", "bsr:4", *run_, *BUDGET)
    assert {name: row[name] for name in ("rounds", "participations", "min_separation", "parameters")} == {
        "rounds": 40, "participations": 3, "min_separation": 10, "parameters": {"bands": 4},
    }  # fmt: skip
    chosen = figures("select-lambda", "--objective", "rmse", *run_, *BUDGET)
    assert (chosen["rounds"], chosen["participations"], chosen["epsilon"], chosen["delta"]) == (40, 3, 4.0, 1e-5)
    bands = figures("select-bands", "--mechanism", "bsr", *run_, *BUDGET)
    assert (bands["rounds"], bands["min_separation"], bands["adjacency"]) == (40, 10, "zero out one user")
    audit = figures("audit", "--mechanism", "lambda-cgd:0.5", *run_, *BUDGET, "--trials", "2000")
    assert (audit["rounds"], audit["participations"], audit["mechanism"]) == (40, 3, "lambda-cgd:0.5")


def test_a_bound_on_the_sensitivity_is_called_one() -> None:
    run_ = ["--rounds", "40", "--separation", "4", *BUDGET]
    bounded = ["--mechanism", "band-inv-mf:8", *run_]
    found = figures("calibrate", *bounded)
    participation = Participation(rounds=40, min_separation=4)
    mechanism = accounting.selection.select_mechanism("band-inv-mf:8", participation, epsilon=4, delta=1e-5)
    assert found["sensitivity_exact"] is accounting.calibrate(mechanism, participation, epsilon=4, delta=1e-5).exact
    assert not found["sensitivity_exact"]
    assert f"≤ {found['sensitivity']:.6g}" in words_of(run("calibrate", *bounded))
    assert f"≤ {found['sensitivity']:.6g}" in words_of(run("compare", *bounded))
    exact = figures("calibrate", "--mechanism", "dp-sgd", *run_)
    assert f"{exact['sensitivity']:.6g} (exact)" in words_of(run("calibrate", "--mechanism", "dp-sgd", *run_))


def test_people_see_who_takes_part_when() -> None:
    known = words_of(run("calibrate", "--mechanism", "dp-sgd", "--rounds", "40", "--separation", "10", *BUDGET))
    assert "n = 40 rounds, a user in at most k = 4 of them, at least b = 10 apart" in known
    cyclic = ["--rounds", "40", "--sampling", "cyclic-poisson", "--separation", "4", "--sampling-rate", "1/8", *BUDGET]
    drawn = words_of(run("calibrate", "--mechanism", "dp-sgd", *cyclic))
    assert "n = 40 rounds, users in 4 groups that take turns, a user in each with probability q = 0.125" in drawn
    assert "n = 40, k ≤ 4, b = 10" in words_of(
        run("compare", "--mechanism", "dp-sgd", "--rounds", "40", "--separation", "10", *BUDGET)
    )


def test_a_sampling_rate_is_a_number_or_a_fraction() -> None:
    run_ = ["--mechanism", "dp-sgd", "--rounds", "50", "--sampling", "poisson", "--delta", "1e-5"]
    found = figures("epsilon", *run_, "--noise-multiplier", "0.8", "--sampling-rate", "128/50000")
    assert (found["sampling_rate"], found["participations"]) == (128 / 50000, None)
    participation = Participation(rounds=50, sampling="poisson", sampling_rate=128 / 50000)
    expected = accounting.compute_epsilon(DPSGD(), participation, noise_multiplier=0.8, delta=1e-5)
    assert found["epsilon"] == expected.epsilon
    decimal = figures("epsilon", *run_, "--noise-multiplier", "0.8", "--sampling-rate", "0.1")
    assert decimal == figures("epsilon", *run_, "--noise-multiplier", "0.8", "--participations", "5")


B_MIN_SEP = ["--sampling", "b-min-sep"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sampling", "poisson", "--sampling-rate", "0"], "--sampling-rate must be in (0, 1]"),
        (["--sampling", "poisson", "--sampling-rate", "3/2"], "--sampling-rate must be in (0, 1]"),
        (["--sampling", "poisson", "--sampling-rate", "1/0"], "such as 128/50000, got '1/0'"),
        (["--sampling", "poisson", "--sampling-rate", "often"], "such as 128/50000, got 'often'"),
        (["--sampling", "poisson"], "needs --sampling-rate (q), or --participations"),
        (["--sampling", "poisson", "--sampling-rate", "0.1", "--participations", "2"], "one of the two; got 0.1 and 2"),
        (["--sampling", "poisson"], "one of the two; got neither"),
        (["--sampling-rate", "0.1"], "--sampling-rate does not apply to none sampling"),
        (["--method", "deterministic"], "--method deterministic is a way to bound balls-in-bins"),
        (["--method", "monte-carlo", "--sampling", "poisson", "--sampling-rate", "0.1"], "leave --method out"),
        (["--participations", "99", "--separation", "4"], "--participations must be between 1 and"),
        (["--separation", "0"], "--separation must be between 1 and rounds = 40"),
        ([*B_MIN_SEP, "--separation", "0", "--participations", "3"], "--separation must be between 1 and rounds = 40, got 0"),
        ([*B_MIN_SEP, "--separation", "20", "--participations", "3"], "got 3: fewer"),
        (["--separation", "7", "--sampling", "balls-in-bins"], "the 7 bins (--separation)"),
        (["--epsilon", "-1"], "--epsilon must be in"),
        (["--epsilon", "0"], "--epsilon must be in"),
        (["--delta", "2"], "--delta must be in"),
        (["--delta", "0"], "--delta must be in"),
        (["--rounds", "0"], "--rounds must be at least 1"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_the_words_of_the_command_line(words: list[str], says: str) -> None:
    result = run("calibrate", "--mechanism", "dp-sgd", "--rounds", "40", *BUDGET, *words)
    said = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == 2, result.output
    assert says in said
    assert not result.stdout
    assert not re.search(r"\w+_\w+", said), said  # the name of a Python argument


def test_the_number_of_bands_is_not_chosen_at_a_rate_of_a_group() -> None:
    words = ["--rounds", "64", "--sampling", "cyclic-poisson", "--sampling-rate", "0.1", *BUDGET]
    refused = run("select-bands", "--mechanism", "bsr", *words)
    assert refused.exit_code == 2
    assert "give --participations, or --separation" in refused.stderr
    assert figures("select-bands", "--mechanism", "bsr", *words, "--separation", "2")["sampling_rate"] == 0.1


def examples() -> list[tuple[str, str]]:
    """(command, its example) for every command that does something."""
    found = []
    for name, command in app.commands.items():
        parts = {f"{name} {part}": each for part, each in getattr(command, "commands", {}).items()} or {name: command}
        for words, each in parts.items():
            text = " ".join((each.help or "").partition("Example: ")[2].partition("\n\n")[0].split())
            found.append((words, text))
    return found


def test_every_command_has_an_example() -> None:
    assert len(examples()) >= 15
    assert [words for words, text in examples() if not text.startswith(f"fedcgd {words} ")] == []


def a_round_of_keepers() -> None:
    """Here: three keepers and what they opened, the file of all parties, and a key that is still new."""
    real = RealKeepers(Path(), names=("court", "union", "clinic"))
    real.make().start(real.grid(), record(np.zeros(6)))
    Path("keepers.toml").write_text("colluding = 1\n" + "".join(card.to_toml() for card in real.keepers.cards))
    KeeperKey.from_file(Path("keeper.key"), create=True)


def a_service_that_stops_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: the key, the certificates and the file of all parties."""
    Services(folder, 1, colluding=0)
    names = {"k0.key": "keeper.key", "k0.key.record": "keeper.key.record", "k0.crt": "tls.crt", "k0.tls": "tls.key"}
    for made, name in names.items():
        Path(made).rename(name)
    monkeypatch.setattr(KeeperService, "serve_forever", lambda service: None)


SLOW = {"theory", "curve"}  # they fit mechanisms and measure a model


@pytest.mark.parametrize(
    ("command", "example"),
    [pytest.param(*one, id=one[0], marks=[pytest.mark.slow] if one[0] in SLOW else []) for one in examples()],
)
def test_the_example_in_the_help_runs(
    command: str, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, key in (("run.db", "noise.key"), ("A.db", "A.key"), ("B.db", "B.key")):
        if name in example and "keeper" not in command:
            recorded_run(Path(name), Path(key))
    if command == "keeper serve":
        a_service_that_stops_at_once(tmp_path, monkeypatch)
    elif "keeper" in command and command != "keeper new":
        a_round_of_keepers()
    if "adopt" in example:
        Path("noise.key.runs").unlink()
    Spectrum.of([1.0, 0.1, 0.01], [1, 10, 100]).save("spectrum.json")
    np.savez("initial.npz", weight=np.zeros(3, np.float32), counter=np.zeros(2))
    words = re.split(r" (?:&&|>>?) ", example)[0].split()[1:]
    result = run(*words)
    assert result.exit_code == 0, f"{example}\n{result.output}{result.exception!r}"
    assert result.stdout


def recorded_run(path: Path, key_file: Path) -> None:
    """A round with one user."""
    plan = make_plan(LambdaCGD(0.5), Participation(rounds=4, min_separation=2), noise_multiplier=3.0)
    key = NoiseKey.from_file(key_file, create=True)
    layout = json.dumps([["weight"], [[3]], ["float32"]])
    with Ledger.open(path, plan=plan, configuration={}, key=key) as ledger:
        attempt = ledger.plan_round(0, ["ann"])
        nonce = key.nonce_of(ledger.stream_id, np.zeros(3), earlier=(), attempt=attempt)
        ledger.record_aggregated(0, attempt, nonce)
        ledger.record_released(0, attempt, np.ones(3, np.float32).tobytes(), b"", layout)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("fedcgd cal", {"calibrate"}),
        ("fedcgd ledger ver", {"verify"}),
        ("fedcgd calibrate --sampling-r", {"--sampling-rate"}),
        ("fedcgd calibrate --sampling cyc", {"cyclic-poisson"}),
        ("fedcgd compare --mechanism lam", {name for name in TABLE if name.startswith("lam")}),
    ],
)
def test_the_shell_completes_what_is_typed(typed: str, offered: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_FEDCGD_COMPLETE": "bash_complete"}
    result = CliRunner().invoke(app, [], env=words, prog_name="fedcgd")
    assert {line.partition(",")[2] for line in result.stdout.split()} == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_page_says_how_a_shell_is_told(shell: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "command_line.md").read_text()
    told = CliRunner().invoke(app, [], env={"_FEDCGD_COMPLETE": f"{shell}_source"}, prog_name="fedcgd")
    assert f"{shell}_source" in page
    assert told.exit_code == 0
    assert "fedcgd" in told.stdout


def test_help_names_the_exit_codes_and_ctrl_c_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Exit codes: 0 done" in run("--help").stdout

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(budget, "accountant", interrupted)
    assert run("calibrate", "--mechanism", "dp-sgd", "--rounds", "4", *BUDGET).exit_code == 130
