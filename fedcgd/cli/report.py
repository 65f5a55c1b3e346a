"""How commands print: a table for people, JSON for machines, one clear line for a mistake."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedcgd.mechanisms.mechanism import Mechanism
from fedcgd.mechanisms.workload import PREFIX_SUMS, Workload
from fedcgd.optimisation.catalogue import describe

if TYPE_CHECKING:
    from fedcgd.accounting import Guarantee

EXIT_BAD_INPUT = 2

console = Console()
complaints = Console(stderr=True)


@contextmanager
def explained_errors() -> Iterator[None]:
    """A ValueError inside, or a file that cannot be used, becomes one line on standard error, and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Say what is wrong and leave with exit code 2."""
    complaints.print(f"[bold red]Error:[/bold red] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(EXIT_BAD_INPUT)


def print_json(value: Any) -> None:
    """`value` as JSON on standard output, and nothing else. JSON has no infinity: it becomes the text "inf"."""
    typer.echo(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def check_plot(path: Path | None) -> None:
    """Raise ValueError, before any work, if a plot cannot be written to `path`."""
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"a plot is a .png, .svg or .pdf file, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} for the plot {path.name}; make it first")


def figures(mechanism: Mechanism, guarantee: "Guarantee", workload: Workload = PREFIX_SUMS) -> dict[str, Any]:
    """The figures that `calibrate`, `epsilon` and `compare` report, with the keys that their JSON has."""
    from fedcgd.mechanisms.error import error_norms

    norms = error_norms(mechanism, guarantee.rounds, workload)
    sigma = guarantee.noise_multiplier
    numbers = describe(mechanism)
    return {
        "mechanism": numbers.pop("name"),
        "parameters": numbers,
        "noise_multiplier": sigma,
        "sensitivity": guarantee.sensitivity,
        "rmse": norms.rmse(sigma),
        "max_se": norms.max_se(sigma),
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "adjacency": guarantee.adjacency,
        "sampling": guarantee.sampling,
        "method": guarantee.method,
        "failure_probability": guarantee.failure_probability,
        "condition": guarantee.condition,
    }


def key_value_table(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """Two columns: what, and its value."""
    table = Table(title=escape(title), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def number(value: object) -> str:
    """Six digits, or a dash for nothing."""
    return f"{value:.6g}" if isinstance(value, int | float) else "–"


@contextmanager
def status(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on standard error that the yielded function rewrites; none if `quiet`."""
    if quiet:
        yield lambda text: None
        return
    with complaints.status("calculating") as line:
        yield lambda text: line.update(f"calculating: {escape(text)}")


@contextmanager
def progress(total: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar on standard error that the yielded function moves one step on, naming what comes next; none if `quiet`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=complaints, transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=total)

        def step(description: str) -> None:
            bar.update(task, advance=1 if bar.tasks[0].description else 0, description=escape(description))

        yield step
