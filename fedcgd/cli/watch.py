"""`fedcgd watch`: where a run stands while it goes on, in the terminal and as a page that loads itself again."""

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedcgd.accounting.guarantee import rounded_up
from fedcgd.cli.commands import WatchOptions
from fedcgd.cli.html_parts import STYLE, grid
from fedcgd.cli.printing import console, finite, key_value_table, print_json, write_whole
from fedcgd.ledger.attempts import COUNTED
from fedcgd.ledger.statement import facts, in_unit, outlined, records
from fedcgd.participation.samplings import scheme_of
from fedcgd.plan import Plan
from fedcgd.support.html import table
from fedcgd.support.numbers import duration

LATEST = 8
"""Attempts and measurements that are shown."""
LEAST_EVERY, MOST_EVERY = 0.2, 86400
"""Seconds between two looks: a ledger is not read without a pause, and a page is looked at on the same day."""
PACE = 20
"""Releases whose median distance tells the time that is left."""


def watch(asked: WatchOptions) -> None:
    """Show a run's progress until it is over: rounds, ε, the latest rounds and measurements, and the time that is left."""
    every = asked.every
    if not LEAST_EVERY <= every <= MOST_EVERY:
        raise ValueError(f"--every must be in [{LEAST_EVERY}, {MOST_EVERY}] seconds, got {every}; 2 is usual")
    if asked.json:
        print_json(_looked(asked))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            found = _looked(asked)
            live.update(_view(found), refresh=True)
            if found["over"] or asked.once:
                return
            time.sleep(every)


def _looked(asked: WatchOptions) -> dict[str, Any]:
    """The state now, written to the page if one is asked for."""
    found = state(asked.path)
    if asked.html:
        write_page(asked.html, found, asked.every)
    return found


def state(path: Path) -> dict[str, Any]:
    """What is shown, JSON-able. It reads the ledger only. Cohorts' sizes are left out where who takes part is secret.

    Raises:
        ValueError: if there is no ledger at `path`.
    """
    record = records(path)
    run = record["run"]
    plan = _plan(json.dumps(run["plan"]))
    attempts = record["attempts"]
    ended = [row["ended"] for row in attempts if row["state"] in COUNTED]
    planned, released = plan.participation.rounds, len(ended)
    hidden = scheme_of(plan.participation.sampling).hidden
    so_far = plan.quick_guarantee(released=released) if released else None
    told = {row["release"]: row for row in record["train_metrics"]}
    return outlined(run, plan.guarantee(), so_far, released) | {
        "ledger": str(path),
        "over": run["sealed"] is not None or released >= planned,
        "rounds_skipped": len(record["skips"]),
        "seconds_left": _seconds_left(ended, planned - released),
        "attempts": [
            {name: row[name] for name in ("round", "attempt", "state", "ended")}
            | ({} if hidden else {"users": row["users"]})
            for row in attempts[-LATEST:]
        ],
        "released_with": [
            {"release": number} | told.get(number, {}) | {"epsilon": plan.quick_guarantee(released=number).epsilon}
            for number in range(max(1, released - LATEST + 1), released + 1)
        ],
        "measured": record["measured"][-LATEST:],
    }


@lru_cache(maxsize=1)
def _plan(description: str) -> Plan:
    """One object for one plan, which finds its ε once."""
    return Plan.from_description(json.loads(description))


def _seconds_left(ended: list[str], rounds: int) -> float | None:
    """By the median time between the latest releases; None before there are two."""
    times = [datetime.fromisoformat(each).timestamp() for each in ended[-PACE - 1 :]]
    gaps = [after - before for before, after in pairwise(times)]
    return round(median(gaps) * rounds, 1) if gaps else None


def _facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    seconds = found["seconds_left"]
    left = "over" if found["over"] else "unknown" if seconds is None else f"about {duration(seconds)}"
    return [*facts(found), ("time left", left)]


def _tables(found: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, columns and rows of each table."""
    tables = []
    for title, rows in (
        ("latest rounds, from 1", list(map(_as_people_count, found["attempts"]))),
        ("released with them", [_numbers(row) for row in found["released_with"]]),
        ("measured", found["measured"]),
    ):
        columns = list(dict.fromkeys(column for row in rows for column in row))
        if rows:
            cells = [[_cell(column, row.get(column)) for column in columns] for row in rows]
            tables.append((title, [in_unit(column, found["unit"]) for column in columns], cells))
    return tables


def _as_people_count(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Rounds and tries from 1, and no more of a time than its seconds."""
    ended = attempt["ended"]
    return {
        **attempt,
        "round": attempt["round"] + 1,
        "attempt": attempt["attempt"] + 1,
        "ended": ended and f"{datetime.fromisoformat(ended).astimezone(UTC):%Y-%m-%d %H:%M:%S}",
    }


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without texts: what a record of central training needs to know its sums again is for no reader."""
    return {name: value for name, value in row.items() if not isinstance(value, str)}


def _cell(column: str, value: Any) -> str:
    """In few digits; an ε is rounded up, as everywhere."""
    if column.startswith("epsilon") and isinstance(value, float):
        return rounded_up(value, 4)
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _view(found: Mapping[str, Any]) -> Group:
    parts: list[Any] = [
        key_value_table(found["ledger"], _facts(found)),
        Panel(ProgressBar(total=found["rounds_planned"], completed=found["rounds_released"]), box=box.SIMPLE),
    ]
    for title, columns, rows in _tables(found):
        shown = Table(*columns, title=title)
        for row in rows:
            shown.add_row(*map(Text, row))
        parts.append(shown)
    return Group(*parts)


def write_page(path: Path, found: Mapping[str, Any], every: float) -> None:
    """The state as one HTML file without scripts, which a browser loads again by itself until the run is over."""
    done = found["rounds_released"]
    again = "" if found["over"] else f'<meta http-equiv="refresh" content="{max(1, round(every))}">'
    tables = "".join(
        f"<h2>{escape(title)}</h2>{grid(columns, rows)}" for title, columns, rows in _tables(finite(found))
    )
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{again}'
        f'<meta name="viewport" content="width=device-width"><title>{done} of {found["rounds_planned"]} rounds</title>'
        f"<style>{STYLE}</style></head>\n<body><main><h1>{escape(Path(found['ledger']).name)}</h1>\n"
        f'<progress style="width: 100%" aria-label="rounds" max="{found["rounds_planned"]}" value="{done}"></progress>\n'
        f"{table(dict(_facts(found)))}\n{tables}<p class='small'>{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC. "
        "Times and counts on this page are not differentially private.</p></main></body></html>\n"
    )
    write_whole(path, page)
