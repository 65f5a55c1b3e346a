"""The `fedcgd` command: choose a mechanism, find its noise, know its ε, check a claim."""

import typer

from fedcgd.cli import ledger
from fedcgd.cli.audit import audit_command
from fedcgd.cli.budget import calibrate_command, delta_command, epsilon_command
from fedcgd.cli.compare import compare_command
from fedcgd.cli.explain import explain_command
from fedcgd.cli.report_page import report_command
from fedcgd.cli.select import select_lambda_command

app = typer.Typer(
    help="Noise, ε and errors of mechanisms for differentially private training. Every ε is an upper bound.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("calibrate")(calibrate_command)
app.command("epsilon")(epsilon_command)
app.command("delta")(delta_command)
app.command("compare")(compare_command)
app.command("select-lambda")(select_lambda_command)
app.command("explain")(explain_command)
app.command("audit")(audit_command)
app.command("report")(report_command)
app.add_typer(ledger.app, name="ledger")
