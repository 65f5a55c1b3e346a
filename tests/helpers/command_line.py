"""The command line as a user calls it, on a terminal that is wide enough for every table."""

import json

from click.testing import CliRunner, Result

from fedcgd.cli import app


def run(*words: object) -> Result:
    """`fedcgd` with these words, paths among them."""
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", "TERM": "dumb"})


def figures(*words: object):
    """What `--json` prints."""
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
