"""The `fedcgd` command: choose a mechanism, find its noise, know its ε."""

import typer

from fedcgd.cli.budget import calibrate_command, epsilon_command
from fedcgd.cli.compare import compare_command

app = typer.Typer(
    help="Noise, ε and errors of mechanisms for differentially private training. Every ε is an upper bound.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("calibrate")(calibrate_command)
app.command("epsilon")(epsilon_command)
app.command("compare")(compare_command)
