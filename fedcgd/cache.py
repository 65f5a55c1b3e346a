"""Where files are kept that can be recomputed."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$FEDCGD_CACHE, or fedcgd in the user's cache folder. Raises RuntimeError if there is no home."""
    named = os.environ.get("FEDCGD_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedcgd"
