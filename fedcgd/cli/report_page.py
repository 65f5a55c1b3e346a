"""`fedcgd report`: one page about a run for whoever has to sign it, or the privacy statement that goes with its model."""

import json as json_module
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

import numpy as np

from fedcgd import ledger
from fedcgd.accounting.attacker import AttackerAccuracy
from fedcgd.accounting.explain import NOT_COVERED
from fedcgd.accounting.guarantee import rounded_up
from fedcgd.cli.commands import ReportOptions
from fedcgd.cli.printing import finite, printed, status, write_whole
from fedcgd.cli.report_html import STYLE, axes_of, day, figure_html, grid_html, list_html, table_html, text_html
from fedcgd.cli.usage import Exit
from fedcgd.ledger.registry import register_beside
from fedcgd.ledger.run_composition import evaluation_ledger
from fedcgd.ledger.statement import DEPLOYMENTS, facts, in_unit, records, statement_markdown, statement_of
from fedcgd.ledger.store import write_notes
from fedcgd.ledger.texts import finding
from fedcgd.plan import Plan

FORMATS = (".html", ".md", ".json")


POINTS = 60
"""Of the plot of ε: each is a bound of its own."""


def report(asked: ReportOptions) -> int:
    """Write what a run promises, and why: a page for a reviewer, or the privacy statement that goes with its model."""
    with status(asked.json) as progress:
        if asked.output.suffix not in FORMATS:
            raise ValueError(f"--output must end in {', '.join(FORMATS)}, got {asked.output}")
        if asked.output.resolve() == asked.path.resolve():
            raise ValueError(f"--output is the ledger itself, {asked.output}; give the page another name")
        if notes := {name: text for name in SUBJECT if (text := getattr(asked, name)) is not None}:
            write_notes(asked.path, notes)
        register = asked.register or register_beside(asked.path)
        record, verification = records(asked.path), ledger.verify(asked.path, register=register)
        compared = register is not None
        statement = statement_of(asked.path, record["run"], verification, compared=compared, progress=progress)
        match asked.output.suffix:
            case ".html":
                beside = evaluation_ledger(asked.path)
                evaluation = ledger.export(beside) if beside.exists() else None
                record["verification"] = verification.to_description()
                text = page(asked.path.name, statement, record, evaluation)
            case ".md":
                text = statement_markdown(statement)
            case _:
                text = json_module.dumps(finite(statement), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_whole(asked.output, text)
    what = f"the register {register}" if compared else "no register (--register)"
    printed(
        asked.json,
        {"output": str(asked.output), "register": register and str(register), "problems": list(statement["problems"])},
        f"{asked.output} is written, compared with {what}",
    )
    return Exit.CONTRADICTED if statement["problems"] else 0


def page(
    name: str,
    statement: dict[str, Any],
    record: dict[str, Any],
    evaluation: dict[str, Any] | None = None,
) -> str:
    """The whole page: HTML that needs no other file and no network; `evaluation` is the record of the private evaluation."""
    plan, best = Plan.from_description(statement["plan"]), statement["attacker"]
    sections = (
        f"<section class='first'>{_subject(record)}{_promise(statement, record['verification'])}</section>",
        _section("The claim", table_html(facts(statement))),
        _section("Why, and under which assumptions", _reasoning(statement)),
        *([_section("How well an attacker can tell", _attacker(AttackerAccuracy(**best)))] if best else []),
        _section("ε against rounds", _plots(plan, statement["rounds_released"])),
        *([_section("What was measured", body)] if (body := _measured(record, evaluation)) else []),
        _section("Who took part how often", _participations(record, plan)),
        _section("Rounds and retries", _rounds(record)),
        _section("Not covered by ε", list_html(NOT_COVERED)),
    )
    of_the_record = _section("Settings and versions", _settings(record, statement))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Privacy report: {escape(name)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        f"<h1>Privacy report</h1>\n<p class='small'>Ledger {escape(name)}, begun {day(statement['begun'])}; report of "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC. For reviewers: counts on this page are not differentially private.</p>\n"
        + in_unit("\n".join(sections), statement["unit"])
        + of_the_record
        + _section("Check it yourself", _check(name))
        + "\n</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{body}\n</section>"


SUBJECT = {"operator": "who ran it", "purpose": "what for", "data": "on which data", "people": "how many people"}
"""What an operator says of a run → as what the report shows it."""


def _subject(record: dict[str, Any]) -> str:
    """Who ran it, what for, on which data, and how many people were in them: what no ledger can know by itself."""
    said = record["verification"]["said"]
    asked = sum(record["users_by_participations"].values())
    rows = [(what, said.get(name, f"not stated (fedcgd report --{name} …)")) for name, what in SUBJECT.items()]
    return "<h2>The run</h2>" + table_html([*rows, ("users who were asked", str(asked))])


def _promise(statement: dict[str, Any], verification: dict[str, Any]) -> str:
    whole, so_far = statement["whole_run"], statement["so_far"]
    promised = statement["sound"] and not statement["simulated"] and not statement["noiseless"]
    verdict = statement["statement"]
    if promised:
        alone = finding("no-register") in statement["notes"]
        verdict = (
            f"Verified: the records agree with each other{'' if alone else ', with the register of the key'} and with the plan, "
            "and ε follows from them. Not verified: that the server and the nodes ran this code, that one person is one user, "
            f"{'that this is the newest copy of the ledger (no register), ' if alone else ''}and that nobody else had the key."
        )
    notes = [*verification["notes"], *filter(None, [verification["delta_note"]])]
    boxes = [("ε of the whole run", f"≤ {rounded_up(whole['epsilon'])}"), ("δ", rounded_up(whole["delta"], 6))]
    if (both := statement["with_evaluations"]) is not None:
        boxes.insert(1, ("ε with its evaluations", f"≤ {rounded_up(both['epsilon'])}"))
    boxes.append(("ε so far", "–" if so_far is None else f"≤ {rounded_up(so_far['epsilon'])}"))
    boxes.append(("rounds released", f"{statement['rounds_released']} of {statement['rounds_planned']}"))
    figures = "".join(f"<div>{escape(what)}<strong>{escape(value)}</strong></div>" for what, value in boxes)
    return (
        _verdict(verdict, "good" if promised else "bad")
        + (list_html(statement["problems"]) if statement["problems"] else "")
        + (list_html(notes) if notes else "")
        + f"<div class='figures'>{figures}</div>"
        + (_plainly(statement) if promised else "")
    )


def _plainly(statement: dict[str, Any]) -> str:
    """The verdict in three sentences, how large ε is beside published deployments, and the promise word by word."""
    said = "".join(f"<p class='promise'>{escape(sentence)}</p>" for sentence in statement["verdict"])
    size = f"<p>Compared with published deployments this ε is <strong>{escape(statement['size'])}</strong>.</p>"
    table = grid_html(("deployment", "ε", "δ", "for", "published in"), DEPLOYMENTS, numbers=(2,))
    return said + size + table + f"<p>{escape(statement['statement'])}</p>"


def _verdict(text: str, kind: str) -> str:
    return f"<p class='verdict {kind}'><strong>{escape(text)}</strong></p>"


def _reasoning(statement: dict[str, Any]) -> str:
    steps = (
        f"<li><strong>{escape(step['title'])}</strong>. {text_html(step['statement'])}</li>"
        for step in statement["reasoning"]
        if step["title"] != "not covered"  # it has a section of its own
    )
    return f"<ol>{''.join(steps)}</ol>"


MEASURED = {
    "evaluate": "The server's own evaluation. It costs nothing, if no user's data are in it.",
}


def _measured(record: dict[str, Any], evaluation: dict[str, Any] | None) -> str:
    """What was measured of the releases, and the clip norm, if it adapts."""
    norms = [
        {"release": row["release"], "clip norm": row["clip-norm"]} for row in record["releases"] if "clip-norm" in row
    ]
    body = _numbers(norms, "The clip norm, which follows a quantile of the users' norms; part of the ε of the run.")
    for kind, meaning in MEASURED.items():
        body += _numbers([row for row in record["measured"] if row["kind"] == kind], meaning)
    if evaluation is None or not evaluation["releases"]:
        return body
    own, problems = evaluation["verification"]["whole"], evaluation["verification"]["problems"]
    together = max(row.get("epsilon-with-training", 0.0) for row in evaluation["releases"])
    body += _numbers(
        evaluation["releases"],
        f"Users' own data, as noised sums: ε ≤ {rounded_up(own['epsilon'])} at δ = {rounded_up(own['delta'], 6)} for all "
        f"evaluations that are planned ({own['adjacency']}; sampling: {own['sampling']}; {own['method']}), and ε ≤ "
        f"{rounded_up(together)} together with the training.",
    )
    return body + (f"<p class='verdict bad'>{escape('; '.join(problems))}</p>" if problems else "")


def _numbers(rows: Sequence[dict[str, Any]], meaning: str) -> str:
    """The measured numbers of each release, by their names; nothing for no rows."""
    if not rows:
        return ""
    values = [{name: value for name, value in row.items() if isinstance(value, int | float)} for row in rows]
    names = list(dict.fromkeys(name for each in values for name in each if name != "epsilon-with-training"))
    cells = [[f"{each[name]:.6g}" if name in each else "–" for name in names] for each in values]
    return f"<p>{escape(meaning)}</p>" + grid_html(names, cells, numbers=range(len(names)))


def _participations(record: dict[str, Any], plan: Plan) -> str:
    histogram = {int(times): int(users) for times, users in record["users_by_participations"].items()}
    if not histogram:
        return "<p>No user has been asked yet.</p>"
    rows = [(str(times), str(users)) for times, users in sorted(histogram.items())]
    table = grid_html(("rounds", "users"), rows, numbers=(0, 1))
    if plan.participation.sampling_rate is not None:
        return table
    most = f"The plan allows {plan.participation.participations} rounds of a user."
    return f"<p>{most}</p>{table}"


def _rounds(record: dict[str, Any]) -> str:
    attempts, skips = record["attempts"], record["skips"]
    states = Counter(attempt["state"] for attempt in attempts)
    tries = Counter(attempt["round"] for attempt in attempts)
    retried = sum(number > 1 for number in tries.values())
    rows = [
        ("attempts", ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "none"),
        ("rounds tried more than once", str(retried)),
        ("rounds skipped for the time being", str(len(skips))),
    ]
    if attempts:
        first, last = attempts[0], attempts[-1]
        rows.append(("first and last", f"{day(first['planned'])} to {day(last['ended'] or last['planned'])}"))
    reasons = Counter(skip["reason"] for skip in skips).most_common(20)
    body = table_html(rows)
    if reasons:
        body += grid_html(("reason for skipping", "times"), [(why, str(n)) for why, n in reasons], numbers=(1,))
    return body + "<p><code>fedcgd ledger show --json</code> has every attempt.</p>"


def _settings(record: dict[str, Any], statement: dict[str, Any]) -> str:
    run = record["run"]
    rows = [
        ("key", f"fingerprint {run['key_fingerprint']}" + (", SIMULATION" if run["simulated"] else "")),
        ("hash of plan and configuration", run["configuration_hash"]),
        ("report written with", ", ".join(f"{name} {number}" for name, number in statement["written_with"].items())),
    ]
    settings = {"plan": run["plan"], "configuration": run["configuration"]}
    lines = json_module.dumps(settings, indent=2, ensure_ascii=False).splitlines()
    # Without the middle of lines that nobody reads, such as the packed entries of a dense matrix.
    shown = "\n".join(line if len(line) <= 400 else f"{line[:200]} … {line[-100:]}" for line in lines)
    return table_html(rows) + f"<pre>{escape(shown)}</pre>"


def _check(name: str) -> str:
    commands = (f"ledger verify {name}", f"ledger show {name} --json", f"report {name} -o report.html")
    lines = "\n".join(f"fedcgd {escape(command)}" for command in commands)
    return (
        f"<p>From a copy of the ledger, without its key:</p><pre>{lines}</pre><p>The record proves what the server wrote down. "
        "That the server ran this code on what it wrote down is for its operator to show.</p>"
    )


def _attacker(best: AttackerAccuracy) -> str:
    """How many cases the best attacker judges rightly."""
    known = best.gaussian_mu and f" That is the Gaussian mechanism with μ = {rounded_up(best.gaussian_mu, 4)}."
    return (
        "<p>Anyone who sees all releases, and knows everything about all other users, may guess whether one user's updates were "
        "used. If a fair coin decided whether they were, the best attacker is right in at most "
        f"<strong>{best.percent} %</strong> of cases; a guess is right in 50 %.{known or ''}</p>"
    )


def _plots(plan: Plan, released: int) -> str:
    if plan.noiseless:
        return "<p>There is no noise, and ε is ∞ from the first release on.</p>"
    rounds = plan.participation.rounds
    at = sorted({round(t) for t in np.linspace(1, rounds, min(POINTS, rounds))} | ({released} if released else set()))
    quick = [plan.quick_guarantee(released=t) for t in at]
    spent = [each.epsilon for each in quick]
    figure, axes = axes_of(3.2)
    axes.plot(at, spent, color="#2257c9", drawstyle="steps-post" if rounds <= POINTS else "default")
    axes.axhline(plan.guarantee().epsilon, color="#4c515e", ls="--", lw=1)
    if released:
        axes.axvline(released, color="#c4500a", lw=1.2)
    axes.set(xlabel="rounds released", ylabel="ε, at most", ylim=(0, None))
    text = (
        "ε for the first rounds, if their number does not depend on what they released; dashed: the whole run; orange: where the "
        "run stands."
    )
    if len({each.proof.method for each in quick}) > 1:
        text += " A quick bound: the smaller of the whole run's and that without amplification."
    meaning = f"Plot of ε against rounds, from {rounded_up(spent[0])} after {at[0]} to {rounded_up(spent[-1])} after {at[-1]}."
    return figure_html(figure, meaning, text)
