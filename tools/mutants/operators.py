"""Changes to a file of Python, one at a time: Cosmic Ray's operators, and four for what breaks a privacy guarantee."""

import difflib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from parso.tree import NodeOrLeaf

ROOT = Path(__file__).resolve().parent.parent.parent


class Own(Operator):
    """An operator that changes whole nodes to text."""

    def changed(self, node: NodeOrLeaf) -> str | None:
        """The text that `node` becomes, None where the operator does not apply."""
        raise NotImplementedError

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if self.changed(node) is not None:
            yield node.start_pos, node.end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        prefix = node.get_first_leaf().prefix
        return parso.python.tree.Name((prefix or " ") + (self.changed(node) or ""), node.start_pos)

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class DropStatement(Own):
    """A call for its effect, `x += y`, `raise` or `del` → `pass`: a check, a record or a term that is forgotten."""

    def changed(self, node: NodeOrLeaf) -> str | None:
        if node.parent is None or node.parent.type != "simple_stmt":
            return None
        augmented = node.type == "expr_stmt" and str(getattr(node.children[1], "value", "")).endswith("=")
        plain = augmented and node.children[1].value == "="
        called = node.type in ("atom_expr", "power") and node.children[-1].children[0] == "("
        return "pass" if (augmented and not plain) or called or node.type in ("raise_stmt", "del_stmt") else None


class DropCall(Own):
    """`f(x, …)` → `x` and `x.f()` → `x`: a clip, an absolute value, a rounding or a copy that is forgotten."""

    def changed(self, node: NodeOrLeaf) -> str | None:
        if node.type not in ("atom_expr", "power") or node.children[-1].type != "trailer":
            return None
        trailer = node.children[-1]
        casts = node.children[0].type == "name" and node.children[0].value in ("float", "list", "tuple", "str", "super")
        if trailer.children[0] != "(" or node.parent.type == "simple_stmt" or casts:
            return None
        if len(trailer.children) == 2:  # x.f()
            return "".join(part.get_code() for part in node.children[:-2]).strip() if len(node.children) > 2 else None
        arguments = trailer.children[1]
        first = arguments.children[0] if arguments.type == "arglist" else arguments
        return None if first.type in ("argument", "string", "fstring") else f"({first.get_code(include_prefix=False)})"


class SwapBounds(Own):
    """`min` ↔ `max`, `floor` ↔ `ceil`: a bound on the wrong side."""

    pairs = ("min", "max"), ("floor", "ceil"), ("minimum", "maximum")

    def changed(self, node: NodeOrLeaf) -> str | None:
        if node.type == "name" and (node.get_next_leaf() or node) == "(":
            return next((pair[1 - pair.index(node.value)] for pair in self.pairs if node.value in pair), None)
        return None

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        return parso.python.tree.Name(self.changed(node), node.start_pos, prefix=node.prefix)


class ShrinkReturn(Own):
    """`return x` → `return 0.9 * (x)` where a float is promised: a bound or a noise a tenth too small."""

    def changed(self, node: NodeOrLeaf) -> str | None:
        if node.type != "return_stmt" or len(node.children) < 2:
            return None
        function = parso.python.tree.search_ancestor(node, "funcdef")
        promised = function is not None and function.annotation is not None and function.annotation.get_code().strip()
        return f"return 0.9 * ({node.children[1].get_code(include_prefix=False)})" if promised == "float" else None


ALIKE = (
    {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"},
    {"BitAnd", "BitOr", "BitXor", "LShift", "RShift"},
    {"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"},
    {"Is", "IsNot"},
)
"""Operators that are put in each other's place; others mostly raise TypeError, which every test notices."""


def _sensible(name: str) -> bool:
    kind, *change = name.split("_")
    return not kind.startswith(("ReplaceBinary", "ReplaceComparison")) or any(set(change) <= kinds for kinds in ALIKE)


OPERATORS: dict[str, Operator] = {
    name.split("/")[-1]: get_operator(name)()
    for name in operator_names()
    if _sensible(name.split("/")[-1]) and not get_operator(name).arguments()
} | {own.__name__: own() for own in (DropStatement, DropCall, SwapBounds, ShrinkReturn)}


@dataclass(frozen=True)
class Mutant:
    """One change: its operator and place, the first and last line of the statement that holds it, and how to make it.

    `name` stays the same while the lines around the change do.
    """

    path: str
    source: str
    operator: str
    place: tuple[int, int]
    lines: tuple[int, int]
    name: str
    make: Callable[[], str | None]

    @cached_property
    def text(self) -> str:
        """The changed file; empty if it would not compile, or is not changed."""
        try:
            text = self.make()
        except AttributeError:  # Cosmic Ray replaces exceptions by plain names only, and no `module.Error`
            return ""
        return text if text and text != self.source and _compiles(text) else ""

    @cached_property
    def diff(self) -> str:
        """The change with three lines around it, without line numbers."""
        lines = difflib.unified_diff(self.source.splitlines(), self.text.splitlines(), lineterm="", n=3)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def named(*parts: object) -> str:
    """A short hash."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def mutants(path: str) -> list[Mutant]:
    """Every change of a file that leaves types alone, and does more than change the text of an error."""
    source = (ROOT / path).read_text()
    nodes = list(ast_nodes(parso.parse(source)))
    around = ["", "", *source.splitlines(), "", "", ""]  # around[n] is two lines above line n
    found = []
    for name, operator in OPERATORS.items():
        places = [(node, place) for node in nodes for place, _ in operator.mutation_positions(node)]
        for occurrence, (node, place) in enumerate(places):
            if _matters(node):
                twin = places[:occurrence].count((node, place))  # an operator may change one node in several ways
                lines = _statement(node)
                known = named(path, name, place[1], place[0] - lines[0], twin, around[lines[0] - 1 : lines[1] + 4])
                make = partial(mutate_code, source, operator, occurrence)
                found.append(Mutant(path, source, name, place, lines, known, make))
    return found


def _matters(node: NodeOrLeaf) -> bool:
    """Outside annotations, imports, the words of errors and the decorators of values and properties."""
    child = node
    while child.parent is not None:
        parent = child.parent
        if parent.type in ("annassign", "param") and child is getattr(parent, "annotation", parent.children[1]):
            return False
        if parent.type == "tfpdef" or (parent.type == "funcdef" and child is parent.annotation):
            return False
        if parent.type in ("raise_stmt", "import_from", "import_name", "decorator", "fstring"):
            return False
        child = parent
    return bool(node.type != "decorator")


def _statement(node: NodeOrLeaf) -> tuple[int, int]:
    while node.parent is not None and node.parent.type not in ("suite", "file_input", "simple_stmt"):
        node = node.parent
    first = node.start_pos[0]
    if node.type.endswith("_stmt") and node.type.split("_")[0] in ("if", "for", "while", "with", "try"):
        return first, first
    return first, node.end_pos[0]


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True
