"""What can be found again is kept on disk: one small file each, named by what was asked for, and checked when read."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcgd.files import whole


def cache_folder() -> Path:
    """$FEDCGD_CACHE, or fedcgd in the user's cache folder. Raises RuntimeError if there is no home."""
    named = os.environ.get("FEDCGD_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedcgd"


def kept(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `keep` kept for `request` (JSON-able, with a `name`); None if there is nothing.

    A file that is damaged, or whose content does not belong to the request, counts for nothing.
    """
    question = _question(request)
    try:
        content = json.loads(_path(request).read_text())
        if content["question"] != question or content["checksum"] != digest(question + content["answer"]):
            return None
        found: dict[str, Any] = json.loads(content["answer"])
        return found
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None


def keep(request: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Keep what was found for `request`, both JSON-able. A folder that cannot be written costs the time of finding it again."""
    question, answer = _question(request), json.dumps(found)
    try:
        path = _path(request)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as part:
            part.write_text(json.dumps({"question": question, "answer": answer, "checksum": digest(question + answer)}))
    except (OSError, RuntimeError):
        pass


def digest(text: str) -> str:
    """SHA-256, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def _question(request: Mapping[str, Any]) -> str:
    return json.dumps(request, sort_keys=True)


def _path(request: Mapping[str, Any]) -> Path:
    return cache_folder() / f"{request['name']}-{digest(_question(request))[:24]}.json"
