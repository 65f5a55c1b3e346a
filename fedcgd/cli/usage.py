"""What the command line says when it is called in a wrong way: all that is missing, what was probably meant, what is refused."""

import json
import os
import re
import sys
import traceback
from collections.abc import Collection, Sequence
from contextlib import suppress
from difflib import get_close_matches
from enum import IntEnum
from typing import Any

import click
from click import Context, Parameter
from click.exceptions import (
    Abort,
    BadOptionUsage,
    BadParameter,
    ClickException,
    MissingParameter,
    NoArgsIsHelpError,
    NoSuchOption,
    UsageError,
)
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


HELP = {"help_option_names": ["-h", "--help"]}


class Terminal(Console):
    """Rich's console, without an exit code of its own where nobody reads any more."""

    def on_broken_pipe(self) -> None:
        """Leaves it to the command."""
        raise


complaints = Terminal(stderr=True)

# What a message of the library calls a setting, and the option that sets it.
_OPTIONS = {
    "max_participations": "--participations",
    "min_separation": "--separation",
    "noise_multiplier": "--noise-multiplier",
    "sampling_rate": "--sampling-rate",
    "clip_norm": "--clip-norm",
    "learning_rate": "--learning-rate",
    "max_cohort": "--max-cohort",
    "max_rounds": "--max-rounds",
    "hidden_layers": "--hidden-layers",
    "mean_share": "--uncentred",
}
_NAME = re.compile(rf"\b({'|'.join(_OPTIONS)})\b")
_SUBJECT = re.compile(
    r"^(epsilon|delta|rounds|released|participations|trials|confidence|users|buffers|classes|features|momentum"
    r"|warmup)(?= must be)"
)

# What other programs and papers call an option of ours.
OTHER_NAMES = {
    "--sigma": "--noise-multiplier",
    "--noise": "--noise-multiplier",
    "--noise-scale": "--noise-multiplier",
    "--eps": "--epsilon",
    "--target-epsilon": "--epsilon",
    "--target-delta": "--delta",
    "--steps": "--rounds",
    "--iterations": "--rounds",
    "--n": "--rounds",
    "--epochs": "--participations",
    "--turns": "--participations",
    "--k": "--participations",
    "--b": "--separation",
    "--min-separation": "--separation",
    "--min-sep": "--separation",
    "--q": "--sampling-rate",
    "--sample-rate": "--sampling-rate",
    "--lambda": "--mechanism lambda-cgd:λ",
    "--lam": "--mechanism lambda-cgd:λ",
    "--bands": "--mechanism NAME:p",
    "--clip": "--clip-norm",
    "--max-grad-norm": "--clip-norm",
}


def in_options(message: str) -> str:
    """A message of the library, with the names of options in place of those of Python's arguments."""
    return _SUBJECT.sub(r"--\1", _NAME.sub(lambda found: _OPTIONS[found[0]], message))


def meant(word: str, known: Collection[str]) -> str:
    """`; did you mean …?` for what is close to `word` among `known`, or nothing."""
    found = get_close_matches(word, known, n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(found)}?" if found else ""


class _Reporting(click.Command):
    """A command whose errors are one line on standard error, or with --json an object on standard output; never exit code 1.

    1 is for a claim that is refuted and a record that contradicts itself, which a command says by what it returns.
    """

    def main(self, args: Sequence[str] | None = None, *rest: Any, **settings: Any) -> Any:
        code, message = Exit.BAD_INPUT, ""
        try:
            sys.exit(super().main(args, *rest, **settings | {"standalone_mode": False}))
        except NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
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


def _complain(message: str, code: int, *, as_json: bool) -> None:
    """Say what is wrong: in one line on standard error, or as an object on standard output."""
    with suppress(OSError):  # a disk that is full takes no object either
        if as_json:
            click.echo(json.dumps({"error": message, "exit_code": code}, ensure_ascii=False))
            return
    complaints.print(f"[bold red]Error:[/bold red] {escape(message)}", soft_wrap=True, highlight=False)


class CarefulGroup(_Reporting, click.Group):
    """Group that suggests the nearest command for one that does not exist."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"context_settings": HELP} | settings)

    def list_commands(self, ctx: Context) -> list[str]:
        """In the order in which they are declared."""
        return list(self.commands)

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except NoSuchOption as error:
            raise _no_such_option(self, error, ctx) from None

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in names:
            hint = meant(args[0], names) or f"; the commands are {', '.join(names)}"
            raise UsageError(f"there is no command {args[0]}{hint}", ctx)
        return super().resolve_command(ctx, args)


class CarefulCommand(_Reporting):
    """A command that names all missing options at once, and what was meant by an option that it does not have."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"context_settings": HELP} | settings)

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except NoSuchOption as error:
            raise _no_such_option(self, error, ctx) from None
        except BadOptionUsage as error:
            raise UsageError(f"{error.option_name} needs a value{self._example()}", ctx) from None
        except MissingParameter as error:
            missing = self._missing(ctx, given) or ([error.param] if error.param else [])
            names = [_name(parameter, ctx) for parameter in missing]
            raise UsageError(f"missing {', '.join(names)}{self._example()}", ctx) from None
        except BadParameter as error:
            name = _name(error.param, ctx) if error.param else "a value"
            raise UsageError(f"{name}: {error.message}", ctx) from None
        except UsageError:  # what is left over
            _, left, _ = self.make_parser(ctx).parse_args(args=list(given))
            taken = [_name(parameter, ctx) for parameter in self.params if parameter.param_type_name == "argument"]
            what = " ".join([*taken, "and options"]) if taken else "options only"
            raise UsageError(f"too many words: {' '.join(left)}; it takes {what}{self._example()}", ctx) from None

    def _missing(self, ctx: Context, args: list[str]) -> list[Parameter]:
        values, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        return [p for p in self.params if p.required and p.name is not None and _is_empty(values.get(p.name))]

    def _example(self) -> str:
        """The line of the help that begins with `Example:`."""
        for line in (self.help or "").splitlines():
            if line.strip().startswith("Example:"):
                return f". {line.strip()}"
        return ""


def _no_such_option(command: click.Command, error: NoSuchOption, ctx: Context) -> UsageError:
    name = error.option_name
    options = [option for parameter in command.params for option in parameter.opts]
    if name in OTHER_NAMES and OTHER_NAMES[name].split()[0] in options:
        hint = f"; it is called {OTHER_NAMES[name]} here"
    else:
        hint = meant(name, options)
    return UsageError(f"there is no option {name}{hint}", ctx)


def _is_empty(value: Any) -> bool:
    return value is None or value == () or type(value).__name__ == "Sentinel"


def _name(parameter: Parameter, ctx: Context) -> str:
    return parameter.opts[0] if parameter.param_type_name == "option" else parameter.make_metavar(ctx)
