"""BLAS with one thread, while numbers are found."""

from typing import Any

from threadpoolctl import threadpool_limits


def one_thread() -> Any:
    """A context in which BLAS computes in the thread that calls it.

    OpenBLAS ends its own threads when any thread of the process forks as Ray does (`preexec_fn`), and a product that is under way
    then waits for them for ever: a server app that calibrates its noise while Ray starts would stand still. Our products are
    small besides, so that a second thread gains nothing.
    """
    return threadpool_limits(1, "blas")
