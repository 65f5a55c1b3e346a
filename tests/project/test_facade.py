"""The door: `import fedcgd` gives what a user needs, costs nothing, and is typed."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import fedcgd
import fedcgd_flower

ROOT = Path(__file__).resolve().parents[2]


def run(program: str) -> str:
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'scipy', 'matplotlib', 'dp_accounting', 'opacus', 'click'}"
    assert run(f"import sys, fedcgd; dir(fedcgd); print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_a_node_does_not_load_what_the_server_needs() -> None:
    """A deployed node is a new process for each message: what it imports, it imports each time."""
    heavy = "{'torch', 'scipy', 'dp_accounting', 'fedcgd.accounting', 'fedcgd.ledger', 'fedcgd_flower.strategy'}"
    assert (
        run(f"import sys; from fedcgd_flower import clipped_update_mod; print(sorted({heavy} & set(sys.modules)))")
        == "[]"
    )


def test_every_name_of_the_strategies_is_there() -> None:
    for name in fedcgd_flower.__all__:
        assert getattr(fedcgd_flower, name) is vars(fedcgd_flower)[name]
    assert dir(fedcgd_flower) == fedcgd_flower.__all__ == sorted(fedcgd_flower.__all__)


def test_every_name_is_there_and_is_found_by_dir() -> None:
    for name in fedcgd.__all__:
        assert getattr(fedcgd, name) is not None
    assert set(dir(fedcgd)) == {*fedcgd.__all__, "__version__"}
    assert sorted(fedcgd.__all__) == sorted(set(fedcgd.__all__))
    assert 15 <= len(fedcgd.__all__) <= 35
    with pytest.raises(AttributeError, match=r"no attribute 'Plann'; it has .*Plan"):
        _ = fedcgd.Plann


def test_names_are_those_of_the_modules() -> None:
    from fedcgd.ledger import Ledger
    from fedcgd.plan import Plan

    assert (fedcgd.Plan, fedcgd.Ledger) == (Plan, Ledger)
    program = "import fedcgd; print(fedcgd.opacus.CorrelatedPrivacyEngine.__name__)\n"
    program += "from fedcgd import *; print(Plan.__name__, LambdaCGD(0.5))"
    assert run(program) == "CorrelatedPrivacyEngine\nPlan LambdaCGD(lam=0.5)"


def test_one_version() -> None:
    assert fedcgd.__version__ == version("fedcgd")


def test_type_checkers_see_the_names(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import fedcgd\n"
        "run = fedcgd.Participation(rounds=210, min_separation=21)\n"
        "plan = fedcgd.Plan.calibrated(fedcgd.LambdaCGD(0.9), run, clip_norm=1.0, epsilon=8, delta=1e-5)\n"
        "reveal_type(plan)\n"
        "fedcgd.LambdaCGD('auto')\n"
    )
    # Libraries are Any, and what the program does not name, or it would take ten times as long.
    libraries = ["torch", "numpy", "scipy", "cryptography", "dp_accounting", "matplotlib"]
    others = [f"fedcgd.{name}" for name in ("accounting", "keepers", "ledger", "opacus", "optimisation")]
    config = tmp_path / "mypy.ini"
    config.write_text(
        "[mypy]\nfollow_imports = silent\nfollow_imports_for_stubs = True\n"
        f"[mypy-{','.join(f'{name}.*' for name in libraries + others)}]\nfollow_imports = skip\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path), str(program)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert 'Revealed type is "fedcgd.plan.Plan"' in found
    assert 'Argument 1 to "LambdaCGD" has incompatible type "str"; expected "float"' in found
