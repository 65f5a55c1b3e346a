"""Each way to change a record is found by `verify`, in the ledger, its model file or the register, or is on the page's list."""

import re
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from ledgers import reasons, refused, release
from plans import make_plan
from sql import edit, rows

from fedcgd import DPSGD, LambdaCGD, NoiseKey, Participation, Plan
from fedcgd.accounting import gaussian
from fedcgd.ledger import Ledger, released_model, seal, verify
from fedcgd.ledger.statement import facts, privacy_statement, statement_markdown
from fedcgd.ledger.texts import finding
from fedcgd.ledger.verification import epsilon_if_kept, row_reach
from fedcgd.mechanisms import BISR, Dense, Normalized, matrix

PLAN = make_plan(LambdaCGD(0.5), Participation(rounds=5))
LAYOUT = '[["w"], [[2]], ["float32"]]'


def finished(path: Path, key: NoiseKey, plan: Plan = PLAN) -> None:
    """Five rounds, of which the third is tried twice; one skip, and metrics as the Flower strategy has them."""
    with Ledger.open(path, plan=plan, configuration={"cohort_size": 2}, key=key) as ledger:
        ledger.skip(0, "too few users")
        for t in range(plan.participation.rounds):
            if t == 2:
                ledger.plan_round(t, ["ann", "ben"])
                ledger.skip(t, "nobody answered")
            metrics = {"epsilon": 1.0, "delta": 1e-5, "releases": t + 1}
            release(ledger, t, ["ann", "ben"], np.full(2, t, np.float32), b"state", LAYOUT, metrics=metrics)
            ledger.record_metrics("evaluate", t + 1, {"accuracy": 0.5})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    finished(tmp_path / "run.db", NoiseKey.from_file(tmp_path / "noise.key", create=True))
    return tmp_path / "run.db"


BAND = np.triu(np.random.default_rng(1).normal(size=(5, 5))[:, ::-1])[:, ::-1]  # neither monotone nor Toeplitz
BAND[:, 0] = 3
LATER = "2027-01-01T00:00:00.000+00:00"

CONTRADICTIONS = {
    # The releases after the first are called abandoned: ε looks smaller.
    "UPDATE attempts SET state = 'abandoned' WHERE round >= 1": "another-turn",
    "UPDATE attempts SET state = 'abandoned' WHERE round = 4": "last-model",
    "DELETE FROM attempts WHERE state = 'released' AND round = 1": "attempts-missing",
    "DELETE FROM attempts WHERE state = 'abandoned'": "attempts-missing",
    "UPDATE attempts SET attempt = 7 WHERE state = 'abandoned'": "attempts-missing",
    "UPDATE attempts SET state = 'planned' WHERE round = 4": "another-state",
    "UPDATE attempts SET aggregated = NULL WHERE round = 3": "another-state",
    "UPDATE attempts SET ended = NULL WHERE round = 3": "another-state",
    "UPDATE attempts SET nonce = randomblob(16) WHERE state = 'abandoned'": "another-state",
    "UPDATE latest SET round = 3": "last-model",
    "DELETE FROM latest": "last-model",
    "UPDATE latest SET checksum = 1": "model-differs",
    "DELETE FROM users WHERE user = 'ann'": "users-unknown",
    "UPDATE attempts SET state = 'spent' WHERE round = 4": "spent-unasked",
    "INSERT INTO openings VALUES (2, 0, zeroblob(32), '[]')": "opened-and-undone",
    "UPDATE run SET stream_id = 'mine'": "made-up-stream",
}


@pytest.mark.parametrize(("statement", "problem"), CONTRADICTIONS.items())
def test_what_contradicts_the_rest_of_the_ledger(path: Path, statement: str, problem: str) -> None:
    assert (verify(path).problems, verify(path).notes) == ((), ())
    edit(path, statement)
    assert problem in reasons(verify(path).problems)
    assert run("ledger", "verify", path).exit_code == 1


def test_a_simulation_cannot_be_called_private(tmp_path: Path) -> None:
    finished(tmp_path / "run.db", NoiseKey.simulation(1))
    assert verify(tmp_path / "run.db").problems == ()
    edit(tmp_path / "run.db", "UPDATE run SET simulated = 0")
    assert "made-up-stream" in reasons(verify(tmp_path / "run.db").problems)


KNOWN_TO_THE_REGISTER = {
    "UPDATE run SET key_fingerprint = '0123456789abcdef'": "register-has-other-settings",
    "UPDATE run SET stream_id = '00000000000000000000000000000000'": "register-does-not-know",
    "UPDATE attempts SET nonce = randomblob(16) WHERE round = 4": "register-has-another-nonce",
    # Everything about the last release is taken out: a shorter run, to which nothing in the ledger objects.
    "shorter": "register-has-more",
}
SHORTER = (
    "DELETE FROM attempts WHERE round = 4",
    "DELETE FROM metrics WHERE release = 5",
    "UPDATE latest SET round = 3, checksum = ?",
    "UPDATE users SET participations = 4, last_round = 3",
)


@pytest.mark.parametrize(("statement", "problem"), KNOWN_TO_THE_REGISTER.items())
def test_what_contradicts_the_register_alone(path: Path, statement: str, problem: str) -> None:
    register = path.with_name("noise.key.runs")
    assert verify(path, register=register).problems == ()
    if statement == "shorter":
        shutil.copy(path.with_name("run.db-model-1"), path.with_name("run.db-model-0"))  # whatever is there
        path.with_name("run.db-model-1").unlink()
        edit(path, *(one for one in SHORTER if "?" not in one), "UPDATE latest SET round = 3")
    else:
        edit(path, statement)
    assert verify(path).problems == ()
    [found] = verify(path, register=register).problems
    assert found.reason == problem
    shown = run("ledger", "verify", path, "--register", register)
    assert (shown.exit_code, found in shown.output.replace("\n", "")) == (1, True)


def test_an_older_copy_is_told_by_the_register_beside_it_which_is_found(tmp_path: Path) -> None:
    key, path, plan = NoiseKey.from_file(tmp_path / "noise.key", create=True), tmp_path / "run.db", PLAN
    with Ledger.open(path, plan=plan, configuration={}, key=key) as ledger:
        ledger.record_aggregated(0, ledger.plan_round(0, ["ann"]), 1)
    shutil.copy(path, tmp_path / "old.db")
    with Ledger.open(path, plan=plan, configuration={}, key=key) as ledger:
        ledger.record_aggregated(0, ledger.plan_round(0, ["ann"]), 2)
        ledger.record_released(0, 1, b"")
    assert run("ledger", "verify", path).exit_code == 0
    assert reasons(verify(tmp_path / "old.db", register=tmp_path / "noise.key.runs").problems) == ["register-has-more"]
    for words in (("ledger", "verify"), ("report", "-o", tmp_path / "old.md")):
        assert run(*words, tmp_path / "old.db").exit_code == 1
    (tmp_path / "noise.key.runs").unlink()
    alone = run("ledger", "verify", path)
    assert (alone.exit_code, finding("no-register") in alone.output.replace("\n", "")) == (0, True)
    assert run("ledger", "verify", path, "--register", tmp_path / "noise.key.runs").exit_code == 2


def test_a_copy_from_before_the_seal_is_told_by_the_register(path: Path) -> None:
    shutil.copy(path, path.with_name("old.db"))
    seal(path, path.with_name("noise.key"))
    register = path.with_name("noise.key.runs")
    assert verify(path, register=register).problems == ()
    assert reasons(verify(path.with_name("old.db"), register=register).problems) == ["register-has-a-seal"]


def test_a_seal_that_the_register_does_not_know_is_told(path: Path) -> None:
    """Written by hand, or by `seal` without the key file: then the key is somewhere, or may be."""
    register = path.with_name("noise.key.runs")
    assert verify(path, register=register).notes == ()
    assert dict(facts(privacy_statement(path)))["sealed"].startswith("no: ")
    edit(path, f"UPDATE run SET sealed = '{LATER}'")
    [note] = verify(path, register=register).notes
    assert note.reason == "seal-unknown"
    page = run("report", path, "-o", path.with_name("statement.md"), "--register", register)
    assert str(register) in page.output.replace("\n", "")
    assert note in (text := path.with_name("statement.md").read_text(encoding="utf-8"))
    assert f"on {LATER}" in text
    assert finding("no-register") not in text
    run("report", path, "-o", path.with_name("report.html"), "--register", register)
    assert "newest copy" not in path.with_name("report.html").read_text(encoding="utf-8")


def test_a_crash_between_ledger_and_register_is_no_contradiction(path: Path) -> None:
    register = path.with_name("noise.key.runs")
    before = rows(path, "SELECT nonce FROM attempts WHERE round = 3")[0][0].hex()
    edit(register, f"UPDATE runs SET released = 4, nonce = x'{before}'")
    assert verify(path, register=register).problems == ()
    edit(register, "UPDATE runs SET released = 3")
    assert reasons(verify(path, register=register).problems) == ["register-has-less"]


def test_the_model_of_a_release_that_was_taken_out_is_not_exported(path: Path) -> None:
    assert released_model(path)["w"].tolist() == [4, 4]
    edit(path, "UPDATE attempts SET state = 'abandoned' WHERE round >= 1")
    with refused("another-last-model"):
        released_model(path)


UNSEEN = {
    "UPDATE users SET user = 'eve' WHERE user = 'ann'": "a user's name",
    "UPDATE attempts SET nonce = randomblob(16) WHERE round = 1": "a nonce before the last",
    "UPDATE metrics SET data = '{\"accuracy\": 0.99}' WHERE kind = 'evaluate'": "metrics",
    "DELETE FROM skips": "skips",
    f"UPDATE attempts SET planned = '{LATER}' WHERE round = 1": "times",
    f"UPDATE run SET sealed = '{LATER}'": "that the run was sealed",
    "UPDATE places SET inode = 1": "the note that it went on with a copied ledger",
}


@pytest.mark.parametrize(("statement", "listed"), UNSEEN.items())
def test_what_verify_cannot_see_is_on_the_page(path: Path, statement: str, listed: str) -> None:
    """If one of these is found some day, the page for reviewers may say less."""
    edit(path, statement)
    assert verify(path, register=path.with_name("noise.key.runs")).problems == ()
    page = (Path(__file__).parents[2] / "docs/tutorials/reviewing.md").read_text(encoding="utf-8")
    unseen = page.partition("## What verify cannot see")[2].partition("\n## ")[0]
    assert listed in re.sub(r"\s+", " ", unseen)


@pytest.mark.parametrize(
    "mechanism", [DPSGD(), LambdaCGD(0.6), BISR(3), Normalized(LambdaCGD(0.6)), Dense("dense", BAND)]
)
@pytest.mark.parametrize(("k", "b"), [(5, 1), (2, 2), (2, 3), (1, 5)])
def test_a_kept_sum_is_a_row_more(mechanism, k: int, b: int) -> None:
    """Oracle: the matrix written out, a row and a column more for each copy, and all patterns with all signs."""
    n, kept = 5, (2, 2, 4)
    participation = Participation(rounds=n, min_separation=b, max_participations=k)
    plan = make_plan(mechanism, participation)
    C = matrix(mechanism, n)
    worst = 0.0
    patterns = [p for size in range(1, k + 1) for p in combinations(range(n), size) if min(np.diff(p), default=b) >= b]
    for pattern in patterns:
        for signs in np.ndindex(*[2] * len(pattern)):
            x = np.zeros(n)
            x[list(pattern)] = 1 - 2 * np.array(signs)
            for own in np.ndindex(2, 2, 2):  # the sign of the user's update in each copy: it may be another one
                copies = [C[t, :t] @ x[:t] + C[t, t] * abs(x[t]) * (1 - 2 * s) for t, s in zip(kept, own, strict=True)]
                worst = max(worst, float(np.sum((C @ x) ** 2) + np.sum(np.square(copies))))
    true = gaussian.epsilon(sigma=plan.noise_multiplier / np.sqrt(worst), delta=plan.delta)
    bound = epsilon_if_kept(plan, kept)
    assert true <= bound
    if isinstance(mechanism, DPSGD | LambdaCGD) and b == 1:  # one pattern is the worst for all rows
        assert bound == pytest.approx(true, rel=1e-6)
    assert row_reach(mechanism, participation, 0) == pytest.approx(abs(C[0, 0]))


def test_sums_that_were_no_release_are_told_with_an_epsilon(tmp_path: Path) -> None:
    """The server is killed while the inner strategy has the noised sum: ε of five rounds, of which one was made twice."""
    five, six = (Participation(rounds=rounds) for rounds in (5, 6))
    plan = Plan.calibrated(DPSGD(), five, clip_norm=1.0, epsilon=8, delta=1e-3)
    key, path = NoiseKey.generate(), tmp_path / "run.db"
    for nonce in (5, 6):
        with Ledger.open(path, plan=plan, configuration={}, key=key) as ledger:
            attempt = ledger.plan_round(0, ["ann"])
            ledger.record_aggregated(0, attempt, nonce)
        assert reasons(verify(path).notes) == ["kept-sums"]
    epsilon = replace(plan, participation=six).guarantee().epsilon
    assert epsilon_if_kept(plan, [0]) == pytest.approx(epsilon)
    edit(path, "DELETE FROM attempts WHERE attempt = 1")
    [note] = verify(path).notes
    assert re.search(r"round 1\b", note)
    assert f"at most {epsilon:.2f}"[:12] in note
    statement = privacy_statement(path)
    assert statement["notes"] == [note, finding("no-register")]
    assert f"**Note**: {note}." in statement_markdown(statement)
    run("report", path, "-o", tmp_path / "report.html")
    assert note[:40] in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("delta", "planned"), [(0.04, None), (0.3, "0.6 (0.3 · 2)")])
def test_a_large_delta_is_told_wherever_the_run_is(tmp_path: Path, delta: float, planned: str | None) -> None:
    path = tmp_path / "run.db"
    finished(path, NoiseKey.generate(), make_plan(DPSGD(), Participation(rounds=2), delta=delta))
    run("report", path, "-o", tmp_path / "report.html")
    told = (
        run("ledger", "verify", path).output,
        statement_markdown(privacy_statement(path)),
        (tmp_path / "report.html").read_text(encoding="utf-8"),
    )
    assert all((f"δ times the number of users is {planned}" in each) == (planned is not None) for each in told)
    edit(path, "INSERT INTO users VALUES (3, 'eve', 0, -1)")
    assert f"{3 * delta:g}" in str(verify(path).delta_note)
    assert f"{3 * delta:g}" not in str(privacy_statement(path)["notes"])  # how many there were is not for the public
