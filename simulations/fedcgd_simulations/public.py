"""Public examples without labels for a task's model, to measure its curvature on."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from fedcgd.curvature.public import Public
from fedcgd_simulations.tasks import NAMES, get_task

HELD_OUT = "held-out"


def public_examples(
    task: str,
    *,
    model: str | None = None,
    public: str = HELD_OUT,
    examples: int = 1000,
    seed: int = 0,
) -> Public:
    """The task's initial model of `seed`, and the first `examples` public images for it, whose labels nobody looks at.

    `public` is `held-out`, the task's validation examples, or the name of another task, whose training images are shrunk or
    enlarged to the size that the model takes: images of another kind. Raises ValueError for examples that have no such size.
    """
    if public not in (HELD_OUT, *NAMES):
        raise ValueError(f"unknown public examples {public!r}; there are {HELD_OUT} and those of {', '.join(NAMES)}")
    if public == task:
        raise ValueError(
            f"the training examples of {task} are what is private in it; write --public {HELD_OUT} or another task"
        )
    own = get_task(task, model=model)
    wanted = own.load().validation.inputs
    inputs = wanted if public == HELD_OUT else resized(get_task(public).load().train.inputs[:examples], wanted)
    module = own.model(seed)
    with torch.no_grad():
        classes = module(inputs[:1]).shape[1]
    return Public(module, own.loss, inputs[:examples].clone(), classes=classes)


def resized(images: Tensor, like: Tensor) -> Tensor:
    """`images` as if they were of `like`: its height and width (by the mean of areas), its channels, flat if it is flat."""
    found, wanted = _as_images(images), _as_images(like[:1])
    if found.shape[1] != wanted.shape[1]:
        found = found.mean(dim=1, keepdim=True).expand(-1, wanted.shape[1], -1, -1)
    found = functional.interpolate(found, size=wanted.shape[2:], mode="area")
    return found.reshape(-1, *like.shape[1:]).contiguous()


def _as_images(inputs: Tensor) -> Tensor:
    """Shape (examples, channels, height, width); a flat row of a square number of pixels is a square."""
    side = math.isqrt(inputs.shape[1]) if inputs.dim() == 2 else 0
    if inputs.dim() == 2 and inputs.is_floating_point() and side * side == inputs.shape[1]:
        return inputs.reshape(-1, 1, side, side)
    if inputs.dim() == 4:
        return inputs
    raise ValueError(
        f"only images can be resized, got examples of shape {tuple(inputs.shape[1:])}; use --public {HELD_OUT}"
    )
