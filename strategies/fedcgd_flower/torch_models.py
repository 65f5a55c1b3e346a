"""What needs torch: a model's parameters as Flower's arrays, and clipped gradients of users that are one example each."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from torch import nn

from fedcgd.clipping.per_sample_gradients import ExampleLoss, clipped_gradient_sum
from fedcgd.noise.quantisation import Integers
from fedcgd_flower.user_training import TIME_LIMIT, ClippedSum, LocalTask, run_isolated


def arrays_of(model: nn.Module) -> ArrayRecord:
    """The trained parameters of `model` (`requires_grad`), for `initial_arrays` and for a train function's reply.

    bfloat16 and smaller types, which Flower cannot carry, travel as float32. `load_arrays` is the way back.

    Args:
        model: on any device.

    Returns:
        Arrays in main memory, by the names of the parameters. A tensor that the model has under two names is there once.

    >>> list(arrays_of(nn.Linear(2, 1)))
    ['weight', 'bias']
    """
    sendable = (torch.float16, torch.float32, torch.float64)
    arrays = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = parameter.detach().cpu()
            arrays[name] = Array((value if value.dtype in sendable else value.float()).numpy())
    return ArrayRecord(arrays)


def load_arrays(model: nn.Module, arrays: Mapping[str, Array]) -> None:
    """Write `arrays` into the parameters of these names, in place.

    Args:
        model: the model that is changed.
        arrays: by the names of the parameters, as `arrays_of` has them; other names are left out.

    Raises:
        ValueError: if a trained parameter is missing.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in arrays:
                parameter.copy_(torch.from_numpy(arrays[name].numpy()))
            elif parameter.requires_grad:
                raise ValueError(f"parameter {name!r} is not among the arrays {list(arrays)}")


Example = tuple[torch.Tensor, ...]

UserData = Callable[[Sequence[str], Context], tuple[torch.Tensor, ...]]
"""((user,), context) → tensors with one row each: that user's example. It is asked for one user at a time."""


def one_gradient_step(loss: ExampleLoss, data: UserData, *, time_limit: float | None = TIME_LIMIT) -> ClippedSum:
    """The clipped sum when a user is one example and its update is minus the gradient of its `loss`, vectorised.

    The server's learning rate then plays the part of the learning rate: FedAvgM(server_learning_rate=…) is SGD. A user whose
    `data` raises or takes longer than the limit, or whose loss raises, adds nothing and does not count as an answer.

    Args:
        loss: of the flat parameters, shape (d,), and one example's tensors, a scalar (`fedcgd.clipping.example_loss` makes one of
            a model).
        data: ((user,), context) → that user's example, as tensors of one row each.
        time_limit: seconds for the data of one user; None for no limit.

    Returns:
        What `host_users` takes.

    >>> from fedcgd.clipping import example_loss
    >>> from torch.nn.functional import cross_entropy
    >>> loss = example_loss(torch.nn.Linear(4, 2), lambda outputs, targets: cross_entropy(outputs, targets, reduction="none"))
    >>> clipped_sum = one_gradient_step(loss, lambda users, context: (torch.zeros(1, 4), torch.zeros(1, dtype=torch.long)))
    """

    def clipped_sum(work: LocalTask, context: Context) -> tuple[Integers, int]:
        def example(user: str, _: ConfigRecord, context: Context) -> Example:
            return _one_row(data((user,), context))

        apart = run_isolated(work.users, work.model, work.config, context, example, time_limit=time_limit)
        total, answered = torch.zeros(work.size, dtype=torch.int64), 0
        failures = []
        batches = list(_batches(list(apart)))
        for batch, counted in batches:
            model = torch.from_numpy(work.model.copy()).to(batch[0].device)
            try:
                part, finite = clipped_gradient_sum(
                    loss,
                    model,
                    batch,
                    clip_norm=work.clipping.clip_norm,
                    grid=work.clipping.grid,
                    counted=counted,
                    unit=work.clipping.update_scale,
                    indicator=work.clipping.indicator,
                )
            except Exception as error:  # none of this batch could be computed
                failures.append(error)
                continue
            total += part.cpu()
            answered += finite
        if failures and len(failures) == len(batches):
            raise failures[0]
        total[: work.layout.size].neg_()
        return total.numpy(), answered

    return clipped_sum


def _one_row(tensors: tuple[torch.Tensor, ...]) -> Example:
    if not tensors or any(len(tensor) != 1 for tensor in tensors):
        raise ValueError(f"data for one user must have one row, got {[len(tensor) for tensor in tensors]}")
    if any(tensor.layout is not torch.strided for tensor in tensors):  # it could not be stacked with the others'
        raise ValueError("data for one user must be dense tensors")
    return tuple(tensor[0].clone() for tensor in tensors)


def _batches(examples: Sequence[Example | None]) -> Iterator[tuple[Example, list[bool]]]:
    """Stacked examples, and which of their rows count.

    Most examples have the same shapes. They make one batch with a row for every user, in which one of them stands in for each
    that is missing or different: so no row's place, on which its last bits depend, depends on other users. The rest is alone.
    """
    kinds = Counter(_kind(example) for example in examples if example is not None)
    if not kinds:
        return
    usual = max(kinds, key=lambda kind: (kinds[kind], str(kind)))
    counted = [example is not None and _kind(example) == usual for example in examples]
    placeholder = next(example for example, ours in zip(examples, counted, strict=True) if ours)
    rows = [example if ours else placeholder for example, ours in zip(examples, counted, strict=True)]
    yield tuple(torch.stack(parts) for parts in zip(*rows, strict=True)), counted
    for example, ours in zip(examples, counted, strict=True):
        if example is not None and not ours:
            yield tuple(part.unsqueeze(0) for part in example), [True]


def _kind(example: Example) -> tuple[tuple[torch.Size, torch.dtype, torch.device], ...]:
    return tuple((part.shape, part.dtype, part.device) for part in example)
