"""Every command: its help, its example, its exit codes, and mistakes, which are named at once with what was meant."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import pytest
from click.testing import CliRunner
from command_line import run, shown
from keeper_runs import RealKeepers
from keeper_services import Services
from ledgers import MODEL, recorded
from plans import make_plan
from rich.console import Console
from shared import record

import fedcgd
from fedcgd import LambdaCGD, NoiseKey, Participation
from fedcgd.cli import account, app, printing, watch
from fedcgd.cli.commands import COMMANDS, KEEPER_COMMANDS, LEDGER_COMMANDS
from fedcgd.cli.declare import WholeNumber
from fedcgd.keepers import KeeperKey
from fedcgd.keepers.service import KeeperService
from fedcgd.optimisation.table import TABLE
from fedcgd.quadratic import Spectrum

pytestmark = pytest.mark.usefixtures("own_cache")

BUDGET = ["--epsilon", "4", "--delta", "1e-5"]
SMALL = ["account", "--mechanism", "dp-sgd", "--rounds", "10", *BUDGET]
RUN = ["account", "--mechanism", "dp-sgd", "--rounds", "40", *BUDGET]
B_MIN_SEP = [*RUN, "--sampling", "b-min-sep"]
POISSON = [*RUN, "--sampling", "poisson"]
COMPARE = ["compare", "--rounds", "40", *BUDGET]
PLAN = ["plan", "--users", "100", "--classes", "2", "--features", "3", *BUDGET]

MISTAKES = [
    # words that are not there, what is missing or too much
    (["acount"], "No such command 'acount'. "),
    (["account", "--mechanism", "lamda-cgd:0.9", "--rounds", "10", *BUDGET], "did you mean lambda-cgd:0.9?"),
    (["ledger", "show", "--jsn", "run.db"], "'--json'? Example: fedcgd ledger show run.db"),
    (["compare"], "'--epsilon'. Example: fedcgd compare"),
    (["account", "--rounds"], "'--rounds' requires"),
    ([*SMALL, "now"], "(now). Example: fedcgd account"),
    (["ledger", "compose"], "'PATHS...'. Example: fedcgd ledger compose A.db B.db"),
    # numbers out of range
    ([*SMALL, "--rounds", "99999999999"], "--rounds must be at most 100,000,000, got 99,999,999,999"),
    (["account", "--mechanism", "dp-sgd", "--rounds", "ten", *BUDGET], "a whole number such as 1000 or 1e6, got 'ten'. Example"),
    ([*RUN, "--separation", "0"], "--separation must be between 1 and rounds = 40"),
    ([*RUN, "--epsilon", "-1"], "--epsilon must be in"),
    ([*RUN, "--delta", "2"], "--delta must be in"),
    ([*RUN[:5], "--delta", "1e-5", "--noise-multiplier", "3", "--released", "41"], "--released must be in 0 … 40"),
    ([*SMALL, "--clip-norm", "0"], "--clip-norm must be positive and finite, got 0.0; 1 is usual, or about the median norm"),
    # what does not go together
    ([*RUN, "--noise-multiplier", "3"], "got --noise-multiplier 3 and --epsilon 4 and --delta 1e-05"),
    ([*RUN[:5]], "give two of --noise-multiplier, --epsilon, --delta, and the third is the answer; got none"),
    ([*RUN, "--released", "3"], "--released is for ε and δ of a given --noise-multiplier"),
    ([*RUN, "--learning-rate", "0.5"], "--learning-rate is of descent on a --curvature"),
    ([*RUN, "--curvature", "spectrum.json", "--momentum", "0.9"], "leave --momentum, --schedule and --warmup out"),
    ([*RUN, "--curvature", "flat.json"], "flat.json has no curvature"),
    ([*RUN, "--curvature", "other.json"], "holds no spectrum"),
    (["audit", *BUDGET], "one of the two"),
    (["audit", *BUDGET, "--scores", "nofile"], "nofile: No such file or directory"),
    (["audit", *BUDGET, "--scores", "other.json"], "has no 'included': it must be a JSON file"),
    (["audit", *BUDGET, "--scores", "words.json"], "cannot be read as scores (could not convert string to float: 'a')"),
    (["audit", *BUDGET, "--mechanism", "dp-sgd", "--rounds", "12", "--trials", "5"], "trials must be at least 1000"),
    # samplings
    ([*POISSON, "--sampling-rate", "0"], "--sampling-rate must be in (0, 1]"),
    ([*POISSON, "--sampling-rate", "often"], "such as 128/50000, got 'often'"),
    ([*POISSON], "needs --sampling-rate (q), or --participations"),
    ([*POISSON, "--sampling-rate", "0.1", "--participations", "2"], "one of the two; got 0.1 and 2"),
    ([*POISSON, "--participations", "41"], "participations must be in 1 … 40"),
    ([*B_MIN_SEP, "--separation", "20", "--participations", "3"], "got 3: fewer"),
    # mechanisms and files
    ([*COMPARE, "--mechanism", "[bold]x[/foo]"], "'[bold]x[/foo]'"),
    (["ledger", "show", "none.db"], "no ledger"),
    (["keeper", "verify", "court"], "each record is NAME=FILE"),
    (["report", "run.db", "-o", "report.pdf"], "must end in .html, .md, .json"),
    (["watch", "run.db", "--every", "0"], "--every must be in [0.2, 86400] seconds, got"),
    (["watch", "run.db", "--every", "nan"], "--every must be in [0.2, 86400] seconds, got"),
    # each number of a plan and of a run by the name of its option
    ([*PLAN, "--users", "1"], "--users must be"),
    ([*PLAN, "--max-cohort", "0"], "--max-cohort must be"),
    ([*PLAN, "--hidden-layers", "0"], "--hidden-layers must be"),
    ([*PLAN, "--uncentred", "3"], "--uncentred must be"),
    ([*SMALL, "--momentum", "2"], "--momentum must be"),
    ([*SMALL, "--warmup", "20"], "--warmup must be"),
]  # fmt: skip


@pytest.fixture
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Spectrum.from_eigenvalues([1.0, 0.1, 0.01], [1, 10, 100]).save("spectrum.json")
    Spectrum.from_eigenvalues([0.0]).save("flat.json")
    Path("other.json").write_text("{}")
    Path("words.json").write_text('{"included": ["a"], "held_out": [1]}')


@pytest.mark.parametrize(
    ("words", "message"), MISTAKES, ids=lambda each: None if isinstance(each, str) else " ".join(each)
)
@pytest.mark.usefixtures("_folder")
def test_a_mistake_is_one_line_with_its_remedy_and_exit_code_2(words: list[str], message: str) -> None:
    if "run.db" in words:
        Path("run.db").touch()
    told, read = run(*words), run(*words, "--json")
    assert (told.exit_code, told.stdout) == (2, "")
    assert told.stderr.startswith("Error: ")
    assert told.stderr.splitlines()[1:] == []
    assert message in told.stderr
    assert not re.search(r"\b(?!held_out)\w+_\w+", told.stderr)  # the name of a Python argument
    if not words[-1].startswith("--"):  # whose value --json would be
        found = json.loads(read.stdout)
        assert (read.exit_code, read.stderr, found["exit_code"]) == (2, "", 2)
        assert message.split()[0] in found["error"]


def test_the_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"fedcgd {fedcgd.__version__}\n")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ModuleNotFoundError("no", name="torch.nn"), 2, 'the package torch, which is not installed: pip install "fedcgd[torch]"'),
        (ModuleNotFoundError("no", name="opacus"), 2, 'pip install "fedcgd[opacus]"'),
        (ModuleNotFoundError("no", name="else"), 2, "pip install else"),
        (MemoryError(), 2, "more memory than there is"),
        (RuntimeError("an invariant does not hold"), 3, "this is a bug in fedcgd"),
        (KeyboardInterrupt(), 130, ""),
    ],
)  # fmt: skip
def test_what_fails_has_its_exit_code_with_json_too(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(account, "accountant", broken)
    told, read = run(*SMALL), run(*SMALL, "--json")
    assert (told.exit_code, read.exit_code) == (code, code)
    assert message in told.stderr
    if message:
        assert json.loads(read.stdout)["exit_code"] == code


def test_who_has_read_enough_is_told_of_no_refutation(tmp_path: Path) -> None:
    """1 would say that the record contradicts itself."""
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-m", "fedcgd.cli", *SMALL]
    ran = subprocess.run(program, stdout=writing, stderr=subprocess.PIPE, check=False, cwd=tmp_path)
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_an_infinite_figure_is_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_json([{"epsilon": float("inf"), "rmse": 1.5}, (float("nan"), "text")])
    assert json.loads(capsys.readouterr().out) == [{"epsilon": "inf", "rmse": 1.5}, ["nan", "text"]]


def every(command: click.Command = app) -> Iterator[click.Command]:
    """The command, and all that are inside it."""
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from every(inner)


def test_whole_numbers_may_have_an_exponent_and_no_fraction() -> None:
    for typed, number in {"1e6": 10**6, "1000000": 10**6, "1_000_000": 10**6, "2.5e3": 2500}.items():
        assert WholeNumber(1).convert(typed, None, None) == number
    for typed in ("1e-3", "2.5", "1e400", "nan", "1e999999999", "9007199254740994.0", "many", "", "0"):
        with pytest.raises(click.BadParameter):
            WholeNumber(1).convert(typed, None, None)


def test_every_whole_number_is_read_that_way_and_every_option_has_its_help() -> None:
    parameters = [parameter for command in every() for parameter in command.params]
    whole = [parameter for parameter in parameters if parameter.type.name == "integer"]
    assert len(whole) > 25
    assert {type(parameter.type) for parameter in whole} == {WholeNumber}
    assert not [each.name for each in parameters if not (getattr(each, "help", None) or getattr(each, "meaning", None))]


@pytest.mark.parametrize("quiet", [False, True])
def test_long_work_tells_where_it_is_on_what_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    """A line, at most every ten seconds."""
    clock = [0.0]
    monkeypatch.setattr(printing, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(printing, "complaints", Console(file=io.StringIO()))
    with printing.status(quiet) as say:
        for second in (1, 9, 12, 13, 21, 23):
            clock[0] = float(second)
            say(f"{second / 10}, 4 of about 10")
    lines = [
        "calculating: 1.2, 4 of about 10, 12 s",
        "calculating: 2.3, 4 of about 10, 23 s",
    ]
    assert capsys.readouterr().err.splitlines() == ([] if quiet else lines)


HEAVY = {"torch", "matplotlib", "dp_accounting", "flwr", "fedcgd.accounting", "fedcgd.ledger"}
HEAVY |= {f"scipy.{part}" for part in ("fft", "linalg", "optimize", "signal", "sparse", "special", "stats")}
NAMES = [
    *COMMANDS,
    *(f"ledger {name}" for name in LEDGER_COMMANDS),
    *(f"keeper {name}" for name in KEEPER_COMMANDS),
]


def test_help_loads_nothing_heavy_of_any_command() -> None:
    program = (
        "import sys\n"
        "from fedcgd.cli import app\n"
        f"for asked in {['', 'ledger', 'keeper', *NAMES]!r}:\n"
        "    for help in ('--help', '-h'):\n"
        "        try: app([*asked.split(), help])\n"
        "        except SystemExit as end: assert not end.code, asked\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "[]"
    assert "Exit codes:" in finished.stdout


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


def recorded_run(path: Path, key_file: Path) -> None:
    """A round with one user."""
    plan = make_plan(LambdaCGD(0.5), Participation(rounds=4, min_separation=2), noise_multiplier=3.0)
    recorded(path, ["user-ann"], plan, NoiseKey.from_file(key_file, create=True), over=False, **MODEL)


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] if one == "curve" else []) for one in NAMES]
)
@pytest.mark.usefixtures("_folder")
def test_the_example_in_the_help_runs(
    name: str, as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command: click.Command = app
    for word in name.split():
        command = command.commands[word]  # type: ignore[attr-defined]
    example = " ".join((command.help or "").partition("Example: ")[2].partition("\n\n")[0].split())
    assert example.startswith(f"fedcgd {name} ")
    for ledger, key in (("run.db", "noise.key"), ("A.db", "A.key"), ("B.db", "B.key")):
        if ledger in example and "keeper" not in name:
            recorded_run(Path(ledger), Path(key))
    if name == "keeper serve":
        if as_json:
            return  # a service has no result
        a_service_that_stops_at_once(tmp_path, monkeypatch)
    elif "keeper" in name and name != "keeper new":
        a_round_of_keepers()
    if name == "watch":  # which ends with the run
        monkeypatch.setattr(
            watch.time, "sleep", lambda seconds: run("ledger", "seal", "run.db", "--key-file", "noise.key")
        )
    np.savez("initial.npz", weight=np.zeros(3, np.float32), counter=np.zeros(2))
    words = re.split(r" (?:&&|>>?) ", example)[0].split()[1:]
    result = run(*words, *(["--json"] if as_json else []))
    assert result.exit_code == 0, f"{example}\n{result.output}{result.exception!r}"
    assert result.stdout
    assert "user-ann" not in result.stdout
    if as_json:
        json.loads(result.stdout)


def test_a_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    recorded_run(tmp_path / "run[bold].db", tmp_path / "noise.key")
    assert "run[bold].db" in "".join(shown(run("ledger", "show", tmp_path / "run[bold].db")).split())


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("fedcgd acc", {"account"}),
        ("fedcgd ledger ver", {"verify"}),
        ("fedcgd account --sampling-r", {"--sampling-rate"}),
        ("fedcgd account --sampling cyc", {"cyclic-poisson"}),
        ("fedcgd compare --mechanism lam", {name for name in TABLE if name.startswith("lam")}),
    ],
)
def test_the_shell_completes_what_is_typed(typed: str, offered: set[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_FEDCGD_COMPLETE": "bash_complete"}
    result = CliRunner().invoke(app, [], env=words, prog_name="fedcgd")
    assert {line.partition(",")[2] for line in result.stdout.split()} == offered
