"""The `fedcgd` command: choose a mechanism, find its noise, know its ε, check a claim."""

import traceback
from importlib import import_module
from typing import Annotated, Any

import typer
from click import ClickException, Command, Context
from click.exceptions import Abort, Exit

from fedcgd import __version__
from fedcgd.cli.usage import CarefulCommand, CarefulGroup, fail
from fedcgd.extras import missing_package

EXIT_INTERNAL = 3

# name → where the command is, and its first line of help. What a command needs is imported when it is called.
COMMANDS = {
    "plan": (
        "fedcgd.cli.plan:plan_command",
        "Rank whole recipes for a budget, DP-SGD among them: mechanism, sampling, cohort, rounds, schedule, rate.",
    ),
    "calibrate": (
        "fedcgd.cli.budget:calibrate_command",
        "Find the smallest noise multiplier σ that keeps the whole run within (ε, δ).",
    ),
    "epsilon": (
        "fedcgd.cli.budget:epsilon_command",
        "Find an upper bound on ε for a given noise multiplier σ, for the whole run or the rounds released so far.",
    ),
    "delta": (
        "fedcgd.cli.budget:delta_command",
        "Find an upper bound on δ at some ε for a given noise multiplier σ, for the whole run or the rounds released so far.",
    ),
    "compare": (
        "fedcgd.cli.compare:compare_command",
        "Compare mechanisms: σ, sensitivity and errors at one budget, best RMSE first; with --curvature, least loss first.",
    ),
    "select-lambda": (
        "fedcgd.cli.select:select_lambda_command",
        "Choose λ of lambda-cgd from public numbers, never from data.",
    ),
    "select-bands": (
        "fedcgd.cli.select:select_bands_command",
        "Choose the number of bands p of a mechanism: more cancel more noise, fewer leave more privacy to sampling.",
    ),
    "curve": (
        "fedcgd.cli.curve:curve_command",
        "Measure the curvature of a model's loss on public examples, and fit noise to it.",
    ),
    "theory": (
        "fedcgd.cli.theory:theory_command",
        "Show what the noise of each mechanism adds to the loss on a quadratic with a given spectrum, least first.",
    ),
    "explain": (
        "fedcgd.cli.explain:explain_command",
        "Print the chain of reasoning behind ε, in words and numbers, with what each assumption demands of a deployment.",
    ),
    "audit": (
        "fedcgd.cli.audit:audit_command",
        "Try to refute (ε, δ): of this installation's noise, or with --scores of a federated run. Exit code 1 if refuted.",
    ),
    "report": (
        "fedcgd.cli.report_page:report_command",
        "Write what a run promises, and why: a page for a reviewer, or the privacy statement that goes with its model.",
    ),
    "ledger": ("fedcgd.cli.ledger:app", "Look at the durable record of a run, check it, and end it."),
    "keeper": (
        "fedcgd.cli.keeper:app",
        "Keep a share of a run's noise: make a key, look at what was opened, check it against others, and end it.",
    ),
}


class _CommandsOnDemand(CarefulGroup):
    """The commands of `COMMANDS`, each imported when it is called and not to be listed."""

    def list_commands(self, ctx: Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        return Command(cmd_name, help=COMMANDS[cmd_name][1]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        return name, load(str(name)) if found else None, rest

    def invoke(self, ctx: Context) -> Any:
        """What goes wrong in a command has another exit code than the 1 of a claim that is refuted."""
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, ClickException, Exit, Abort):
            raise
        except ModuleNotFoundError as error:
            fail(missing_package(error))
        except MemoryError:
            fail("this takes more memory than there is; ask for fewer rounds, or for fewer bins (--separation)")
        except Exception:
            traceback.print_exc()
            typer.echo("This is a mistake in fedcgd, not in what you asked. Nothing was found out.", err=True)
            raise typer.Exit(EXIT_INTERNAL) from None


def load(name: str) -> Command:
    """The command of this name, with all that it needs."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found: Any = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    alone = typer.Typer(add_completion=False)
    alone.command(name, cls=CarefulCommand, epilog=getattr(found, "epilog", None))(found)
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=_CommandsOnDemand,
    help="Noise, ε and errors of mechanisms for differentially private training. Every ε is an upper bound.",
    epilog="Exit codes: 0 done, and nothing speaks against the claim; 1 refuted, or a record contradicts itself; 2 the input is "
    "wrong, or a file cannot be read or written; 3 fedcgd itself has failed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedcgd {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version of fedcgd and leave.")
    ] = False,
) -> None:
    pass
