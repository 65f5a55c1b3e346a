"""Imports point down only, in no circle, and the core knows no framework."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"fedcgd": ROOT, "fedcgd_flower": ROOT / "strategies"}
PACKAGES |= dict.fromkeys(("fedcgd_simulations", "fedcgd_experiments"), ROOT / "simulations")

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
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {module_name(path, root): path for name, root in PACKAGES.items() for path in (root / name).rglob("*.py")}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in SOURCES.items()}
FACADES = {module for module, path in SOURCES.items() if path.name == "__init__.py"}
"""They import their parts for type checkers, and give them out when they are used."""


def imports(module: str, *, running: bool = False) -> set[str]:
    """What a module imports, wherever in it: a name of a package only where a module is taken from it, or its name is a text.

    `running` leaves out what is for type checkers alone.
    """
    names = set()
    todo: list[ast.AST] = [TREES[module]]
    while todo:
        node = todo.pop()
        if running and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import; every file has one import name"
            below = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in SOURCES else str(node.module) for name in below.values()}
        elif isinstance(node, ast.Constant) and node.value in SOURCES:
            names.add(node.value)
    return names


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def layer(module: str) -> int | None:
    """The row of the longest name in LAYERS that is this module, or a package that it is in."""
    found = {name: row for row, names in enumerate(LAYERS) for name in names if is_in(module, name)}
    return found[max(found, key=len)] if found else None


def test_imports_point_down() -> None:
    assert len(SOURCES) > 300
    # The façade names things of every layer, and imports none: tests/project/test_facade.py.
    rows = {module: layer(module) for module in SOURCES if module != "fedcgd"}
    assert [module for module, row in rows.items() if row is None] == [], "add them to LAYERS"
    up = [(module, name) for module, row in rows.items() for name in imports(module) if (layer(name) or 0) > (row or 0)]
    assert up == []


def test_frameworks_stay_where_they_belong() -> None:
    elsewhere = [
        (module, name)
        for module in SOURCES
        for name in imports(module)
        if (allowed := FRAMEWORKS.get(name.partition(".")[0])) and not any(is_in(module, place) for place in allowed)
    ]
    assert elsewhere == []


def test_no_module_imports_itself_by_way_of_others_also_inside_functions() -> None:
    graph = {
        module: imports(module, running=True) & SOURCES.keys() - FACADES - {module}
        for module in SOURCES.keys() - FACADES
    }
    TopologicalSorter(graph).prepare()  # raises CycleError
