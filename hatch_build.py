"""Builds the C files into the wheel, where there is a C compiler. Without one the wheel is of Python alone: NumPy does the work.

The builds lie beside their sources, as `NAME-LEVEL.shared`, so that an editable installation has them too. The description of the
package is the README, with links that lead somewhere from a page of PyPI too.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SOURCES = (
    "fedcgd/noise/normals.c",
    "fedcgd/native/vector_kernels.c",
    "fedcgd/accounting/b_min_sep/recursion.c",
    "fedcgd/accounting/b_min_sep/drawing.c",
    "fedcgd/accounting/random_participation/overlaps.c",
)
# By the end of the file's name: `fedcgd.native.library` loads the best that the processor can run.
LEVELS = {"x86-64-v4": "-march=x86-64-v4", "x86-64-v3": "-march=x86-64-v3", "x86_64": "-march=x86-64"}

# Each operation rounded by itself, as in NumPy: no fused multiply-add, nothing reordered. Only traps and `errno` are given up.
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-ffreestanding",
    *({"linux": ["-nostdlib"], "win32": ["-static-libgcc"]}.get(sys.platform, [])),
    "-fwrapv",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)


REPOSITORY = "https://github.com/fedcgd/fedcgd"
RAW = "https://raw.githubusercontent.com/fedcgd/fedcgd"


class DescriptionHook(MetadataHookInterface):
    """Hatchling's hook: the README as the package's description."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        [version] = re.findall(
            r'^__version__ = "(.+)"$', (root / "fedcgd" / "__init__.py").read_text("utf-8"), re.MULTILINE
        )
        text = absolute_links((root / "README.md").read_text("utf-8"), f"v{version}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute_links(text: str, tag: str) -> str:
    """`text` with links and pictures of the repository at `tag` in place of relative ones."""
    text = re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({REPOSITORY}/blob/{tag}/\1)", text)
    return re.sub(r'\b(src|srcset)="(?!https?:)([^"]+)"', rf'\1="{RAW}/{tag}/\2"', text)


class MachineCodeHook(BuildHookInterface):
    """Hatchling's hook: what is built goes into the wheel, which is then one for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        built = build(Path(self.root))
        if built:
            build_data["artifacts"] += [str(path.relative_to(self.root)) for path in built]
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def build(root: Path) -> list[Path]:
    """The machine code of all sources below `root` for this kind of processor; nothing without a compiler, or if it fails."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    machine = platform.machine()
    levels = LEVELS if machine in LEVELS else {machine: "-O3"}
    made = []
    for source in (root / name for name in SOURCES):
        for level, option in levels.items():
            target = source.with_name(f"{source.stem}-{level}.shared")
            target.unlink(missing_ok=True)  # never one of older sources
            if compiler is not None and _compiles([compiler, *FLAGS, option, "-o", str(target), str(source)]):
                made.append(target)
    return made


def _compiles(command: list[str]) -> bool:
    try:
        ran = subprocess.run(command, capture_output=True, timeout=120, check=False)
    except OSError:
        return False
    return ran.returncode == 0
