"""`fedcgd report`: one page about a run for the person who has to sign it, or the privacy statement that goes with its model."""

import json
from collections import Counter
from datetime import UTC, datetime
from html import escape
from typing import Any

from fedcgd import ledger
from fedcgd.accounting.explain import NOT_COVERED
from fedcgd.accounting.guarantee import rounded_up
from fedcgd.cli.commands import ReportOptions
from fedcgd.cli.html_parts import STYLE, bullets, grid, text
from fedcgd.cli.printing import finite, printed, status, write_whole
from fedcgd.cli.usage import Exit
from fedcgd.ledger.registry import register_beside
from fedcgd.ledger.statement import DEPLOYMENTS, NO_GUARANTEE, facts, in_unit, privacy_statement, statement_markdown
from fedcgd.ledger.store import write_notes
from fedcgd.ledger.texts import finding
from fedcgd.support.html import table

FORMATS = (".html", ".md", ".json")


def report(asked: ReportOptions) -> int:
    """Write what a run promises, and why: a page for a reviewer, or the privacy statement that goes with its model."""
    with status(asked.json) as progress:
        if asked.output.suffix not in FORMATS:
            raise ValueError(f"--output must end in {', '.join(FORMATS)}, got {asked.output}")
        if asked.output.resolve() == asked.path.resolve():
            raise ValueError(f"--output is the ledger itself, {asked.output}; give the page another name")
        if notes := {name: said for name in SUBJECT if (said := getattr(asked, name)) is not None}:
            write_notes(asked.path, notes)
        register = asked.register or register_beside(asked.path)
        statement = privacy_statement(asked.path, register=register, progress=progress)
        match asked.output.suffix:
            case ".html":
                written = page(asked.path.name, statement, ledger.export(asked.path))
            case ".md":
                written = statement_markdown(statement)
            case _:
                written = json.dumps(finite(statement), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_whole(asked.output, written)
    what = "no register (--register)" if register is None else f"the register {register}"
    printed(
        asked.json,
        {"output": str(asked.output), "register": register and str(register), "problems": list(statement["problems"])},
        f"{asked.output} is written, compared with {what}" + f". {NO_GUARANTEE}" * bool(statement["problems"]),
    )
    return Exit.CONTRADICTED if statement["problems"] else 0


def page(name: str, statement: dict[str, Any], record: dict[str, Any]) -> str:
    """The whole page: HTML that needs no other file and no network.

    Args:
        name: the ledger's.
        statement: its `privacy_statement`.
        record: its `export`.
    """
    sections = (
        f"<section class='first'>{_subject(record)}{_promise(statement)}</section>",
        _section("The claim", table(dict(facts(statement)))),
        _section("Why, and under which assumptions", _reasoning(statement)),
        *(
            [_section("How well an attacker can tell", _attacker(statement["attacker"]))]
            if statement["attacker"]
            else []
        ),
        _section("Rounds, and who took part how often", _rounds(record)),
        _section("Not covered by ε", bullets(NOT_COVERED)),
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Privacy report: {escape(name)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        f"<h1>Privacy report</h1>\n<p class='small'>Ledger {escape(name)}, begun {escape(_second(statement['begun']))}; report "
        f"of {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, fedcgd {statement['written_with']}. For reviewers: counts on this page are "
        "not differentially private.</p>\n"
        + in_unit("\n".join(sections), statement["unit"])
        + _section("Check it yourself", _check(name, record))
        + "\n</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{body}\n</section>"


SUBJECT = {"operator": "who ran it", "purpose": "what for", "data": "on which data", "people": "how many people"}
"""What an operator says of a run → as what the report shows it."""


def _subject(record: dict[str, Any]) -> str:
    """Who ran it, what for, on which data, and how many people were in them: what no ledger can know by itself."""
    said = record["verification"]["said"]
    rows = {what: said.get(name, f"not stated (fedcgd report --{name} …)") for name, what in SUBJECT.items()}
    asked = sum(record["users_by_participations"].values())
    return "<h2>The run</h2>" + table({**rows, "users who were asked": asked})


def _promise(statement: dict[str, Any]) -> str:
    """The verdict, what was and was not verified, and the promise word by word; or why there is none."""
    whole, so_far, both = statement["whole_run"], statement["so_far"], statement["with_evaluations"]
    promised, verdict = statement["attacker"] is not None, statement["statement"]
    if promised:
        alone = finding("no-register") in statement["notes"]
        verdict = (
            f"Verified: the records agree with each other{'' if alone else ', with the register of the key'} and with the plan, "
            "and ε follows from them. Not verified: that the server and the nodes ran this code, that one person is one user, "
            f"{'that this is the newest copy of the ledger (no register), ' if alone else ''}and that nobody else had the key."
        )
    boxes = {
        "ε of the whole run": f"≤ {rounded_up(whole['epsilon'])}",
        **({"ε with its evaluations": f"≤ {rounded_up(both['epsilon'])}"} if both else {}),
        "δ": rounded_up(whole["delta"], 6),
        "ε so far": "–" if so_far is None else f"≤ {rounded_up(so_far['epsilon'])}",
        "rounds released": f"{statement['rounds_released']} of {statement['rounds_planned']}",
    }
    figures = "".join(f"<div>{escape(what)}<strong>{escape(value)}</strong></div>" for what, value in boxes.items())
    return (
        f"<p class='verdict {'good' if promised else 'bad'}'><strong>{escape(verdict)}</strong></p>"
        + bullets([*statement["problems"], *statement["notes"]])
        + f"<div class='figures'>{figures}</div>"
        + (_plainly(statement) if promised else "")
    )


def _plainly(statement: dict[str, Any]) -> str:
    """The verdict in three sentences, how large ε is compared with published deployments, and the promise word by word."""
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in statement["verdict"])
    size = f"<p>Compared with published deployments this ε is <strong>{escape(statement['size'])}</strong>.</p>"
    deployments = grid(("deployment", "ε", "δ", "for", "published in"), DEPLOYMENTS)
    return said + size + deployments + f"<p>{escape(statement['statement'])}</p>"


def _reasoning(statement: dict[str, Any]) -> str:
    steps = (
        f"<li><strong>{escape(step['title'])}</strong>. {text(step['statement'])}</li>"
        for step in statement["reasoning"]
        if step["title"] != "not covered"  # it has a section of its own
    )
    return f"<ol>{''.join(steps)}</ol>"


def _rounds(record: dict[str, Any]) -> str:
    attempts = record["attempts"]
    states = Counter(attempt["state"] for attempt in attempts)
    rows = {
        "attempts": ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "none",
        "rounds skipped for the time being": len(record["skips"]),
    }
    if attempts:
        first, last = attempts[0], attempts[-1]
        rows["first and last"] = f"{_second(first['planned'])} to {_second(last['ended'] or last['planned'])}"
    histogram = [(str(times), str(users)) for times, users in sorted(record["users_by_participations"].items())]
    took_part = grid(("rounds", "users"), histogram) if histogram else "<p>No user has been asked yet.</p>"
    return table(rows) + took_part


def _check(name: str, record: dict[str, Any]) -> str:
    run = record["run"]
    commands = (f"ledger verify {name}", f"ledger show {name} --json", f"report {name} -o report.html")
    lines = "\n".join(f"fedcgd {escape(command)}" for command in commands)
    settings = {
        "fingerprint of the key": run["key_fingerprint"] + ", SIMULATION" * run["simulated"],
        "hash of plan and configuration": run["configuration_hash"],
    }
    return table(settings) + (
        f"<p>From a copy of the ledger, without its key:</p><pre>{lines}</pre><p>The record proves what the server wrote down. "
        "That the server ran this code on what it wrote down is for its operator to show.</p>"
    )


def _attacker(best: dict[str, Any]) -> str:
    """How many cases the best attacker judges rightly."""
    return (
        "<p>Anyone who sees all releases, and knows everything about all other users, may guess whether one user's updates were "
        "used. If a fair coin decided whether they were, the best attacker is right in at most "
        f"<strong>{best['percent']} %</strong> of cases; a guess is right in 50 %.</p>"
    )


def _second(moment: str | None) -> str:
    """2026-11-21 23:59:59 from the ledger's ISO text, which is UTC."""
    return (moment or "–").replace("T", " ")[:19]
