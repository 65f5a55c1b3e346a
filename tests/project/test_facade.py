"""The door: `import fedcgd` gives what a user needs, costs nothing, and is typed."""

import subprocess
import sys
from typing import assert_type

import pytest

import fedcgd
import fedcgd_flower
from fedcgd.plan import Plan
from fedcgd_flower.strategy import CorrelatedNoise


def run(program: str) -> str:
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


@pytest.mark.parametrize(
    ("imports", "heavy"),
    [
        ("import fedcgd; dir(fedcgd)", {"torch", "numpy", "scipy", "matplotlib", "dp_accounting", "opacus", "click"}),
        # A deployed node is a new process for each message: what it imports, it imports each time.
        (
            "from fedcgd_flower import clipped_update_mod",
            {"torch", "scipy", "dp_accounting", "fedcgd.accounting", "fedcgd.keepers", "fedcgd.ledger", "fedcgd.plan"},
        ),
    ],
    ids=["library", "node"],
)
def test_imports_load_nothing_heavy(imports: str, heavy: set[str]) -> None:
    assert run(f"import sys; {imports}; print(*{heavy} & set(sys.modules))") == ""


def test_a_server_needs_no_torch_and_what_does_names_its_extra() -> None:
    program = (
        "import sys\nclass Finder:\n    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] == 'torch':\n            raise ModuleNotFoundError('hidden', name=name)\n"
        "sys.meta_path.insert(0, Finder())\nimport fedcgd.cli, fedcgd.keepers, fedcgd_flower.strategy\n"
    )
    for package, name in (
        ("fedcgd.opacus", "CorrelatedPrivacyEngine"),
        ("fedcgd.central", "PrivateGradient"),
        ("fedcgd_flower", "one_gradient_step"),
    ):
        program += f"try:\n    from {package} import {name}\nexcept ImportError as error:\n    print(error)\n"
    assert run(program).count('"fedcgd[torch]"') == 3


def test_every_name_is_there_and_is_found_by_dir() -> None:
    for package in (fedcgd, fedcgd_flower):
        assert all(getattr(package, name) is not None for name in package.__all__)
        assert sorted(set(package.__all__)) == sorted(package.__all__) == sorted({*dir(package)} - {"__version__"})
    with pytest.raises(AttributeError, match=r"'Plann'.*Plan"):
        _ = fedcgd.Plann
    program = "from fedcgd import *; print(Plan.__name__, opacus.CorrelatedPrivacyEngine.__name__)"
    assert run(program).split() == ["Plan", "CorrelatedPrivacyEngine"]


def test_type_checkers_see_the_names() -> None:
    """mypy reads this file: a name that it does not know would be Any, and refused by `assert_type`."""
    assert assert_type(fedcgd.Plan, type[Plan]) is Plan
    assert assert_type(fedcgd_flower.CorrelatedNoise, type[CorrelatedNoise]) is CorrelatedNoise
