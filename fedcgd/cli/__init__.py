"""The `fedcgd` command: choose a mechanism, find its noise, know its ε, check a claim."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import click

from fedcgd import __version__
from fedcgd.cli.commands import COMMANDS, KEEPER_COMMANDS, LEDGER_COMMANDS
from fedcgd.cli.declare import command
from fedcgd.cli.usage import CarefulCommand, CarefulGroup
from fedcgd.optimisation.table import TABLE


def _commands(table: dict[str, tuple[type, str]]) -> dict[str, CarefulCommand]:
    return {name: command(name, options, _on_use(work)) for name, (options, work) in table.items()}


def _on_use(work: str) -> Callable[[Any], int | None]:
    """The function MODULE:FUNCTION, which is imported when it is called."""
    module, _, name = work.partition(":")
    return lambda asked: getattr(import_module(module), name)(asked)


app = CarefulGroup(
    "fedcgd",
    commands={
        **_commands(COMMANDS),
        "ledger": CarefulGroup(
            "ledger",
            commands=_commands(LEDGER_COMMANDS),
            help="Look at the durable record of a run, check it, and end it.",
        ),
        "keeper": CarefulGroup(
            "keeper",
            commands=_commands(KEEPER_COMMANDS),
            help="Keep a share of a run's noise: make a key, look at what was opened, check it against others, and end it.",
        ),
    },
    help="Noise, ε and errors of mechanisms for differentially private training. Every ε is an upper bound.",
    epilog="Exit codes: 0 done, and nothing speaks against the claim; 1 refuted, or a record contradicts itself; 2 the input is "
    "wrong, or a file cannot be read or written; 3 fedcgd itself has failed.",
)
click.version_option(__version__, prog_name="fedcgd", message="%(prog)s %(version)s")(app)
app.commands["compare"].epilog = "\n\n".join(
    ["Mechanisms:", *(f"{row.spelling} — {row.help}" for row in TABLE.values())]
)
