"""A node that hosts many users: it answers with the sum of their clipped updates, and one user's code cannot reach another's.

Whatever the code that runs for one user does, the other users' parts of the sum stay as they are, bit by bit: each user gets
copies of its own, random numbers of its own, the process's settings as they were before, and only so much time. A user whose
code raises, or takes longer, adds nothing.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from fedcgd.noise.quantisation import Integers
from fedcgd.participation.user_ids import NoUserIdsError, check_not_one_text
from fedcgd.support.numbers import plural
from fedcgd_flower import messages
from fedcgd_flower.clipping import Clipping, Steps, clipped_update
from fedcgd_flower.flower_private import log_error, log_failure, log_warning
from fedcgd_flower.layout import Flat, Layout, cast_as_trained, unflatten
from fedcgd_flower.messages import NoUpdateError, TrainTask, answer, answers_task, bounds_of, trained_arrays
from fedcgd_flower.noise_provider import check_masked, keeper_reply, sum_reply
from fedcgd_flower.problems import NOT_FINITE_WORDS
from fedcgd_flower.users import is_users_query, users_reply

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
            except NoUpdateError as error:  # a text of ours
                log_warning(f"of a user no update is sent: {error}")
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


if TYPE_CHECKING:
    from fedcgd.keepers import Keepers


@dataclass(frozen=True, kw_only=True)
class LocalTask:
    """One round's work on a node: the sum over `users` of their updates of `model`, each clipped and on a grid.

    Attributes:
        model: the parameters that are trained, flat, shape (d,), float32.
        layout: the names, shapes and types of their arrays.
        users: whose updates are asked for.
        clipping: ζ of this round, the lattice that clipped updates are rounded to and, with adaptive clipping, what an update is
            divided by before it is clipped, and what a user adds to the last coordinate or takes away.
        config: what is sent to all nodes in this round.
    """

    model: Flat
    layout: Layout
    users: tuple[str, ...]
    clipping: Clipping
    config: ConfigRecord

    @property
    def size(self) -> int:
        """Coordinates of the sum: those of the model, and with adaptive clipping one more."""
        return self.clipping.size(self.layout.size)

    def clipped(self, trained: Flat) -> Steps | None:
        """What a user adds to the sum.

        Args:
            trained: the parameters after its training, in the order of `model`, shape (d,).

        Returns:
            Its clipped update in steps of the grid, shape (size,); None if a number is not finite.
        """
        return clipped_update(trained, cast_as_trained(self.model, [trained], self.layout), self.clipping)


ClippedSum = Callable[[LocalTask, Context], tuple[Integers, int]]
"""(Σ clipped updates with shape (work.size,), each as `work.clipped` gives it; number of users in it)."""

LocalTraining = Callable[[ArrayRecord, str, ConfigRecord, Context], ArrayRecord]
"""(model, user, config, context) → the model after that user's local training."""

LocalEvaluation = Callable[[ArrayRecord, str, ConfigRecord, Context], Mapping[str, int | float]]
"""(model, user, config, context) → what that user measures of the model on its data, by name."""


def host_users(
    app: ClientApp,
    users: Callable[[Context], Collection[str]],
    clipped_sum: ClippedSum,
    *,
    evaluate: LocalEvaluation | None = None,
    shared: bool = False,
    keepers: "Keepers | None" = None,
) -> None:
    """Make `app` a node that hosts `users` and trains the ones it is asked for by `clipped_sum`.

    A user that the node does not host is left out; so one node cannot be made to speak for another's users.

    Args:
        app: the node's app, which gets its train function here, and with `evaluate` its evaluate function.
        users: `users(context)` returns ids, texts that are not empty, which stay the same at every call and when the node
            reconnects, for example from `context.node_config`. The node that names none, or what is no id, is left out.
        clipped_sum: the users' training: `sequential_training(…)`, `one_gradient_step(…)`, or a function of yours.
        evaluate: what the server's `PrivateEvaluation` asks of a user; one that raises, or takes longer than the time limit,
            adds nothing.
        shared: for simulations: other nodes host the same users, and hold the same data. Each user of a round is asked at one of
            them, so that all have as much to do. It is not always the same one, so training must keep nothing there for later
            rounds. A node that is registered by name shares nothing, whatever it says: the same id at two silos may be two
            people.
        keepers: with them, what leaves the node is masked, so that only all keepers of a round together can open it, and only as
            a noised sum with others'. A node whose configuration names a keeper's key (`keeper="/srv/keeper.key"`) is that keeper
            too. Evaluations are answered under masks as well.

    >>> def train(model, user, config, context):
    ...     return model  # after steps on this user's data
    >>> app = ClientApp()
    >>> host_users(app, lambda context: ["ada", "ben"], sequential_training(train))
    """

    def asked_of(task: TrainTask, context: Context) -> tuple[str, ...]:
        hosted: Collection[str] = ()
        try:
            hosted = users(context)
            check_not_one_text(hosted)
            hosted = hosted if isinstance(hosted, AbstractSet) else set(hosted)
        except NoUserIdsError as error:
            log_error(str(error))
            hosted = ()
        except Exception as error:
            log_failure("the function that names this node's users", error)
        if missing := sum(user not in hosted for user in task.users):
            log_warning(
                f"{missing} of the {plural(len(task.users), 'user', 'users')} asked for are none that users(context) names now: "
                "they are left out. It must name the same users at every call"
            )
        return tuple(user for user in task.users if user in hosted)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if (answered := keeper_reply(message, context, keepers)) is not None:
            return answered
        if is_users_query(message):
            return users_reply(message, lambda: users(context), shared=shared)
        check_masked(message, keepers)
        model, config, task = messages.read_train_message(message)
        work = LocalTask(
            model=model.copy(),  # the message's own cannot be written to, which torch.from_numpy warns about
            layout=task.layout,
            users=asked_of(task, context),
            clipping=task.clipping,
            config=config,
        )
        return sum_reply(message, context, task, keepers, work.users, lambda: clipped_sum(work, context))

    if evaluate is None:
        return

    @app.evaluate()
    def evaluate_users(message: Message, context: Context) -> Message:
        check_masked(message, keepers)
        model, config, task = messages.read_train_message(message)
        bounds, asked = bounds_of(message), asked_of(task, context)

        def measure(user: str, config: ConfigRecord, context: Context) -> Integers:
            measured = evaluate(unflatten(model, task.layout), user, config, context)
            return answer(measured, bounds, task.clipping.grid)

        def measured_sum() -> tuple[Integers, int]:
            measured = run_isolated(asked, model, config, context, measure, time_limit=TIME_LIMIT)
            return _sum_of(measured, len(bounds))

        return sum_reply(message, context, answers_task(task, len(bounds)), keepers, asked, measured_sum)


def sequential_training(local_training: LocalTraining, *, time_limit: float | None = TIME_LIMIT) -> ClippedSum:
    """The clipped sum by a plain loop: each user trains from the model it was sent.

    A user whose training raises, takes longer, or gives anything but the model's arrays with finite numbers adds nothing and does
    not count as an answer. Whatever it does, the others' updates are the same, as `fedcgd_flower.user_training` says.

    Args:
        local_training: (model, user, config, context) → the model after that user's training, as an ArrayRecord.
        time_limit: seconds for one user; None for no limit.

    Returns:
        What `host_users` takes.
    """

    def clipped_sum(work: LocalTask, context: Context) -> tuple[Integers, int]:
        def train(user: str, config: ConfigRecord, context: Context) -> Flat:
            model = unflatten(work.model, work.layout)
            return np.concatenate(trained_arrays(local_training(model, user, config, context), work.layout))

        trained = run_isolated(work.users, work.model, work.config, context, train, time_limit=time_limit)
        return _sum_of((None if model is None else _update_of(model, work) for model in trained), work.size)

    return clipped_sum


def _update_of(trained: Flat, work: LocalTask) -> Steps | None:
    update = work.clipped(trained)
    if update is None:
        log_warning(f"of a user no update is sent: {NOT_FINITE_WORDS}")
    return update


def _sum_of(parts: Iterable[Steps | None], size: int) -> tuple[Integers, int]:
    """(Σ parts, shape (size,); how many there are)."""
    total, answered = np.zeros(size, np.int64), 0
    for part in parts:
        if part is not None:
            total += part
            answered += 1
    return total, answered
