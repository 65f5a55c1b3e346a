"""What the command line says when something is wrong: one line with the remedy, an example of the command, and an exit code."""

import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any

import click
from click import Context
from click.exceptions import Abort, ClickException, NoArgsIsHelpError, UsageError
from rich.console import Console
from rich.markup import escape

from fedcgd.support.extras import missing_package


class Exit(IntEnum):
    """What a command ends with; 128 and more as shells have it for signals."""

    CONTRADICTED = 1
    """A claim is refuted, or a record contradicts itself."""
    BAD_INPUT = 2
    INTERNAL = 3
    """A mistake in fedcgd: Python's 1 would say that a claim is refuted."""
    INTERRUPTED = 130
    BROKEN_PIPE = 141


class Terminal(Console):
    """Rich's console, without an exit code of its own where nobody reads any more."""

    def on_broken_pipe(self) -> None:
        """Leaves it to the command."""
        raise


complaints = Terminal(stderr=True)

_OPTIONS = {"max_participations": "participations", "min_separation": "separation", "mean_share": "uncentred"}
"""What messages of the library call a setting → its option, where that is not the same with dashes."""
_NAME = re.compile(
    rf"\b({'|'.join(_OPTIONS)}|noise_multiplier|sampling_rate|clip_norm|learning_rate|max_cohort|max_rounds|hidden_layers)\b"
    r"|^(epsilon|delta|rounds|released|participations|trials|confidence|users|buffers|classes|features|momentum|warmup)"
    r"(?= must be)"
)


def in_options(message: str) -> str:
    """A message of the library, with the names of options in place of those of Python's arguments."""
    return _NAME.sub(lambda found: f"--{_OPTIONS.get(found[0], found[0]).replace('_', '-')}", message)


class CarefulCommand(click.Command):
    """A command whose errors are one line on standard error, or with --json an object on standard output; never exit code 1.

    1 is for a claim that is refuted and a record that contradicts itself, which a command says by what it returns.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"context_settings": {"help_option_names": ["-h", "--help"]}} | settings)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **settings: Any) -> Any:
        code, message = Exit.BAD_INPUT, ""
        try:
            sys.exit(super().main(args, *rest, **settings | {"standalone_mode": False}))
        except NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
        except UsageError as error:
            message = re.sub(r"(?<![.?])$", ".", error.format_message()) + _example(error.ctx)
        except ClickException as error:
            message = error.format_message()
        except ModuleNotFoundError as error:
            message = missing_package(error)
        except MemoryError:
            message = "this takes more memory than there is; ask for fewer rounds, or for fewer bins (--separation)"
        except Abort:
            code = Exit.INTERRUPTED
        except ValueError as error:
            message = in_options(str(error))
        except OSError as error:
            message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        except Exception:
            traceback.print_exc()
            code, message = Exit.INTERNAL, "this is a bug in fedcgd, not in your input; no result was computed"
        if message:
            _complain(message, code, as_json="--json" in (sys.argv[1:] if args is None else args))
        sys.exit(code)

    def invoke(self, ctx: Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # who reads has read enough, as `head` has
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(Exit.BROKEN_PIPE)


class CarefulGroup(CarefulCommand, click.Group):
    """A group whose errors are said in that way too, and whose commands are listed as they are declared."""

    def list_commands(self, ctx: Context) -> list[str]:
        """In the order in which they are declared."""
        return list(self.commands)


def _example(ctx: Context | None) -> str:
    """The line of a command's help that begins with `Example:`."""
    example = re.search(r"Example: .*", (ctx and ctx.command.help) or "")
    return f" {example[0]}" if example else ""


def _complain(message: str, code: int, *, as_json: bool) -> None:
    """Say what is wrong: in one line on standard error, or as an object on standard output."""
    with suppress(OSError):  # a disk that is full takes no object either
        if as_json:
            click.echo(json.dumps({"error": message, "exit_code": code}, ensure_ascii=False))
            return
    complaints.print(f"[bold red]Error:[/bold red] {escape(message)}", soft_wrap=True, highlight=False)
