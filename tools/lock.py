"""Renew the lock: the exact versions and hashes that `make` installs, for Python 3.11 to 3.13 on every platform.

    python tools/lock.py                       # the newest versions that pyproject.toml allows
    python tools/lock.py --keep torch==2.13.0  # the newest, but for this package

Writes `requirements/cpu.txt` (PyTorch for Linux without a GPU), `requirements/cuda.txt` (PyTorch for all other machines, with
what its CUDA builds need) and `requirements/dev.txt` (everything else). uv resolves them. No file names an index: pip takes the
packages from whatever indexes it is set up for, and checks their hashes.

PyTorch's builds without CUDA are on an index of PyTorch's own, as version 2.13.0+cpu and so on. Their hashes are asked of pip's
indexes; where these have none, `cpu.txt` stays as it is, which needs the same version of PyTorch.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEV, CPU, CUDA = (ROOT / "requirements" / name for name in ("dev.txt", "cpu.txt", "cuda.txt"))
PYTHONS = ("3.11", "3.12", "3.13")
CPU_PLATFORM = "manylinux_2_28_x86_64"
OF_PYTORCH = re.compile(r"(torch==|nvidia-|cuda-)")
HEAD = "# Written by tools/lock.py: `make lock` renews it.\n"

Lock = dict[str, list[str]]
"""The lines of a requirement by its first: `name==version ; marker \\`, then its hashes."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--keep", action="append", default=[], metavar="NAME==VERSION", help="hold a package at a version"
    )
    kept: list[str] = options.parse_args().keep
    resolved = parse(resolve(kept))
    torch = next(line.split("==")[1].split()[0] for line in resolved if line.startswith("torch=="))
    hashes = cpu_hashes(torch)
    if hashes:
        CPU.write_text(text({f"torch=={torch}+cpu": hashes}))
    elif f"torch=={torch}+cpu" not in CPU.read_text():
        sys.exit(
            f"pip's indexes have no PyTorch {torch} without CUDA: set PIP_EXTRA_INDEX_URL to PyTorch's CPU index, "
            "or --keep torch at the version of requirements/cpu.txt"
        )
    DEV.write_text(text({line: own for line, own in resolved.items() if not OF_PYTORCH.match(line)}))
    CUDA.write_text(text({line: own for line, own in resolved.items() if OF_PYTORCH.match(line)}))
    print(f"{len(resolved)} packages; PyTorch {torch} without CUDA: {'asked again' if hashes else 'as it was'}")


def resolve(kept: list[str]) -> str:
    """uv's answer for `.[dev]`. Raises CalledProcessError, after uv said why, if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("\n".join(kept))
        command = [
            *(sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--extra", "dev", "--universal"),
            *(
                "--python-version",
                PYTHONS[0],
                "--generate-hashes",
                "--no-emit-index-url",
                "--no-annotate",
                "--no-header",
            ),
            *("--constraints", str(constraints), "--quiet"),
        ]
        return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def parse(content: str) -> Lock:
    found: Lock = {}
    for line in content.splitlines():
        if line and not line.startswith((" ", "#")):
            own = found.setdefault(line.removesuffix(" \\"), [])
        elif line.startswith(" "):
            own.append(line.removesuffix(" \\"))
    return found


def text(lock: Lock) -> str:
    return HEAD + "".join(" \\\n".join([line, *own]) + "\n" for line, own in lock.items())


def cpu_hashes(torch: str) -> list[str]:
    """Those of PyTorch's builds without CUDA that pip's indexes have for every Python, or none."""
    found = []
    for python in PYTHONS:
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"),
            *("--report", "-", "--target", "unused", "--only-binary", ":all:"),
            *("--platform", CPU_PLATFORM, "--python-version", python),
            f"torch=={torch}+cpu",
        ]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            return []
        download = json.loads(ran.stdout)["install"][0]["download_info"]
        found.append(f"    --hash=sha256:{download['archive_info']['hashes']['sha256']}")
    return found


if __name__ == "__main__":
    main()
