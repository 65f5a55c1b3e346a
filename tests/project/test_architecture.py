"""Imports point down only, and the core knows no framework."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "fedcgd": ROOT,
    "fedcgd_flower": ROOT / "strategies",
    "fedcgd_simulations": ROOT / "simulations",
    "fedcgd_experiments": ROOT / "simulations",
}

# Each module may import from its own row and from the rows above it.
LAYERS: list[set[str]] = [
    {"fedcgd.native", "fedcgd.noise", "fedcgd.participation", "fedcgd.support"},
    {"fedcgd.clipping", "fedcgd.mechanisms", "fedcgd.noise.quantisation", "fedcgd.noise.tensors"},
    {"fedcgd.quadratic"},
    {"fedcgd.optimisation"},
    {"fedcgd.curvature"},
    {"fedcgd.accounting"},
    {"fedcgd.plan"},
    {"fedcgd.ledger"},
    {"fedcgd.release"},
    {"fedcgd.planning"},
    {"fedcgd.audit", "fedcgd.keepers", "fedcgd.central"},
    {"fedcgd.opacus", "fedcgd_flower"},
    {"fedcgd.cli", "fedcgd_simulations"},
    {"fedcgd_experiments"},
]

# The frameworks, and the only places that may know them.
FRAMEWORKS = {
    "flwr": {"fedcgd_flower", "fedcgd_simulations", "fedcgd_experiments"},
    "ray": {"fedcgd_simulations", "fedcgd_experiments"},
    "opacus": {"fedcgd.opacus", "fedcgd_simulations", "fedcgd_experiments"},
    "sklearn": {"fedcgd_simulations", "fedcgd_experiments.planner_trial"},
    "torchvision": {"fedcgd_simulations"},
    "transformers": {"fedcgd_simulations"},
}


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, Path]:
    found = {}
    for package, root in PACKAGES.items():
        for path in (root / package).rglob("*.py"):
            found[module_name(path, root)] = path
    return found


@cache
def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; every file has one import name"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Constant) and node.value in SOURCES
        ):  # what is imported by its name, when it is called
            names.add(node.value)
    return names


def layer(module: str) -> int | None:
    """The row of the longest name in LAYERS that is this module, or a package that it is in."""
    found = {
        name: row
        for row, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(f"{name}.")
    }
    return found[max(found, key=len)] if found else None


SOURCES = sources()


def test_there_is_something_to_check() -> None:
    assert {"fedcgd.plan", "fedcgd_flower.strategy", "fedcgd_simulations.server_app"} <= set(SOURCES)


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_imports_point_down(module: str) -> None:
    own = layer(module)
    if module == "fedcgd":
        return  # the façade names things of every layer, and imports none: test_import_loads_nothing_heavy
    assert own is not None, f"{module} has no layer: add it to LAYERS"
    for name in imports(SOURCES[module]):
        below = layer(name)
        assert below is None or below <= own, f"{module} imports {name}, which lies above it"


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_frameworks_stay_where_they_belong(module: str) -> None:
    for name in imports(SOURCES[module]):
        allowed = FRAMEWORKS.get(name.partition(".")[0])
        if allowed is not None:
            assert any(module == place or module.startswith(f"{place}.") for place in allowed), (
                f"{module} imports {name}"
            )


def test_no_framework_is_loaded_by_the_core() -> None:
    reached: set[str] = set()
    todo = {"fedcgd.plan"}
    while todo:
        module = todo.pop()
        reached.add(module)
        todo |= {name for name in imports(SOURCES[module]) if name in SOURCES and name != "fedcgd"} - reached
    outside = {name.partition(".")[0] for module in reached for name in imports(SOURCES[module])}
    assert not outside & set(FRAMEWORKS)


def edges(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it: a package counts only where a name of its own is taken from it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                names.add(below if below in SOURCES else str(node.module))
    return names & SOURCES.keys()


def circles(graph: dict[str, set[str]]) -> list[str]:
    """What is left when modules that import nothing, or that nobody imports, are taken away again and again."""
    left = {module: set(targets) - {module} for module, targets in graph.items()}
    while left:
        wanted = set().union(*left.values())
        ends = {module for module, targets in left.items() if not targets or module not in wanted}
        if not ends:
            break
        left = {module: targets - ends for module, targets in left.items() if module not in ends}
    return sorted(left)


def test_no_module_imports_itself_by_way_of_others_also_inside_functions() -> None:
    # A façade imports its parts for type checkers, and gives them out when they are used.
    facades = {module for module, path in SOURCES.items() if path.name == "__init__.py"}
    graph = {module: edges(path) - facades for module, path in SOURCES.items() if module not in facades}
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == ["b", "c"]


def test_the_stream_does_not_know_what_makes_its_numbers_quickly() -> None:
    assert not [name for name in edges(SOURCES["fedcgd.noise.stream"]) if "compiled" in name or "machine" in name]


def narrows(test: ast.expr) -> bool:
    """Whether an assertion tells a type checker something (`x is not None`, `isinstance(x, T)`), and no more."""
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name):
        return test.func.id == "isinstance"
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.IsNot)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    )


@pytest.mark.parametrize("package", ["fedcgd", "fedcgd_flower"])
def test_nothing_is_checked_by_an_assertion_which_python_may_leave_out(package: str) -> None:
    """`python -O` leaves assertions out."""
    checks = [
        f"{module}:{node.lineno}"
        for module, path in SOURCES.items()
        if module == package or module.startswith(f"{package}.")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert) and not narrows(node.test)
    ]
    assert checks == []
