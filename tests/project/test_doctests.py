"""The examples in docstrings print what they say."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    for root, package in ((ROOT, "fedcgd"), (ROOT / "strategies", "fedcgd_flower"))
    for path in sorted((root / package).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    module = import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = [test for test in finder.find(module, module.__name__) if test.examples]
    assert examples
    for test in examples:
        report: list[str] = []
        failed = doctest.DocTestRunner().run(test, out=report.append).failed
        assert not failed, "".join(report)
