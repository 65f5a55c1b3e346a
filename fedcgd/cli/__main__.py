"""`python -m fedcgd.cli`: the `fedcgd` command."""

from fedcgd.cli import app

if __name__ == "__main__":
    app(prog_name="fedcgd")
