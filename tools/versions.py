"""The versions here that differ from the lock: `python tools/versions.py`."""

import re
from importlib.metadata import distributions
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements" / "dev.txt"


def main() -> None:
    locked: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", LOCK.read_text(), re.MULTILINE):
        locked.setdefault(name, set()).add(version)
    for name, version in sorted({(normal(one.name), one.version) for one in distributions()}):
        if name in locked and version.partition("+")[0] not in locked[name]:
            print(f"{name} {version} (lock: {' or '.join(sorted(locked[name]))})")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
