"""The node's side: one node hosts one or many users, and answers with the sum of their clipped updates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import WARNING

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.supercore import log

from fedcgd.clipping import clip
from fedcgd.gradients import ExampleLoss, clipped_gradient_sum
from fedcgd.noise.quantisation import Grid, Integers
from fedcgd_flower.layout import Flat, Layout, flatten, unflatten
from fedcgd_flower.messages import USERS_QUERY, failed_reply, read_train_message, train_reply, users_reply


@dataclass(frozen=True, kw_only=True)
class LocalTask:
    """One round's work on a node: the sum over `users` of their updates of `model`, each clipped to `clip_norm` and on `grid`."""

    model: Flat
    layout: Layout
    users: tuple[str, ...]
    clip_norm: float
    grid: Grid
    config: ConfigRecord


ClippedSum = Callable[[LocalTask, Context], tuple[Integers, int]]
"""(Σ clipped updates with shape (layout.size,), each in whole steps by `grid.to_steps`; number of users in it)."""

LocalTraining = Callable[[ArrayRecord, str, ConfigRecord, Context], ArrayRecord]
"""(model, user, config, context) → the model after that user's local training."""

UserData = Callable[[Sequence[str], Context], tuple[torch.Tensor, ...]]
"""(users, context) → tensors whose row i belongs to user i: one example per user."""


def declare_users(app: ClientApp, users: Callable[[Context], Sequence[str]]) -> None:
    """Let `app` answer the server's question which users this node hosts.

    `users(context)` returns ids that stay the same when the node reconnects, for example from `context.node_config`.
    """

    @app.query(USERS_QUERY.partition(".")[2])
    def answer(message: Message, context: Context) -> Message:
        return users_reply(message, users(context))


def host_users(app: ClientApp, users: Callable[[Context], Sequence[str]], clipped_sum: ClippedSum) -> None:
    """Make `app` a node that hosts `users` and trains the ones it is asked for by `clipped_sum`.

    A user that the node does not host is left out; so one node cannot be made to speak for another's users.
    """
    declare_users(app, users)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, config, task = read_train_message(message)
        hosted = set(users(context))
        asked = tuple(user for user in task.users if user in hosted)
        work = LocalTask(
            model=model, layout=task.layout, users=asked, clip_norm=task.clip_norm, grid=task.grid, config=config
        )
        try:
            total, answered = clipped_sum(work, context)
        except Exception as error:
            return failed_reply(message, error)
        return train_reply(message, task, total, answered)


def one_by_one(local_training: LocalTraining) -> ClippedSum:
    """The clipped sum by a plain loop: each user trains from the model it was sent, for as long as it likes.

    A user whose training raises or gives numbers that are not finite adds nothing and does not count as an answer.
    """

    def clipped_sum(work: LocalTask, context: Context) -> tuple[Integers, int]:
        total, answered = np.zeros(work.layout.size, np.int64), 0
        start = unflatten(work.model, work.layout)
        for user in work.users:
            try:
                trained = flatten(local_training(start, user, work.config, context), work.layout)
            except Exception as error:  # one user's failure must not silence the others on this node
                log(WARNING, "fedcgd: a user's local training failed with %s", type(error).__name__)
                continue
            update = trained.astype(np.float64) - work.model
            if np.isfinite(update).all():
                total += work.grid.to_steps(clip(update, work.clip_norm))
                answered += 1
        return total, answered

    return clipped_sum


def one_gradient_step(loss: ExampleLoss, data: UserData) -> ClippedSum:
    """The clipped sum when a user is one example and its update is minus the gradient of its `loss`, vectorised.

    The server's learning rate then plays the part of the learning rate: FedAvgM(server_learning_rate=…) is SGD.
    """

    def clipped_sum(work: LocalTask, context: Context) -> tuple[Integers, int]:
        if not work.users:
            return np.zeros(work.layout.size, np.int64), 0
        examples = data(work.users, context)
        model = torch.from_numpy(work.model.copy()).to(examples[0].device)
        gradients, finite = clipped_gradient_sum(loss, model, examples, clip_norm=work.clip_norm, grid=work.grid)
        return -gradients.cpu().numpy(), finite

    return clipped_sum
