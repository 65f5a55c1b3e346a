"""The tool that changes the code to see whether tests fail: what it changes, and that a sample can be repeated."""

import json
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


ENTRY = """
[[mutant]]
file = "{file}"
diff = '''
-{before}
+{after}
'''
why = "it is the same"
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """The check of a tree of one file of `fedcgd`, one test of it and two mutants, of which one survived and is judged."""
    pytest.importorskip("resource", reason="mutants run in forks")
    monkeypatch.syspath_prepend(str(TOOL))
    for name in ("check", "run", "operators", "forks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import check
    import operators
    import run

    for folder in ("fedcgd", "strategies", "tests/noise"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "fedcgd" / "source.py").write_text(SOURCE)
    (tmp_path / "strategies" / "other.py").write_text("")
    (tmp_path / "tests" / "noise" / "test_source.py").write_text(
        "class TestBound:\n    def test_it(self):\n        pass\n"
    )
    (tmp_path / "targets.toml").write_text(
        '[excluded]\n"strategies/*.py" = "nothing"\n[targets]\n"fedcgd/*.py" = ["noise/*.py"]\n'
    )
    (tmp_path / "planted.toml").write_text("bug = []\n")
    for module in (run, operators):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "RESULTS", tmp_path / "record")
    monkeypatch.setattr(check, "JUDGED", tmp_path / "judged.toml")
    killed, survived = [mutant for mutant in operators.mutants("fedcgd/source.py") if mutant.text][:2]
    lines = [{"by": "tests/noise/test_source.py::TestBound::test_it[a::b]", "outcome": "killed"}]
    lines += [{"by": "", "outcome": "survived", "diff": survived.diff}]
    for line, mutant in zip(lines, (killed, survived), strict=True):
        line |= {"mutant": mutant.name, "file": "fedcgd/source.py", "operator": mutant.operator}
    (tmp_path / "record").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before, after = (line[1:].strip() for line in survived.diff.splitlines() if line[:1] in "+-")
    (tmp_path / "judged.toml").write_text(ENTRY.format(file="fedcgd/source.py", before=before, after=after))
    monkeypatch.setattr(sys, "argv", ["check.py"])
    yield check
    for name in ("check", "run", "operators", "forks"):
        sys.modules.pop(name, None)


def replace(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tree: (tree / "fedcgd" / "more.py").write_text(""), ""),  # the row names it
        (lambda tree: (tree / "strategies" / "other.py").unlink(), "names what is gone: strategies/*.py"),
        (lambda tree: replace(tree / "targets.toml", "noise/*", "noise/*s"), "names what is gone: tests/noise/*s.py"),
        (lambda tree: replace(tree / "targets.toml", "fedcgd/*", "fedcgd/s*"), ""),
        (
            lambda tree: (
                replace(tree / "targets.toml", "fedcgd/*", "fedcgd/s*"),
                (tree / "fedcgd" / "more.py").touch(),
            ),
            "neither names nor excludes fedcgd/more.py",
        ),
        (lambda tree: replace(tree / "fedcgd" / "source.py", "x < 0", "x < 9"), "the lines are gone"),
        (lambda tree: replace(tree / "tests" / "noise" / "test_source.py", "test_it", "test_its"), "which is gone"),
        (lambda tree: replace(tree / "judged.toml", 'fedcgd/source.py"', 'fedcgd/other.py"'), "does not say why"),
        (lambda tree: replace(tree / "record", "test_source.py", "test_sources.py"), "which is gone"),
        (lambda tree: replace(tree / "record", '"fedcgd/source.py"', '"fedcgd/sources.py"'), "names the file"),
    ],
)
def test_the_record_the_table_and_the_tree_agree(change, told, check, tmp_path, capsys):
    change(tmp_path)
    assert check.main() == bool(told)
    assert told in capsys.readouterr().err


def test_what_is_gone_is_dropped_and_nothing_else(check, tmp_path, monkeypatch, capsys):
    kept = json.loads((tmp_path / "record").read_text().splitlines()[0])
    replace(tmp_path / "record", kept["mutant"], "0" * 12)
    text = (tmp_path / "judged.toml").read_text()
    (tmp_path / "judged.toml").write_text(ENTRY.format(file="fedcgd/source.py", before="gone()", after="pass") + text)
    assert check.main() == 1
    monkeypatch.setattr(sys, "argv", ["check.py", "--tidy"])
    assert check.main() == 0
    assert len((tmp_path / "record").read_text().splitlines()) == 1
    assert (tmp_path / "judged.toml").read_text().strip() == text.strip()
