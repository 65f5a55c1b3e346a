"""`fedcgd report`: what a reviewer is shown is what the ledger proves; nobody is named, and nothing is hidden."""

import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import command_line
import numpy as np
import pytest
from click.testing import Result
from ledgers import KEY, refused, release
from plans import make_plan
from scipy.stats import norm
from sql import edit

from fedcgd import NoiseKey, Participation, Plan
from fedcgd.ledger import Ledger, verify
from fedcgd.ledger.statement import DEPLOYMENTS, privacy_statement, size_of
from fedcgd.ledger.store import EVALUATION_OF
from fedcgd.mechanisms import LambdaCGD, matrix

PLAN = make_plan(LambdaCGD(0.5), Participation(rounds=8, min_separation=2, max_participations=3))
SCRIPT = "<script>alert('found')</script>"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.db"


def run(path: Path, *, key: NoiseKey = KEY, released: int = 5) -> None:
    """A run of three users a round, with one attempt that was given up and two rounds that were put off."""
    with Ledger.open(path, plan=PLAN, configuration={"cohort_size": 3}, key=key) as ledger:
        ledger.skip(0, "too few users")
        for t in range(released):
            cohort = [f"secret-{3 * (t % 2) + i}" for i in range(3)]
            if t == 1:
                ledger.plan_round(t, cohort)
                ledger.skip(t, "one of three users answered")
            release(ledger, t, cohort)


def report(path: Path, output: Path) -> Result:
    return command_line.run("report", path, "-o", output)


def read_by_people(page: str) -> str:
    """What a reader of the page sees."""
    return html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", "", page, flags=re.DOTALL))


def test_the_page_says_what_the_records_prove(path, tmp_path):
    run(path)
    text = page_of(path, tmp_path / "report.html")
    so_far, whole = verify(path).guarantee, PLAN.guarantee()
    assert so_far.epsilon < whole.epsilon
    shown = [float(number) for number in re.findall(r"≤ (\d+\.?\d*)", text)]
    for value in (so_far.epsilon, whole.epsilon):
        assert any(value <= number < value * 1.01 for number in shown)
    needed = (
        "zero out one user",
        whole.proof.method,
        "5 of 8",
        "1 abandoned, 5 released",
        KEY.fingerprint,
        so_far.condition,
    )
    assert all(what in text for what in (*needed, "asked6"))
    assert text.index("Verified: ") < text.index("Not verified: ") < text.index("newest copy")  # there is no register
    # μ = sensitivity / σ: of somebody in rounds 0, 2 and 4.
    columns = matrix(PLAN.mechanism, 8)[:, [0, 2, 4]]
    percent = 100 * norm.cdf(np.linalg.norm(columns.sum(axis=1)) / PLAN.noise_multiplier / 2)
    found = re.search(r"is right in at most ([0-9.]+) % of cases; a guess", text)
    assert percent <= float(found[1]) <= percent + 0.01


def test_the_page_names_nobody_runs_nothing_and_needs_no_network(path, tmp_path):
    run(path)
    output = tmp_path / "report.html"
    assert SCRIPT in page_of(path, output, "--operator", SCRIPT)  # it is text, not a tag
    page = output.read_text()
    assert not [word for word in ("secret-", "<script", "@import", "<svg") if word in page]
    assert not re.search(r"""\b(src|href)=["']?[^"'#]""", page)
    assert page.count("<h1") == 1


def test_a_statement_has_the_promise_and_no_counts_of_users(path, tmp_path):
    run(path)
    for name in ("statement.json", "statement.md"):
        assert report(path, tmp_path / name).exit_code == 0
    statement = json.loads((tmp_path / "statement.json").read_text())
    assert statement["private"]
    assert statement["whole_run"]["epsilon"] == PLAN.guarantee().epsilon
    assert statement["so_far"]["epsilon"] == PLAN.guarantee(released=5).epsilon
    assert statement["so_far"]["condition"]
    assert Plan.from_description(statement["plan"]) == PLAN
    markdown = (tmp_path / "statement.md").read_text()
    for text in (json.dumps(statement), markdown):
        assert "secret-" not in text
        assert "few users" not in text  # which rounds were put off depends on who was there
        assert "abandoned" not in text
    assert "differentially private" in markdown
    reasons = {step["title"]: step["statement"] for step in statement["reasoning"]}
    assert f"{PLAN.noise_multiplier:g}" in reasons["noise"]
    assert "**noise**" in markdown
    assert "72.11 %" in markdown
    assert statement["so_far"]["condition"] in markdown


@pytest.mark.parametrize("name", ["report.html", "statement.md", "statement.json"])
@pytest.mark.parametrize(("key", "word"), [(KEY, "NO guarantee"), (NoiseKey.simulation(0), "SIMULATION")])
def test_a_run_whose_records_contradict_it_or_a_simulation_is_promised_nothing(path, tmp_path, name, key, word):
    run(path, key=key)
    if key is KEY:
        edit(path, "UPDATE users SET participations = 1 WHERE id = 1")
    assert report(path, tmp_path / name).exit_code == (key is KEY)
    text = (tmp_path / name).read_text()
    assert (word in text, "counters that" in text, "of cases" in text) == (True, key is KEY, False)
    assert not privacy_statement(path)["private"]


def test_a_run_that_has_released_nothing_has_a_page(path, tmp_path):
    run(path, released=0)
    assert report(path, tmp_path / "report.html").exit_code == 0
    assert "No user" in (tmp_path / "report.html").read_text()


def test_page_and_statement_say_the_joint_budget(path, tmp_path):
    budget = {"epsilon": 6.0, "delta": 1e-5, "after": {"an earlier stream": PLAN.to_description()}}
    for configuration in ({"budget": budget}, {}):
        with Ledger.open(path, plan=PLAN, configuration=configuration, key=KEY) as ledger:
            release(ledger, 0, ["secret-1"])
            ledger.record_metrics("evaluate", 1, {"accuracy": 0.6})
        for name in ("report.html", "statement.md", "statement.json"):
            report(path, tmp_path / name)
        pages = read_by_people((tmp_path / "report.html").read_text()), (tmp_path / "statement.md").read_text()
        assert ["≤ 6 " in page for page in pages] == [bool(configuration)] * 2
        statement = json.loads((tmp_path / "statement.json").read_text())
        expected = {"epsilon": 6.0, "delta": 1e-5, "earlier_runs": 1}
        assert statement["joint_budget"] == (expected if configuration else None)
        assert "accuracy" not in pages[1]
        for file in path.parent.glob("run.db*"):
            file.unlink()


def test_the_first_page_says_who_and_what_for_and_how_large_epsilon_is(path, tmp_path):
    """What the operator says is kept in the ledger, and shown as text."""
    run(path)
    output = tmp_path / "report.html"
    assert "not stated" in page_of(path, output)
    said = {
        "operator": "Clinic <b>A</b>",
        "purpose": "readmissions",
        "data": "visits 2020 to 2025",
        "people": "about 1200",
    }
    options = [word for name, text in said.items() for word in (f"--{name}", text)]
    assert all(text in page_of(path, output, *options) for text in said.values())
    assert verify(path).run.said == said
    assert verify(path).problems == ()
    text = page_of(path, output)
    assert all(one in text for one in said.values())
    statement = privacy_statement(path)
    assert len(statement["verdict"]) == 3
    assert all(sentence in text for sentence in statement["verdict"])
    assert "72.11 %" in statement["verdict"][0]
    assert statement["size"] in text
    assert not set(said.values()) & set(json.dumps(statement))
    assert "`" not in text
    assert "prefers-color-scheme: dark" in output.read_text()


def test_a_verified_ledger_shows_no_epsilon_in_a_notebook_where_nothing_is_promised(tmp_path):
    key = NoiseKey.from_file(tmp_path / "noise.key", create=True)
    for name, by in (("private.db", key), ("simulated.db", NoiseKey.simulation(3))):
        run(tmp_path / name, key=by)
    private, simulated = (verify(tmp_path / name) for name in ("private.db", "simulated.db"))
    assert private._repr_html_().count("<th>ε</th>") == 2
    assert "<th>condition</th>" in private._repr_html_()
    assert "ε</th>" not in simulated._repr_html_()
    assert "ε</th>" not in replace(private, problems=("rounds are missing",))._repr_html_()


def page_of(path: Path, output: Path, *options: str) -> str:
    assert command_line.run("report", path, "-o", output, *options).exit_code == 0
    return read_by_people(output.read_text())


@pytest.mark.parametrize(
    ("epsilon", "size"), [(1.0, "small"), (1.01, "usual"), (10.0, "usual"), (10.1, "large"), (math.inf, "large")]
)
def test_an_epsilon_is_small_usual_or_large(epsilon, size):
    assert size_of(epsilon).startswith(size)
    assert all(len(row) == 5 for row in DEPLOYMENTS)


def test_in_central_training_a_user_is_an_example(tmp_path):
    path = tmp_path / "central.db"
    with Ledger.open(path, plan=PLAN, configuration={"kind": "central"}, key=KEY) as ledger:
        release(ledger, 0, ["3"])
    for name in ("statement.md", "report.html"):
        report(path, tmp_path / name)
        text = html.unescape((tmp_path / name).read_text())
        assert "one example's" in text
        assert not re.search(r"\busers?\b", text.partition("Check it yourself")[0].partition("Not covered by")[0])


def test_evaluations_alone_have_no_statement(path):
    with Ledger.open(path, plan=PLAN, configuration={EVALUATION_OF: "a run"}, key=KEY) as ledger:
        release(ledger, 0, ["secret-1"])
    with refused("evaluations-only"):
        privacy_statement(path)
