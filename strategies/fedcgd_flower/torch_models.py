"""The trained parameters of a torch model as Flower's arrays, and the way back."""

from collections.abc import Mapping

import torch
from flwr.app import Array, ArrayRecord
from torch import nn


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
