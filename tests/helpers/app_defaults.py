"""The simulation app's run configuration."""

import tomllib
from pathlib import Path

APP = Path(__file__).resolve().parents[2] / "simulations"
DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
