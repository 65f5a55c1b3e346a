"""C files of the package as machine code: compiled once on a machine, kept for this user, and loaded in a millisecond.

What they do NumPy can do as well, with the same bits: whoever loads one compares some results first, and goes on with NumPy
where there is no compiler. Compilers are the system's `cc` (Linux) and the package `ziglang`, which pip installs anywhere.

Machine code that somebody else has changed could leave out the noise. So it is kept, in the user's cache folder, only if nobody
but the user and root can write there, by the rule that SSH has for its keys; otherwise each process compiles its own in a
temporary folder that no other user can enter. Neither the search path nor other variables of the environment choose a compiler.
"""

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedcgd.cache import cache_folder

# Each operation rounded by itself, as in NumPy: no fused multiply-add, nothing reordered. Only traps and `errno` are given up.
_FLAGS = [
    "-O3",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-ffreestanding",
    "-nostdlib",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
]
_SECONDS = 120  # a compiler needs less than one

Code = TypeVar("Code")


def checked(load: Callable[[], Code], is_right: Callable[[Code], bool]) -> Code | None:
    """What `load` makes of a `library`; None without a compiler, or where its code does not work or is not right."""
    try:
        made = load()
        return made if is_right(made) else None
    except Exception:  # whatever a compiler can do on a machine that nobody has tried
        return None


def library(source: Path, constants: Mapping[str, int | np.int32 | np.float32]) -> ctypes.CDLL:
    """The functions of the C file `source`, compiled with `constants` as macros. Raises OSError where that is not possible."""
    model, native = _processor()
    flags = [*_FLAGS, *native, *(f"-D{name}={_literal(value)}" for name, value in constants.items())]
    name = hashlib.sha256("\0".join((source.read_text(), *flags, model)).encode()).hexdigest() + ".so"
    folder = _private_cache()
    kept = None if folder is None else folder / name
    if kept is not None and kept.is_file() and nobody_else_writes(kept):
        return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(prefix="fedcgd-", dir=folder) as temporary:
        made = Path(temporary) / name
        _compile(source, flags, made)
        loaded = ctypes.CDLL(str(made))
        if kept is not None:
            with made.open("rb") as file:
                os.fsync(file.fileno())  # a file that a power failure cut off would end the process that loads it
            made.replace(kept)
    return loaded


def function(
    code: ctypes.CDLL, name: str, arguments: Iterable[Any], result: type[ctypes.c_int64] | None = None
) -> Callable[..., Any]:
    """A function of `code`, which releases the interpreter's lock. Raises ctypes.ArgumentError for arrays of another kind."""
    found = getattr(code, name)
    found.argtypes, found.restype = list(arguments), result
    return found  # type: ignore[no-any-return]


def array(dtype: type[np.generic], *shape: int) -> Any:
    """An argument of `function`: a contiguous and aligned array, of that shape if one is given."""
    required: Any = {"shape": shape} if shape else {}
    return np.ctypeslib.ndpointer(dtype, flags=("C_CONTIGUOUS", "ALIGNED"), **required)


def nobody_else_writes(path: Path) -> bool:
    """Whether only this user and root can change what is at `path`, a path without symbolic links, or put another thing there."""
    for part in (path, *path.parents):
        found = part.lstat()
        writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if found.st_uid not in (0, os.geteuid()) or (
            writable and not (part is not path and found.st_mode & stat.S_ISVTX)
        ):
            return False
    return True


def _private_cache() -> Path | None:
    """The folder that machine code is kept in, made if it is missing; None if there can be none that is private."""
    try:
        folder = cache_folder().resolve() / "machine-code"  # resolved: what is checked is what is used
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if nobody_else_writes(folder) and os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):  # read-only, or no home
        return None


def _processor() -> tuple[str, list[str]]:
    """What tells this processor from others that run other machine code, and the compiler's options for it."""
    kind = platform.machine()
    described = Path("/proc/cpuinfo")
    if kind != "x86_64" or not described.exists():
        return kind, []  # what all processors of the kind can do
    with described.open() as file:
        lines = file.read(2**14).splitlines()
    model = [next(line for line in lines if line.startswith(key)) for key in ("model name", "flags")]
    return "\n".join(model), ["-march=native"]


def _compile(source: Path, flags: list[str], made: Path) -> None:
    compiler = _compiler()
    folder = str(made.parent)
    environment = {"PATH": os.defpath, "TMPDIR": folder, "ZIG_LOCAL_CACHE_DIR": folder, "ZIG_GLOBAL_CACHE_DIR": folder}
    command = [*compiler, *flags, "-o", str(made), str(source)]
    try:
        subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True, timeout=_SECONDS)
    except subprocess.SubprocessError as error:
        raise OSError(f"{compiler[0]} cannot compile {source.name}") from error


def _compiler() -> list[str]:
    # Not on macOS: without Apple's tools its `cc` asks to install them.
    system = shutil.which("cc", path=os.defpath) if sys.platform == "linux" else None
    if system is not None:
        return [system]
    package = importlib.util.find_spec("ziglang")
    if package is None or package.origin is None:
        raise OSError("there is no C compiler: pip install 'fedcgd[fast]'")
    return [str(Path(package.origin).with_name("zig")), "cc"]


def _literal(value: int | np.int32 | np.float32) -> str:
    return f"{float(value).hex()}f" if isinstance(value, np.float32) else str(int(value))
