"""The command line as a user calls it, on a terminal that is wide enough for every table."""

import json
import re

from click.testing import CliRunner, Result

from fedcgd.cli import app


def run(*words: object) -> Result:
    """`fedcgd` with these words, paths among them."""
    typed = [str(word) for word in words]
    return CliRunner().invoke(app, typed, env={"COLUMNS": "200", "TERM": "dumb"}, prog_name="fedcgd")


def figures(*words: object):
    """What `--json` prints."""
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def shown(result: Result) -> str:
    """What people read, errors too, without the lines of tables, and a space wherever it breaks."""
    return re.sub(r"[│┃╭╮╰╯─\s]+", " ", result.output)
