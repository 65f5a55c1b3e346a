"""The tool that changes the code to see whether tests fail: what it changes, and that a sample can be repeated."""

import sys
import tomllib
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "mutants"

SOURCE = '''"""Words."""


def bound(x: float | None, total: list[float]) -> float:
    if x is None or x < 0:
        raise ValueError(f"x must be at least 0, got {x - 1}")
    check(x)
    total += [1]
    return min(clip(x, 2), x.copy())
'''


@pytest.fixture
def operators(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TOOL))
    import operators

    monkeypatch.setattr(operators, "ROOT", tmp_path)
    (tmp_path / "source.py").write_text(SOURCE)
    yield operators
    del sys.modules["operators"]


def changed(mutant) -> tuple[str, str]:
    """The line before and after, without double spaces."""
    before, after = (" ".join(line[1:].split()) for line in mutant.diff.splitlines() if line[:1] in "+-")
    return before, after.replace("( ", "(")


def test_what_breaks_a_guarantee_is_among_the_changes(operators):
    changes = {changed(mutant) for mutant in operators.mutants("source.py") if mutant.text}
    result = "return min(clip(x, 2), x.copy())"
    for change in (
        ("check(x)", "pass"),
        ("total += [1]", "pass"),
        ('raise ValueError(f"x must be at least 0, got {x - 1}")', "pass"),
        (result, "return min((x), x.copy())"),
        (result, "return min(clip(x, 2), x)"),
        (result, "return max(clip(x, 2), x.copy())"),
        (result, "return 0.9 * (min(clip(x, 2), x.copy()))"),
        (result, "return min(clip(x, 3), x.copy())"),
        ("if x is None or x < 0:", "if x is None or x <= 0:"),
        ("if x is None or x < 0:", "if not x is None or x < 0:"),
    ):
        assert change in changes
    everything = "\n".join(new for _, new in changes)
    assert "float |" not in everything  # types are left alone
    assert "{x + 1}" not in everything  # and so are the words of errors


def test_an_exception_of_a_module_makes_no_mutant_and_no_error(operators, tmp_path):
    (tmp_path / "source.py").write_text("try:\n    x = 1\nexcept (OSError, module.Error):\n    x = 2\n")
    texts = {mutant.operator: mutant.text for mutant in operators.mutants("source.py")}
    assert texts["NumberReplacer"]
    assert not texts["ExceptionReplacer"]


def test_names_stay_where_the_lines_around_stay(operators, tmp_path):
    before = {mutant.name for mutant in operators.mutants("source.py")}
    assert len(before) == len(operators.mutants("source.py"))
    (tmp_path / "source.py").write_text("# one line more\n" + SOURCE)
    assert {mutant.name for mutant in operators.mutants("source.py")} == before
    (tmp_path / "source.py").write_text(SOURCE.replace("x < 0", "x < 7"))
    after = {mutant.name for mutant in operators.mutants("source.py")}
    assert before & after != before


def test_the_line_of_a_change_finds_its_tests(operators):
    lines = {changed(mutant)[0]: mutant.lines for mutant in operators.mutants("source.py") if mutant.text}
    assert lines["if x is None or x < 0:"] == (5, 5)
    assert lines["total += [1]"] == (8, 8)


def test_every_planted_bug_has_one_place_in_the_code():
    for bug in tomllib.loads((TOOL / "planted.toml").read_text())["bug"]:
        source = (TOOL.parents[1] / bug["file"]).read_text()
        assert source.count(bug["before"]) == 1, bug["name"]
        compile(source.replace(bug["before"], bug["after"]), bug["file"], "exec")
