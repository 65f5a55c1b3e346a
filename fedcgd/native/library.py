"""C files of the package as machine code, which is built with the wheel (`hatch_build.py`) and loaded in a millisecond.

What they do to whole models NumPy can do as well, with the same bits, and does where the wheel was built without a C compiler;
what they do for accounting needs them. For Intel's and
AMD's processors there are builds for three levels of instructions, of which the highest that this processor has is loaded.

The loader first compares the answer to one question with the one that is known: a compiler may be wrong.
"""

import ctypes
import hashlib
import platform
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

# What a processor of the level can do, in the words of Linux (System V x86-64 psABI, "micro-architecture levels").
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}

Code = TypeVar("Code")


def checked(load: Callable[[], Code], answer: Callable[[Code], bytes], expected: str) -> Code | None:
    """What `load` makes of a `library`; None where there is none, or it does not work here, or gives another answer.

    `expected` is the SHA-256 of the answer, in hexadecimal digits.
    """
    try:
        made = load()
        return made if hashlib.sha256(answer(made)).hexdigest() == expected else None
    except Exception:  # whatever loading machine code can raise on a machine that nobody has tried
        return None


def needed(load: Callable[[], Code], answer: Callable[[Code], bytes], expected: str) -> Code:
    """As `checked`. Raises RuntimeError where that is None: for work that only machine code does."""
    found = checked(load, answer, expected)
    if found is None:
        raise RuntimeError(
            "Monte Carlo accounting of this sampling needs machine code, which was not built or does not work here: provide a C "
            "compiler (`cc`, or what CC names) and install fedcgd again, or choose another sampling"
        )
    return found


def library(source: Path) -> ctypes.CDLL:
    """The functions of the C file `source`, built for this processor. Raises OSError where they were not built."""
    for level in _levels():
        built = source.with_name(f"{source.stem}-{level}.shared")
        if built.is_file():
            return ctypes.CDLL(str(built))
    raise OSError(f"{source.name} was not built: there was no C compiler when fedcgd was installed")


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


@cache
def _levels() -> tuple[str, ...]:
    """The builds that this processor can run, the best first."""
    machine = platform.machine()
    flags = _flags() if machine == "x86_64" else set()
    return (*(level for level, needed in _LEVELS.items() if needed <= flags), machine)


def _flags() -> set[str]:
    described = Path("/proc/cpuinfo")
    if not described.exists():  # not Linux: what all processors of the kind can do
        return set()
    with described.open() as file:
        line = next((line for line in file if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())
