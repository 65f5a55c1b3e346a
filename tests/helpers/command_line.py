"""The command line as a user calls it, on a terminal that is wide enough for every table."""

import json

from typer.testing import CliRunner, Result

from fedcgd.cli import app


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "TERM": "dumb"})


def figures(*words: str):
    """What `--json` prints."""
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
