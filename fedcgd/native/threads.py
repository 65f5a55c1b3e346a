"""The processors of this machine: how many there are, and BLAS on one of them while numbers are found."""

import os
from typing import Any

from threadpoolctl import threadpool_limits


def usable_cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_thread() -> Any:
    """A context in which BLAS computes in the thread that calls it.

    OpenBLAS ends its own threads when any thread of the process forks as Ray does (`preexec_fn`), and a product that is under way
    then waits for them for ever: a server app that calibrates its noise while Ray starts would stand still. Our products are
    small besides, so that a second thread gains nothing.
    """
    return threadpool_limits(1, "blas")
