"""What people install, tried: `python tools/installs.py`, or `make test-installs`.

    python tools/installs.py                            # every extra of pyproject.toml, and none ("base")
    python tools/installs.py base flower                # these
    python tools/installs.py opacus --keep torch==2.13.0  # a package that is installed first, at this version

Builds the sdist, and the wheel from it, as people's pip does. Then each extra has an environment of its own, with the newest
version of everything that it allows: the lock has no part in it. In it runs what a user of that extra runs: the help of each
command, the example in that help, wrong uses with their exit codes, the README's block that names the extra, a server and a node
with a model in NumPy, a ledger that is verified and reported. Nothing of the checkout is on the path but what is named here.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS: list[str] = [
    "base",
    *(
        name
        for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        if name != "dev"
    ),
]

BUDGET = "--epsilon 1 --delta 1e-5"
WRONG = (
    "acount",
    "--versoin",
    "account",
    "account --rounds",
    "account --rounds ten",
    f"account --rounds 10 {BUDGET} --sampling often",
    f"account --rounds 0 {BUDGET}",
    f"account --mechanism adam --rounds 10 {BUDGET}",
    "ledger verify MISSING",
    "ledger shw",
    "report MISSING -o x.md",
    "keeper show MISSING.toml",
)
"""Each ends with 2 and one line, or with --json an object."""

NEEDS_MORE = {"curve", "report", "watch"}
"""Whose examples need a file or an extra."""

MODULES = """
import importlib, pkgutil
for package in ("fedcgd", "fedcgd_flower"):
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            print(found.name, (error.name or "").partition(".")[0])
"""
EXAMPLES = """
import json
from fedcgd.cli import app
groups = {(): app} | {(name,): each for name, each in app.commands.items()}
found = {words: each for words, each in groups.items()}
for words, group in groups.items():
    for name, each in getattr(group, "commands", {}).items():
        found[*words, name] = each
example = lambda each: " ".join((each.help or "").partition("Example: ")[2].partition("\\n\\n")[0].split())
print(json.dumps({" ".join(words): example(each) for words, each in found.items()}))
"""
LEDGER = """
from pathlib import Path
from fedcgd import LambdaCGD, Ledger, NoiseKey, Participation, Plan
plan = Plan.calibrated(LambdaCGD(0.5), Participation(rounds=4, min_separation=2), clip_norm=1.0, epsilon=8, delta=1e-5)
with Ledger.open(Path("run.db"), plan=plan, configuration={}, key=NoiseKey.from_file(Path("key"), create=True)) as ledger:
    attempt = ledger.plan_round(0, ["ann", "bob"])
    ledger.record_aggregated(0, attempt, 1)
    ledger.record_released(0, attempt, b"model")
"""
FORGED = "import sqlite3; c = sqlite3.connect('run.db'); c.execute('UPDATE users SET participations = 7'); c.commit()"
CURVATURE = """
import torch
from torch.nn.functional import cross_entropy
from fedcgd.curvature.public import Public

def small():
    torch.manual_seed(0)
    return Public(torch.nn.Linear(4, 3), cross_entropy, torch.randn(60, 4), classes=3)
"""
NEEDED_BY = {"torch": {"torch", "simulation", "gpu", "opacus", "nlp", "trainers"}, "flwr": {"flower", "simulation"}}
NEEDED_BY |= {"opacus": {"opacus", "trainers"}, "matplotlib": {"simulation"}, "triton": {"gpu"}}
"""Which extras bring a package."""


class Installed:
    """An environment, and an empty folder to work in. What fails is collected in `failures`."""

    def __init__(self, folder: Path, extra: str) -> None:
        self.extra, self.failures = extra, list[str]()
        self.bin = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
        self.python, self.work = self.bin / "python", folder / "work"
        self.work.mkdir()
        venv.create(folder / "env", with_pip=True)

    def pip(self, *words: str) -> None:
        """Raises CalledProcessError, after pip said why."""
        command = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
        subprocess.run(command, check=True, cwd=self.work)

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """What the command does in the folder; `fedcgd` is the one that was installed."""
        first = str(self.bin / "fedcgd") if command[0] == "fedcgd" else str(command[0])
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(
            [first, *map(str, command[1:])],
            cwd=self.work,
            env=clean | {"PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"} | variables,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
            timeout=900,
        )

    def expect(self, code: int, *command: str | Path, says: str = "", **variables: str) -> str:
        """Standard output of a command that should end with `code` and, in one of its outputs, have the text `says`."""
        ran = self.run(*command, **variables)
        said = " ".join((ran.stdout + ran.stderr).split())
        if ran.returncode != code or says not in said:
            what = " ".join(str(word).strip().replace("\n", "; ")[:100] for word in command)
            self.failures.append(
                f"{what}\n  exit code {ran.returncode}, not {code}, or without {says!r}:\n{said[-2000:]}"
            )
        return ran.stdout


def help_and_examples(on: Installed) -> None:
    """The help of every command; of those that need no file the example."""
    examples: dict[str, str] = json.loads(on.expect(0, on.python, "-c", EXAMPLES))
    if len(examples) < 15:
        on.failures.append(f"{len(examples)} commands were found")
    for words, example in examples.items():
        on.expect(0, "fedcgd", *words.split(), "--help", says="Usage: fedcgd")
        if example and words.split()[0] not in NEEDS_MORE | {"ledger", "keeper"}:
            on.expect(0, *example.split(), FEDCGD_CACHE=str(on.work / "cache"))


def wrong_uses(on: Installed) -> None:
    """Each ends with 2 and names what is wrong."""
    for text in WRONG:
        on.expect(2, "fedcgd", *text.split(), says="Error: ")
        try:
            found = json.loads(on.expect(2, "fedcgd", *text.split(), "--json"))
        except json.JSONDecodeError:
            found = {}
        if found.get("exit_code") != 2:
            on.failures.append(f"fedcgd {text} --json: no JSON")


def modules(on: Installed) -> None:
    """Every module can be imported, but for those that need a package of another extra."""
    for line in on.expect(0, on.python, "-W", "ignore", "-c", MODULES).splitlines():
        module, package = line.split()
        if package not in NEEDED_BY or on.extra in NEEDED_BY[package]:
            on.failures.append(f"{module} cannot be imported: there is no {package}")


def ledger(on: Installed) -> None:
    """A record that is shown, verified, exported and reported; and one that contradicts itself."""
    on.expect(0, on.python, "-c", LEDGER)
    recorded(on, "run.db")
    on.expect(0, "fedcgd", "report", "run.db", "-o", "report.html")
    on.expect(0, on.python, "-c", FORGED)
    on.expect(1, "fedcgd", "ledger", "verify", "run.db", says="Problem")


def recorded(on: Installed, name: str) -> None:
    """The ledger of that name, which is sound."""
    for command in ("ledger show", "ledger show --json", "ledger verify", "ledger compose", "watch --once"):
        on.expect(0, "fedcgd", *command.split(), name)
    on.expect(0, "fedcgd", "ledger", "verify", name, says="no contradiction")
    for page in ("statement.md", "statement.json"):
        on.expect(0, "fedcgd", "report", name, "-o", page)


def keepers(on: Installed) -> None:
    """A keeper's key and card."""
    card = on.expect(0, "fedcgd", "keeper", "new", "keeper.key", "--name", "court")
    (on.work / "keepers.toml").write_text(f"colluding = 0\n{card}", encoding="utf-8")
    for path in ("keeper.key", "keepers.toml"):
        on.expect(0, "fedcgd", "keeper", "show", path)
    on.expect(0, "fedcgd", "keeper", "seal", "keeper.key")


def numpy_run(on: Installed) -> None:
    """A server and a node whose model is NumPy, and their ledger. The grid between them is that of the tests."""
    program = ROOT / "tests" / "helpers" / "numpy_run.py"
    on.expect(0, on.python, "-W", "ignore", program, on.work / "numpy.db")
    recorded(on, "numpy.db")


def curvature(on: Installed) -> None:
    """A model's curvature, and noise that is fitted to it."""
    (on.work / "mine.py").write_text(CURVATURE)
    on.expect(0, "fedcgd", "curve", "mine:small", "--eigenvalues", "5", "-o", "spectrum.json")
    on.expect(0, "fedcgd", "compare", *f"--curvature spectrum.json --rounds 20 {BUDGET} --mechanism dp-sgd".split())


def readme(on: Installed) -> None:
    """The blocks of the README's sections that name this extra, or none, with what those say to install beside it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        named = re.search(r"`pip install \"\.\[(\w+)\]\"([^`]*)`", section)
        if (named[1] if named else "base") != on.extra:
            continue
        for block, output in re.findall(r"^```python\n(.*?)^```$(?:\n+```output\n(.*?)^```$)?", section, re.M | re.S):
            if named and named[2].split():
                on.pip(*named[2].split())
            (on.work / "block.py").write_text(block, encoding="utf-8")
            on.expect(0, on.python, "-W", "ignore", "block.py", says=" ".join(output.split()))


CHECKS: dict[str, tuple[Callable[[Installed], None], ...]] = {
    "base": (readme, keepers),
    "flower": (numpy_run, readme),
    "torch": (curvature, readme),
    "opacus": (readme,),
}
EVERYWHERE = (help_and_examples, wrong_uses, modules, ledger)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("extras", nargs="*", metavar="EXTRA", help=f"of {', '.join(EXTRAS)}; all if not given")
    options.add_argument("--keep", action="append", default=[], metavar="NAME==VERSION", help="installed first")
    asked = options.parse_args()
    if unknown := set(asked.extras) - set(EXTRAS):
        options.error(f"there is no extra {', '.join(sorted(unknown))}; the extras are {', '.join(EXTRAS)}")
    failed = []
    with tempfile.TemporaryDirectory(prefix="fedcgd-installs-") as place:
        subprocess.run([sys.executable, "-m", "build", "--outdir", place, str(ROOT)], check=True, capture_output=True)
        [wheel], [sdist] = Path(place).glob("*.whl"), Path(place).glob("*.tar.gz")
        for extra in asked.extras or EXTRAS:
            with tempfile.TemporaryDirectory(prefix=f"{extra}-", dir=place) as folder:
                failures = tried(Path(folder), extra, sdist if extra == "base" else wheel, asked.keep)
            failed += [extra] * bool(failures)
            print(f"{extra}: {len(failures)} failures" if failures else f"{extra}: ok", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def tried(folder: Path, extra: str, built: Path, keep: list[str]) -> list[str]:
    """What failed with `extra` alone."""
    on = Installed(folder, extra)
    for package in keep:
        on.pip(package)
    on.pip(str(built) if extra == "base" else f"{built}[{extra}]")
    listed = json.loads(on.run(on.python, "-m", "pip", "list", "--format", "json").stdout)
    print(f"{extra}, from {built.name}: " + ", ".join(f"{one['name']} {one['version']}" for one in listed), flush=True)
    for check in (*EVERYWHERE, *CHECKS.get(extra, ())):
        before = len(on.failures)
        check(on)
        failed = on.failures[before:]
        print(f"  {check.__name__}: " + ("\n".join(["FAILED", *failed]) if failed else "ok"), flush=True)
    return on.failures


if __name__ == "__main__":
    main()
