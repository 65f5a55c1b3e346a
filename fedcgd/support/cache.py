"""What can be found again is kept on disk: one small file each, named by what was asked for, and checked when read.

An ε follows from what is read, so only files of this very user count, in a folder that nobody else may enter.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcgd.support.files import atomic_write


def cache_folder() -> Path:
    """$FEDCGD_CACHE, or fedcgd in the user's cache folder. Raises RuntimeError if there is no home."""
    named = os.environ.get("FEDCGD_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedcgd"


def load(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `store` kept for `request` (JSON-able, with a `name`); None if there is nothing.

    A file that is damaged, of another user, or whose content does not belong to the request, counts for nothing.
    """
    question = _question(request)
    try:
        path = _path(request)
        _check_own(path.parent, stat.S_IFDIR, 0o077)
        _check_own(path, stat.S_IFREG, 0o022)
        content = json.loads(path.read_text())
        if content["question"] != question or content["checksum"] != digest(question + content["answer"]):
            return None
        found: dict[str, Any] = json.loads(content["answer"])
        return found
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None


def store(request: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Store what was found for `request`, both JSON-able. A folder that cannot be written costs the time of finding it again."""
    question, answer = _question(request), json.dumps(found)
    try:
        path = _path(request)
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(json.dumps({"question": question, "answer": answer, "checksum": digest(question + answer)}))
    except (OSError, RuntimeError):
        pass


def digest(text: str) -> str:
    """SHA-256, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def _question(request: Mapping[str, Any]) -> str:
    return json.dumps(request, sort_keys=True)


def _path(request: Mapping[str, Any]) -> Path:
    # In a folder of its own: $FEDCGD_CACHE may be one that others use too.
    return cache_folder() / "kept" / f"{request['name']}-{digest(_question(request))[:24]}.json"


def _check_own(path: Path, kind: int, others: int) -> None:
    """Raise OSError unless `path` is this user's, of this kind (no link), and closed to others by those mode bits."""
    found = path.lstat()
    own = not hasattr(os, "geteuid") or (found.st_uid == os.geteuid() and not found.st_mode & others)
    if stat.S_IFMT(found.st_mode) != kind or not own:
        raise PermissionError(f"others may have written {path}")
