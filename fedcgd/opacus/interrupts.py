"""Ctrl-C that waits until something is done as a whole."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Let Ctrl-C wait until this is left; signals reach the main thread alone, and its handler is called then."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            signal.raise_signal(signal.SIGINT)
