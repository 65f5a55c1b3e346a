"""How commands print: a table for people, JSON for machines, one clear line for a mistake."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedcgd.accounting import Guarantee
from fedcgd.accounting.guarantee import ADJACENCY
from fedcgd.cli.usage import Terminal, complaints
from fedcgd.mechanisms.error import error_norms
from fedcgd.mechanisms.mechanism import Mechanism
from fedcgd.mechanisms.workload import PREFIX_SUMS, Workload
from fedcgd.optimisation.mechanism_json import describe
from fedcgd.participation import Participation
from fedcgd.quadratic import Quadratic
from fedcgd.quadratic.loss import final_loss
from fedcgd.support.files import atomic_write
from fedcgd.support.untrusted import clean

MOST_SHOWN = 10_000  # characters of a text that may be somebody else's

console = Terminal()


def print_json(value: Any) -> None:
    """`value` as JSON on standard output, and nothing else. JSON has no infinity: it becomes the text "inf"."""
    click.echo(json.dumps(finite(value), indent=2, allow_nan=False))


def printed(as_json: bool, values: dict[str, Any], text: str) -> None:
    """What was done: `values` for machines, or a line of `text` for people."""
    if as_json:
        print_json(values)
    else:
        console.print(text, soft_wrap=True, markup=False)


def write_whole(path: Path, text: str) -> None:
    """Write a page, whole or not at all. Raises ValueError, which names the file, if that cannot be done."""
    try:
        with atomic_write(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


def finite(value: Any) -> Any:
    """`value` with texts ("inf", "nan") in place of the numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


def budget(epsilon: float, delta: float) -> dict[str, Any]:
    """ε, δ and the adjacency as the JSON of the commands has them."""
    return {"epsilon": epsilon, "delta": delta, "adjacency": ADJACENCY}


def print_refusals(rows: Sequence[dict[str, Any]]) -> None:
    """Of the rows with an "error", which it was and why, on standard error."""
    for row in rows:
        if "error" in row:
            complaints.print(f"{escape(row['label'])}: {escape(row['error'])}", soft_wrap=True, highlight=False)


def note(word: str, text: str, style: str = "red") -> None:
    """A line that begins with a bold word."""
    console.print(f"[bold {style}]{word}:[/bold {style}] {escape(clean(text, MOST_SHOWN))}", soft_wrap=True)


def when(participation: Participation) -> dict[str, Any]:
    """n, k, b and q as the JSON of the commands has them; k is None where only coins bound it, q where there are none."""
    poisson = participation.sampling_rate is not None
    return {
        "rounds": participation.rounds,
        "participations": None if poisson else participation.participations,
        "min_separation": participation.min_separation,
        "sampling": str(participation.sampling),
        "sampling_rate": participation.sampling_rate,
        **({} if participation.warm_start else {"warm_start": False}),
    }


def figures(
    mechanism: Mechanism,
    participation: Participation,
    guarantee: Guarantee,
    workload: Workload = PREFIX_SUMS,
    curvature: Quadratic | None = None,
) -> dict[str, Any]:
    """The figures that `account` and `compare` report, with the keys that their JSON has.

    With a `curvature` among them is "loss": what the noise adds to it at the end, per (clip norm / cohort)².
    """
    norms = error_norms(mechanism, guarantee.rounds, workload)
    sigma = guarantee.noise_multiplier
    numbers = describe(mechanism)
    return {
        "mechanism": numbers.pop("name"),
        "parameters": numbers,
        "noise_multiplier": sigma,
        "sensitivity": guarantee.proof.sensitivity,
        "sensitivity_exact": guarantee.proof.exact,
        "rmse": norms.rmse(sigma),
        "max_se": norms.max_se(sigma),
        **({} if curvature is None else {"loss": final_loss(mechanism, guarantee.rounds, curvature, stddev=sigma)}),
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "adjacency": guarantee.adjacency,
        **when(participation),
        "released": guarantee.released,
        "method": guarantee.proof.method,
        "exact": guarantee.proof.exact,
        "failure_probability": guarantee.proof.failure_probability,
        "condition": guarantee.condition,
    }


def sensitivity_text(values: dict[str, Any]) -> str:
    """The sensitivity of `figures`, with ≤ before it where it is an upper bound."""
    if values["sensitivity"] is None:
        return "–"
    return f"{'' if values['sensitivity_exact'] else '≤ '}{number(values['sensitivity'])}"


def key_value_table(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """Two columns: what, and its value."""
    table = Table(title=escape(title), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(clean(value, MOST_SHOWN)))
    return table


def number(value: object) -> str:
    """Six digits, or a dash for nothing."""
    return f"{value:.6g}" if isinstance(value, int | float) else "–"


@contextmanager
def status(quiet: bool, what: str = "calculating") -> Iterator[Callable[[str], None]]:
    """A line on standard error with the time that has passed, which the yielded function rewrites; none if `quiet`.

    Where standard error is no terminal, but a file or a pipe, a new line is written where the last one is ten seconds old.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=complaints, transient=True, disable=quiet or not complaints.is_terminal) as line:
        task = line.add_task(what, total=None)
        begun = written = time.monotonic()

        def say(text: str) -> None:
            nonlocal written
            now = time.monotonic()
            if not quiet and not complaints.is_terminal and now - written >= 10:  # seconds
                written = now
                print(f"{what}: {text}, {now - begun:.0f} s", file=sys.stderr)
            line.update(task, description=f"{what}: {escape(text)}")

        yield say
