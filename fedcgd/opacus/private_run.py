"""A run before it begins, as one value: what is trained, by what plan and key, and how its gradients and batches are made."""

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader

from fedcgd.central.ranks import Ranks
from fedcgd.noise.keys import NoiseKey
from fedcgd.opacus.independence import same_random_numbers, seed_all
from fedcgd.plan import Plan


@dataclass(frozen=True, kw_only=True)
class GradientSettings:
    """How gradients of examples are made, by the arguments of `make_private`."""

    mode: str
    batch_first: bool
    loss_reduction: Literal["mean", "sum"]
    wrap_model: bool
    copies: int


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """The batches of an epoch: of `examples`, in `steps` rounds of so many `parts` on all processes together."""

    examples: int
    steps: int
    parts: int


@dataclass(frozen=True, kw_only=True)
class PrivateRun:
    """What is known of a run when everything that could be refused has been accepted."""

    module: nn.Module
    """The model itself, without Opacus' wrapper."""
    optimizer: optim.Optimizer
    """That of the program, of all that is trained."""
    plan: Plan
    key: NoiseKey
    gradients: GradientSettings
    epoch: Epoch
    ranks: Ranks

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that move, in the order of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def facts(self, data_loader: DataLoader[Any]) -> dict[str, object]:
        """What has to be the same on all ranks, by what an error calls it."""
        return {
            "the plan": repr(self.plan),
            "the key": self.key.fingerprint,
            "the parameters": [(name, p.shape, p.dtype, p.requires_grad) for name, p in self.module.named_parameters()],
            "how batches are made": (self.epoch, data_loader.batch_size, type(data_loader.sampler).__name__),
            "how gradients are made": self.gradients,
            "the data set, or the order of its examples": digest_of_some(data_loader.dataset),
        }


def digest_of_some(dataset: Any, compared: int = 32) -> str:
    """What tells data sets apart by some of their examples, for processes to compare, and says nothing of them."""

    def read(i: int) -> str:
        with same_random_numbers(()):
            seed_all(i)
            leaves = tree_flatten(dataset[i])[0]
        values = [leaf.tolist() if isinstance(leaf, Tensor | np.ndarray) else leaf for leaf in leaves]
        return repr([value for value in values if isinstance(value, int | float | str | bytes | list)])

    places = sorted({*range(0, len(dataset), -(-len(dataset) // compared)), len(dataset) - 1})
    some = [first if (first := read(i)) == read(i) else None for i in places]  # None: another each time it is read
    return hashlib.sha256(repr((places, some)).encode()).hexdigest()
