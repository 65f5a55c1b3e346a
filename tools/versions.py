"""The versions here that differ from the lock: `python tools/versions.py`."""

import re
from importlib.metadata import distributions
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements"


def main() -> None:
    locked: dict[str, set[str]] = {}
    text = "\n".join((LOCK / name).read_text() for name in ("dev.txt", "cuda.txt"))  # PyTorch is in the latter
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE):
        locked.setdefault(name, set()).add(version)
    for name, version in sorted({(normal(one.name), one.version) for one in distributions()}):
        if name in locked and version.partition("+")[0] not in locked[name]:
            print(f"{name} {version} (lock: {' or '.join(sorted(locked[name]))})")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
