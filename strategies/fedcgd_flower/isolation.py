"""One user's code cannot reach another user's update.

On a node that hosts many users, whatever the code that runs for one of them does, the other users' parts of the sum stay as they
are, bit by bit: each user gets copies of its own, random numbers of its own, the process's settings as they were before, and
only so much time. A user whose code raises, or takes longer, adds nothing.

Limits. Code that changes what it was not given (a module's global variables, a library's functions, files) reaches the users
after it: make the model inside the training function. The time limit is an alarm signal: it needs the main thread, where Flower
runs a ClientApp, and cannot end a single long call into compiled code. An index out of range on a GPU ends the process's use
of that GPU.
"""

import copy
import hashlib
import os
import random
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from flwr.app import ConfigRecord, Context

from fedcgd_flower.flower_private import log_warning
from fedcgd_flower.layout import Flat

T = TypeVar("T")

TIME_LIMIT = 600.0
"""Seconds for one user, if nothing else is said."""


class _OutOfTimeError(BaseException):
    """Not an Exception, so that code which catches those does not catch it."""


def run_isolated(
    users: Sequence[str],
    model: Flat,
    config: ConfigRecord,
    context: Context,
    work: Callable[[str, ConfigRecord, Context], T],
    *,
    time_limit: float | None,
) -> Iterator[T | None]:
    """`work(user, config, context)` for each of `users`, with copies of `config` and `context`; None where it failed.

    What a user draws from the random generators of Python, NumPy and torch depends on `model` and its own id alone.
    """
    seed_of = user_seeds(model)
    generators = _generators()
    settings = _settings()  # of all users: after each they are what they were before it
    try:
        for user in users:
            result: T | None = None
            try:
                with _settings_kept(settings), _alarm(time_limit):
                    _seed(seed_of(user))
                    result = work(user, copy.deepcopy(config), copy.deepcopy(context))
            except _OutOfTimeError:
                log_warning(f"a user's local training took longer than {time_limit:g} s, and was ended")
            except KeyboardInterrupt:  # the operator's
                raise
            except BaseException as error:  # also what libraries cancel tasks with; its text may tell about the user
                log_warning(f"a user's local training or evaluation failed with {_what_and_where(error)}")
            yield result
    finally:  # after the last: each user's own seed decides what it draws
        _put_back(generators)


def _what_and_where(error: BaseException) -> str:
    """The kind of the error and the last line of code that is not a library's, without its text."""
    places = traceback.extract_tb(error.__traceback__)
    last = ([place for place in places if "site-packages" not in place.filename] or places)[-1]
    return f"{type(error).__name__} at {last.filename}, line {last.lineno}"


def user_seeds(model: Flat) -> Callable[[str], int]:
    """user → the seed of its random numbers in the round that begins from `model`."""
    begun = hashlib.blake2b(np.ascontiguousarray(model).data, digest_size=8)

    def seed_of(user: str) -> int:
        seed = begun.copy()
        seed.update(user.encode())
        return int.from_bytes(seed.digest())

    return seed_of


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if (torch := _torch()) is not None:
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


@cache
def _torch() -> Any:
    """torch, or None where it is not installed. Loaded before the first user, who could load it and change its settings."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return torch


_Settings = list[tuple[Callable[[Any], object], Any]]


def _settings() -> _Settings:
    """The process's settings that training code may change, as (how to set it, what it is now)."""
    return [
        (lambda kept: np.seterr(**kept), np.geterr()),
        *(() if (torch := _torch()) is None else _torch_settings(torch)),
        (os.chdir, Path.cwd()),
        (_set_environment, dict(os.environ)),
    ]


def _torch_settings(torch: Any) -> _Settings:
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return [
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.set_grad_enabled, torch.is_grad_enabled()),
        (torch.set_num_threads, torch.get_num_threads()),
        (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        (lambda kept: torch.use_deterministic_algorithms(kept[0], warn_only=kept[1]), deterministic),
        (lambda kept: setattr(torch.backends.cudnn, "benchmark", kept), torch.backends.cudnn.benchmark),
        (torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled()),
        *(
            (partial(put, device), get(device))
            for device in ("cpu", "cuda")
            for put, get in (
                (torch.set_autocast_enabled, torch.is_autocast_enabled),
                (torch.set_autocast_dtype, torch.get_autocast_dtype),
            )
        ),
        (torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
    ]


def _generators() -> _Settings:
    """The states of the random generators that `_seed` sets."""
    generators: _Settings = [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
    if (torch := _torch()) is not None:
        generators.append((torch.default_generator.set_state, torch.default_generator.get_state()))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            generators.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    return generators


def _put_back(settings: _Settings) -> None:
    for put, value in settings:
        put(value)


def _set_environment(kept: dict[str, str]) -> None:
    if os.environ != kept:
        os.environ.clear()
        os.environ.update(kept)


@contextmanager
def _settings_kept(settings: _Settings) -> Iterator[None]:
    torch = _torch()
    default_device = None if torch is None else torch.get_default_device()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        if torch is not None and torch.get_default_device() != default_device:
            torch.set_default_device(None if default_device == torch.device("cpu") else default_device)
        _put_back(settings)


@contextmanager
def _alarm(seconds: float | None) -> Iterator[None]:
    """Raise _OutOfTimeError in the block after `seconds`, and every second from then on, should the code there catch it.

    Windows has no such alarms, and neither has a thread: there is no limit there.
    """
    if seconds is None or not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def out_of_time(*_: object) -> None:
        raise _OutOfTimeError

    handler = signal.signal(signal.SIGALRM, out_of_time)
    began = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # somebody else's alarm
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)
