"""The command line as its users meet it: figures, JSON, errors, exit codes."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import figures, run
from plans import make_plan
from sql import edit

from fedcgd import LambdaCGD, Ledger, NoiseKey, Participation
from fedcgd.cli.options import participation_of
from fedcgd.cli.printing import print_json

pytestmark = pytest.mark.usefixtures("own_cache")

TABLE_4 = ["--rounds", "3900", "--participations", "10", "--separation", "390", "--epsilon", "8", "--delta", "1e-5"]


# Table 4 of arXiv:2601.22334, column "ε = 8 (w/o Amp)"; the paper's σ is 0.03 % loose.
@pytest.mark.parametrize(
    ("words", "rmse"),
    [
        (("--mechanism", "dp-sgd"), 83.85),
        (("--mechanism", "lambda-cgd:0.9"), 19.72),
        (("--mechanism", "lambda-cgd:0.95"), 14.74),
        (("--mechanism", "lambda-cgd:0.975"), 12.73),
        (("--mechanism", "bisr:16"), 17.95),
        (("--mechanism", "bsr:390"), 8.15),
    ],
)
def test_calibrate_gives_the_papers_table(words, rmse: float) -> None:
    found = figures("calibrate", *words, *TABLE_4, "--sampling", "none")
    assert found["rmse"] == pytest.approx(rmse, rel=1e-3)
    assert found["mechanism"] == words[1].partition(":")[0]
    assert {"noise_multiplier", "sensitivity", "method", "adjacency"} <= set(found)
    assert (found["epsilon"], found["delta"], found["sampling"]) == (8.0, 1e-5, "none")
    assert found["max_se"] >= found["rmse"]


def test_epsilon_is_the_way_back() -> None:
    run_ = ["--rounds", "3900", "--separation", "390", "--delta", "1e-5", "--mechanism", "lambda-cgd:0.9"]
    sigma = figures("calibrate", *run_, "--epsilon", "8")["noise_multiplier"]
    assert figures("epsilon", *run_, "--noise-multiplier", str(sigma))["epsilon"] == pytest.approx(8, rel=1e-6)
    assert figures("epsilon", *run_, "--noise-multiplier", str(sigma / 2))["epsilon"] > 16


def test_delta_is_a_third_way() -> None:
    run_ = ["--mechanism", "lambda-cgd:0.5", "--rounds", "40", "--separation", "10"]
    sigma = figures("calibrate", *run_, "--epsilon", "2", "--delta", "1e-5")["noise_multiplier"]
    found = figures("delta", *run_, "--noise-multiplier", str(sigma), "--epsilon", "2")
    assert found["delta"] == pytest.approx(1e-5, rel=1e-6)
    assert found["released"] == 40


@pytest.mark.parametrize("command", [("epsilon", "--delta", "1e-5"), ("delta", "--epsilon", "1")])
def test_rounds_released_so_far_cost_less(command: tuple[str, ...]) -> None:
    name = command[0]
    words = [
        *command,
        *["--mechanism", "lambda-cgd:0.5", "--rounds", "40", "--separation", "10", "--noise-multiplier", "3"],
    ]
    spent = [figures(*words, "--released", str(t))[name] for t in (0, 10, 40)]
    assert spent[0] < spent[1] < spent[2]
    assert "after 10 of 40 rounds, true only if the decision to stop there" in " ".join(
        run(*words, "--released", "10").stdout.split()
    )
    refused = run(*words, "--released", "41")
    assert refused.exit_code == 2
    assert "released must be in 0 … 40" in refused.stderr


def test_people_see_the_whole_promise() -> None:
    result = run("calibrate", "--mechanism", "lambda-cgd:0.9", *TABLE_4)
    assert result.exit_code == 0
    for part in ("ε ≤ 8", "δ = 1e-05", "zero out one user", "sampling: none", "exact Gaussian"):
        assert part in result.output


def test_compare_lists_best_first_and_says_why_a_row_is_missing() -> None:
    names = [
        "--mechanism",
        "dp-sgd",
        "--mechanism",
        "lambda-cgd:0.9",
        "--mechanism",
        "bisr:16",
        "--mechanism",
        "band-mf:400",
    ]
    rows = figures("compare", *names, *TABLE_4)
    assert [row["label"] for row in rows] == ["bisr:16", "lambda-cgd:0.9", "dp-sgd", "band-mf:400"]
    assert [round(row["rmse"], 2) for row in rows[:3]] == [17.94, 19.71, 83.83]
    assert "between 1 and 390" in rows[3]["error"]


def test_compare_fails_if_no_mechanism_could_be_calibrated() -> None:
    words = "--rounds 40 --separation 50 --epsilon 2 --delta 1e-5 --sampling cyclic-poisson"
    result = run("compare", *words.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("--sampling-rate") == 1


def test_compare_draws(tmp_path: Path) -> None:
    plot = tmp_path / "rmse.png"
    assert run("compare", "--mechanism", "dp-sgd", "--mechanism", "bsr:4", *TABLE_4, "--plot", str(plot)).exit_code == 0
    assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--mechanism", "lambda-cgd:1.0"), "[0, 1)"),
        (("--mechanism", "lambda-cgd:nan"), "[0, 1)"),
        (("--mechanism", "lambda-cgd:-0.1"), "[0, 1)"),
        (("--mechanism", "adam"), "unknown mechanism"),
        (("--mechanism", "bisr:3901"), "has 3901 bands, and a run of 3900 rounds has use for 3900 at most: write 3900"),
        (("--mechanism", "bsr:10000:normalized"), "has 10000 bands"),
        (("--mechanism", "blt"), "blt needs d, the number of buffers: write blt:d"),
        (("--mechanism", "lambda-cgd", "--sampling", "poisson", "--separation", "1"), "no λ of lambda-cgd to choose"),
        (
            ("--mechanism", "lambda-cgd:0.9", "--sampling", "balls-in-bins", "--rounds", "3901"),
            "multiple of the 390 bins",
        ),
        (("--mechanism", "lambda-cgd:0.9", "--sampling", "poisson", "--separation", "1"), "poisson"),
        (
            ("--mechanism", "dp-sgd", "--sampling", "poisson", "--participations", "3901", "--separation", "1"),
            "participations must be in 1 … 3900",
        ),
    ],
)
def test_mistakes_are_explained_and_exit_with_2(words, says: str) -> None:
    result = run("calibrate", *TABLE_4, *words)
    assert result.exit_code == 2
    assert says in result.stderr.replace("\n", " ")
    assert not result.stdout


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    plan = make_plan(LambdaCGD(0.5), Participation(rounds=4, min_separation=2), noise_multiplier=3.0)
    path = tmp_path / "run.db"
    with Ledger.open(
        path, plan=plan, configuration={}, key=NoiseKey.from_file(tmp_path / "key", create=True)
    ) as ledger:
        attempt = ledger.plan_round(0, ["user-ann", "user-bob"])
        ledger.record_aggregated(0, attempt, 1)
        ledger.record_released(0, attempt, b"model")
    return path


def test_ledger_show_verify_export(recorded: Path) -> None:
    shown = run("ledger", "show", str(recorded))
    assert "1 of 4 rounds" in shown.output
    assert "zero out one user" in " ".join(shown.output.replace("│", " ").split())
    verified = json.loads(run("ledger", "verify", str(recorded), "--json").stdout)
    assert (verified["released"], verified["problems"]) == (1, [])
    exported = run("ledger", "export", str(recorded)).stdout
    assert json.loads(exported)["attempts"][0]["users"] == 2
    assert "user-ann" not in exported


def test_ledger_verify_fails_on_a_forged_record(recorded: Path) -> None:
    edit(recorded, "UPDATE users SET participations = 7")
    result = run("ledger", "verify", str(recorded))
    assert result.exit_code == 1
    assert "Problem" in result.output


def test_ledger_seal_deletes_the_key(recorded: Path) -> None:
    key = recorded.with_name("key")
    assert run("ledger", "seal", str(recorded), "--key-file", str(key)).exit_code == 0
    assert not key.exists()
    assert "sealed" in run("ledger", "show", str(recorded)).output


def test_ledger_of_nothing(tmp_path: Path) -> None:
    result = run("ledger", "show", str(tmp_path / "none.db"))
    assert result.exit_code == 2
    assert "no ledger" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("calibrate", "--rounds", "0", "--sampling", "poisson", "--participations", "2"), "rounds must be at least 1"),
        (("compare", "--rounds", "9", "--plot", "/nope/x.png"), "there is no folder /nope for the plot x.png"),
        (("compare", "--rounds", "9", "--plot", "x.txt"), "a plot is a .png, .svg or .pdf file, got x.txt"),
        (("explain", "--rounds", "9", "--plot", "/nope/x.png"), "there is no folder /nope"),
        (("select-lambda", "--rounds", "9", "--objective", "rmse", "--plot", "x.txt"), "a plot is a .png"),
        (("compare", "--rounds", "9", "--mechanism", "[bold]x[/foo]"), "'[bold]x[/foo]'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words: tuple[str, ...], message: str) -> None:
    result = run(*words, "--epsilon", "1", "--delta", "1e-5")
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_an_infinite_figure_is_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([{"epsilon": math.inf, "rmse": 1.5}, (math.nan, "text")])
    assert json.loads(capsys.readouterr().out) == [{"epsilon": "inf", "rmse": 1.5}, ["nan", "text"]]


def test_what_holds_with_a_probability_says_so() -> None:
    words = ["--rounds", "20", "--separation", "10", "--epsilon", "4", "--delta", "1e-5", "--sampling", "balls-in-bins"]
    assert figures("calibrate", "--mechanism", "lambda-cgd:0.5", *words)["failure_probability"] == 1e-12
    shown = run("compare", "--mechanism", "dp-sgd", "--mechanism", "lambda-cgd:0.5", *words).stdout
    assert "δ includes 1e-12 for draws that mislead" in " ".join(shown.split())


def test_names_with_brackets_are_names(tmp_path: Path) -> None:
    path = tmp_path / "run[bold].db"
    plan = make_plan(LambdaCGD(0.5), Participation(rounds=4, min_separation=2))
    Ledger.open(path, plan=plan, configuration={}, key=NoiseKey.generate()).close()
    result = run("ledger", "show", str(path))
    assert result.exit_code == 0, result.output
    assert "run[bold].db" in "".join(result.stdout.split())


HEAVY = {"torch", "matplotlib", "dp_accounting", "flwr", "fedcgd.accounting", "fedcgd.ledger"}
HEAVY |= {f"scipy.{part}" for part in ("fft", "linalg", "optimize", "signal", "sparse", "special", "stats")}


def test_help_loads_nothing_heavy_of_any_command() -> None:
    program = (
        "import sys\n"
        "from fedcgd.cli import app\n"
        "words = [[], *([name, *inner] for name, command in app.commands.items()\n"
        "              for inner in [[], *([each] for each in getattr(command, 'commands', ()))])]\n"
        "for asked in words:\n"
        "    for help in ('--help', '-h'):\n"
        "        try: app([*asked, help])\n"
        "        except SystemExit as end: assert not end.code, asked\n"
        f"print(len(words), sorted({HEAVY!r} & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    number, loaded = finished.stdout.splitlines()[-1].split(" ", 1)
    assert int(number) > 25
    assert loaded == "[]"


def test_lambda_and_bands_left_out_are_chosen_for_the_budget() -> None:
    words = ["--rounds", "40", "--separation", "8", "--epsilon", "2", "--delta", "1e-5"]
    lam = figures("select-lambda", *words)["lam"]
    assert figures("calibrate", "--mechanism", "lambda-cgd", *words)["parameters"] == {"lam": lam}
    chosen = figures("select-bands", "--mechanism", "bsr", *words)
    assert [p for p, _ in chosen["errors"]] == [1, 2, 4, 8]
    assert min(error for _, error in chosen["errors"]) == dict(chosen["errors"])[chosen["bands"]]
    assert figures("calibrate", "--mechanism", "bsr", *words)["parameters"] == {"bands": chosen["bands"]}
    [row] = figures("compare", "--mechanism", "bsr", *words)
    assert row["label"] == f"bsr → bsr:{chosen['bands']}"


def test_bands_with_groups_of_their_own() -> None:
    """Under cyclic Poisson sampling p bands have p groups and q = p·k/n: p = 1 is DP-SGD with q = 1/4."""
    budget = ["--epsilon", "2", "--delta", "1e-5"]
    words = ["--rounds", "16", "--participations", "4", "--sampling", "cyclic-poisson", *budget]
    errors = dict(figures("select-bands", "--mechanism", "bsr", *words)["errors"])
    assert list(errors) == [1, 2, 4]
    alone = figures("calibrate", "--mechanism", "bsr:4", *words)
    assert alone["rmse"] == errors[4]
    refused = run("select-bands", "--mechanism", "lambda-cgd", *words)
    assert refused.exit_code == 2
    assert "without their number" in refused.stderr


def test_cyclic_poisson_sampling_keeps_the_expected_number_of_participations() -> None:
    # Definition 2.1 of "Scaling up the banded matrix factorization mechanism" prints q = p²k/n. A user's group has its turn in
    # n/p rounds, so that k expected participations need q = p·k/n.
    plan = participation_of("cyclic-poisson", 4000, 1, 10, 16)
    assert plan.sampling_rate == pytest.approx(16 * 10 / 4000)
    assert plan.sampling_rate * plan.rounds / plan.min_separation == pytest.approx(10)


def test_users_rest_two_thirds_of_the_rounds_until_their_next_turn_if_nothing_is_said() -> None:
    assert participation_of("b-min-sep", 40, None, 4, None) == participation_of("b-min-sep", 40, 6, 4, None)
