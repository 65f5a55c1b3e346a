"""The command line called in a wrong way: every mistake is named at once, with what was meant, and exit code 2."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

import fedcgd
from fedcgd import LambdaCGD, Participation
from fedcgd.accounting.selection import select_mechanism
from fedcgd.cli import app, budget, printing, usage
from fedcgd.cli.declare import WholeNumber
from fedcgd.cli.printing import how_far
from fedcgd.optimisation import catalogue

BUDGET = ["--epsilon", "1", "--delta", "1e-5"]


def run(*words: str):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "300"}, prog_name="fedcgd")


def said(result) -> str:
    return re.sub(r"[│╭╮╰╯─\s]+", " ", result.output)


def test_the_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"fedcgd {fedcgd.__version__}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["calibrat"], "there is no command calibrat; did you mean calibrate?"),
        (["xyzzy"], "there is no command xyzzy; the commands are plan, calibrate, epsilon"),
        (["calibrate", "--mechanism", "lamda-cgd:0.9", "--rounds", "10", *BUDGET], "did you mean lambda-cgd:0.9?"),
        (["epsilon", "--sigma", "3"], "there is no option --sigma; it is called --noise-multiplier here"),
        (["calibrate", "--roundz", "3"], "there is no option --roundz; did you mean --rounds?"),
        (["calibrate", "--lam", "0.9"], "it is called --mechanism lambda-cgd:λ here"),
        (["calibrate"], "missing --rounds, --epsilon, --delta. Example: fedcgd calibrate --mechanism"),
        (["epsilon", "--rounds", "10"], "missing --mechanism, --noise-multiplier, --delta."),
        (["calibrate", "--rounds", "99999999999", *BUDGET], "--rounds must be at most 100,000,000, got 99,999,999,999"),
        (["audit", "--scores", "nofile", *BUDGET], "nofile: No such file or directory"),
        (["explain", "--rounds", "10", "--delta", "1e-5", "--noise-multiplier", "3"], "write --mechanism lambda-cgd:λ with"),
        (["--versoin"], "there is no option --versoin; did you mean --version?"),
        (["calibrate", "--rounds"], "--rounds needs a value. Example: fedcgd calibrate --mechanism"),
        (["calibrate", "now", "--rounds", "9", *BUDGET], "too many words: now; it takes options only. Example: fedcgd calibrate"),
        (["ledger", "shw", "run.db"], "there is no command shw; did you mean show?"),
        (["ledger", "xyzzy"], "there is no command xyzzy; the commands are show, verify, export"),
        (["ledger", "--foo"], "there is no option --foo"),
        (["ledger", "show", "--jsn", "run.db"], "there is no option --jsn; did you mean --json?"),
        (["ledger", "show", "run.db", "other.db"], "too many words: other.db; it takes PATH and options. Example:"),
        (["ledger", "compose"], "missing PATHS.... Example: fedcgd ledger compose A.db B.db"),
        (["ledger", "adopt"], "missing PATH, --key-file. Example: fedcgd ledger adopt run.db --key-file noise.key"),
        (["ledger", "adopt", "run.db", "--key-file"], "--key-file needs a value. Example: fedcgd ledger adopt"),
        (["keeper", "sael"], "there is no command sael; did you mean seal?"),
        (["keeper", "new"], "missing KEY, --name. Example: fedcgd keeper new keeper.key --name court"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_remedy(words, message) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in said(result)
    assert "Error(" not in result.output  # no `repr` of an exception


def test_scores_that_are_none_are_explained(tmp_path) -> None:
    path = tmp_path / "scores.json"
    for text, message in (
        ("{}", "has no 'included': it must be a JSON file"),
        ("no", "cannot be read as scores (Expecting value"),
        ('{"included": ["a"], "held_out": [1]}', "cannot be read as scores (could not convert string to float: 'a')"),
    ):
        path.write_text(text)
        result = run("audit", "--scores", str(path), *BUDGET)
        assert result.exit_code == 2
        assert message in said(result)


def test_a_large_delta_is_remarked_upon_and_the_result_stays_json() -> None:
    words = ["calibrate", "--mechanism", "dp-sgd", "--rounds", "10", "--epsilon", "1", "--json", "--delta"]
    loud, quiet = run(*words, "0.1"), run(*words, "1e-5")
    assert "Warning: δ = 0.1 is large" in loud.stderr
    assert quiet.stderr == ""
    assert json.loads(loud.stdout)["delta"] == 0.1


def test_a_failure_of_fedcgd_is_no_refutation(monkeypatch) -> None:
    def broken(*_):
        raise RuntimeError("an invariant does not hold")

    monkeypatch.setattr(budget, "accountant", broken)
    result = run("calibrate", "--mechanism", "dp-sgd", "--rounds", "10", *BUDGET)
    assert result.exit_code == 3
    assert "this is a mistake in fedcgd" in result.stderr


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("no", name="torch.nn"), 'the package torch, which is not installed: pip install "fedcgd[torch]"'),
        (ModuleNotFoundError("no", name="opacus"), 'pip install "fedcgd[opacus]"'),
        (ModuleNotFoundError("no", name="else"), "pip install else"),
        (MemoryError(), "more memory than there is"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_named(monkeypatch, error, message) -> None:
    def broken(*_):
        raise error

    monkeypatch.setattr(budget, "accountant", broken)
    result = run("calibrate", "--mechanism", "dp-sgd", "--rounds", "10", *BUDGET)
    assert result.exit_code == 2
    assert message in said(result)


def test_options_of_others_are_named_by_options_that_exist() -> None:
    ours = set()
    for name in ("calibrate", "epsilon", "explain", "select-lambda"):
        command = app.commands[name]
        ours |= {option for parameter in command.params for option in parameter.opts}
    for theirs, option in usage.OTHER_NAMES.items():
        assert theirs not in ours
        assert option.split()[0] in ours


def test_how_far_the_work_is_can_be_read_from_what_is_said() -> None:
    assert how_far("λ = 0.9, 4 of about 12") == (3, 12)
    assert how_far("sampled run 1 of 2") == (0, 2)
    assert how_far("δ ≤ 0.1") == (0, 0)


@pytest.mark.parametrize("quiet", [False, True])
def test_long_work_tells_where_it_is_on_what_is_no_terminal(monkeypatch, capsys, quiet) -> None:
    """A line, at most every ten seconds."""
    clock = [0.0]
    monkeypatch.setattr(printing, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(printing, "complaints", Console(file=io.StringIO()))
    with printing.status(quiet) as say:
        for second in (1, 9, 12, 13, 21, 23):
            clock[0] = float(second)
            say(f"{second / 10}, 4 of about 10")
    lines = [
        "calculating: 1.2, 4 of about 10, 12 s, about 28 s left",
        "calculating: 2.3, 4 of about 10, 23 s, about 54 s left",
    ]
    assert capsys.readouterr().err.splitlines() == ([] if quiet else lines)


def test_another_mechanism_with_a_lambda_does_not_become_lambda_cgd(monkeypatch) -> None:
    """The rule that chooses λ belongs to λ-CGD, not to whatever calls its number λ."""

    class Other(LambdaCGD):
        @property
        def name(self) -> str:
            return "other"

    row = catalogue.Row("other", Other, "another mechanism", (catalogue.LAMBDA,))
    monkeypatch.setitem(catalogue.TABLE, "other", row)
    with pytest.raises(ValueError, match="other needs λ"):
        select_mechanism("other", Participation(rounds=20, min_separation=5), epsilon=1.0, delta=1e-5)


@pytest.mark.parametrize("more", [[], ["--rounds", "10", "--epsilon", "1", "--delta", "1e-5"]])
def test_a_ledger_where_options_belong_is_led_to_the_report(tmp_path: Path, more: list[str]) -> None:
    path = tmp_path / "run.db"
    path.touch()
    result = run("explain", str(path), *more)
    assert result.exit_code == 2
    assert f"fedcgd report {path} -o report.html" in said(result)


@pytest.mark.parametrize(
    ("epsilon", "word"), [(0.01, "Note: ε = 0.01 is small"), (20.0, "Note: ε = 20 is large"), (1.0, "")]
)
@pytest.mark.parametrize("command", ["calibrate", "explain"])
def test_an_epsilon_that_nobody_takes_is_remarked_upon(command: str, epsilon: float, word: str) -> None:
    asked = ["--mechanism", "dp-sgd", "--rounds", "9", "--delta", "1e-5", "--epsilon", str(epsilon), "--json"]
    result = run(command, *asked)
    assert result.exit_code == 0
    assert (word in result.stderr) if word else not result.stderr
    json.loads(result.stdout)


@pytest.mark.parametrize("command", ["explain", "plan"])
def test_a_clip_norm_of_zero_is_told_what_is_usual(command: str) -> None:
    run_of = ["--mechanism", "dp-sgd", "--rounds", "9"] if command == "explain" else ["--users", "100"]
    result = run(command, *run_of, *BUDGET, "--clip-norm", "0")
    assert "--clip-norm must be positive and finite, got 0.0; 1 is usual, or about the median norm" in said(result)


@pytest.mark.parametrize("row", [row for row in catalogue.TABLE.values() if row.parameters], ids=lambda row: row.name)
def test_numbers_may_be_left_out_as_the_help_says(row: catalogue.Row) -> None:
    exceptions = {"blt": "not d of blt", "nu-dp-ftrl": "nor ν without a --curvature", "noise-curve": "curvature"}
    result = run("calibrate", "--mechanism", row.name, "--rounds", "8", "--separation", "4", *BUDGET)
    assert (result.exit_code == 0) == (row.name not in exceptions)
    assert exceptions.get(row.name, "from the right") in said(run("calibrate", "--help"))


WRONG = [
    (["calibrat"], 2),
    (["calibrate", "--roundz", "3"], 2),
    (["calibrate"], 2),
    (["calibrate", "--rounds", "ten", *BUDGET], 2),
    (["calibrate", "--rounds", "10", *BUDGET, "--sampling", "often"], 2),
    (["calibrate", "--rounds", "0", *BUDGET], 2),
    (["ledger", "verify", "missing.db"], 2),
    (["ledger"], 2),
    (["keeper", "verify", "court"], 2),
    (["keeper", "show", "missing.toml"], 2),
]


@pytest.mark.parametrize(("words", "code"), WRONG)
def test_errors_have_one_style_and_under_json_they_are_json(words: list[str], code: int) -> None:
    told, read = run(*words), run(*words, "--json")
    assert (told.exit_code, told.stdout) == (code, "")
    if words != ["ledger"]:  # whose answer is its help
        assert told.stderr.startswith("Error: ")
        assert told.stderr.count("\n") == 1
    found = json.loads(read.stdout)
    assert (read.exit_code, read.stderr) == (code, "")
    assert found["exit_code"] == code
    assert found["error"]


def test_a_failure_of_fedcgd_is_json_too(monkeypatch) -> None:
    def broken(*_):
        raise RuntimeError("an invariant does not hold")

    monkeypatch.setattr(budget, "accountant", broken)
    result = run("calibrate", "--mechanism", "dp-sgd", "--rounds", "10", *BUDGET, "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["exit_code"] == 3
    assert "an invariant does not hold" in result.stderr


@pytest.mark.parametrize(
    ("typed", "number"), [("1e6", 1_000_000), ("1000000", 1_000_000), ("1_000_000", 1_000_000), ("2.5e3", 2500)]
)
def test_whole_numbers_may_have_an_exponent(typed: str, number: int) -> None:
    result = run("calibrate", "--mechanism", "dp-sgd", "--separation", typed, "--rounds", typed, *BUDGET, "--json")
    assert json.loads(result.stdout)["rounds"] == number


@pytest.mark.parametrize("typed", ["1e-3", "2.5", "1e400", "nan", "1e999999999", "9007199254740994.0", "many", ""])
def test_what_is_no_whole_number_is_refused(typed: str) -> None:
    result = run("calibrate", "--mechanism", "dp-sgd", "--rounds", typed, *BUDGET)
    assert result.exit_code == 2
    assert f"--rounds: a whole number such as 1000 or 1e6, got {typed!r}" in result.stderr


def test_every_whole_number_is_read_that_way() -> None:
    def of(command: click.Command) -> list[click.Parameter]:
        return [*command.params, *(each for inner in getattr(command, "commands", {}).values() for each in of(inner))]

    whole = [parameter for parameter in of(app) if parameter.type.name == "integer"]
    assert len(whole) > 40
    assert {type(parameter.type) for parameter in whole} == {WholeNumber}


def test_who_has_read_enough_is_told_of_no_refutation(tmp_path: Path) -> None:
    """1 would say that the record contradicts itself."""
    program = [sys.executable, "-m", "fedcgd.cli", "calibrate", "--mechanism", "dp-sgd", "--rounds", "10", *BUDGET]
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(program, stdout=writing, stderr=subprocess.PIPE, check=False, cwd=tmp_path)
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, b"")
