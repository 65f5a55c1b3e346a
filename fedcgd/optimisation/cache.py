"""Optimised mechanisms on disk: one small file each, named by what was asked for, and checked when read."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedcgd.cache import cache_folder
from fedcgd.files import whole

_FORMAT = 4  # raise it when an optimiser changes, so that older results are found no more


def cached(request: Mapping[str, Any], optimise: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The description kept for `request` (both JSON-able), or that of what `optimise` finds, which is then kept.

    A file that is damaged, or whose content does not belong to the request, counts for nothing and is written again. A folder
    that cannot be written costs the time of optimising again, and nothing else.
    """
    question = json.dumps({"format": _FORMAT, **request}, sort_keys=True)
    path = cache_folder() / f"{request['name']}-{_digest(question)[:24]}.json"
    kept = _read(path, question)
    if kept is not None:
        return kept
    description = optimise()
    answer = json.dumps(description)
    content = json.dumps({"question": question, "answer": answer, "checksum": _digest(question + answer)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as part:
            part.write_text(content)
    except OSError:
        pass
    return description


def _read(path: Path, question: str) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
        if content["question"] != question or content["checksum"] != _digest(question + content["answer"]):
            return None
        found: dict[str, Any] = json.loads(content["answer"])
        return found
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
