"""A run that has been checked, and what it trains with: the private model, the private optimizer, the private loader."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, SequentialSampler

from fedcgd.noise.keys import NoiseKey
from fedcgd.opacus.batches import RoundBatches, RoundLoader, loader_over, split_in_order
from fedcgd.opacus.ghost import with_sample_gradients
from fedcgd.opacus.independence import same_random_numbers, seed_all
from fedcgd.opacus.optimizer import CorrelatedOptimizer
from fedcgd.opacus.ranks import Ranks
from fedcgd.opacus.release_tracker import ReleaseTracker
from fedcgd.opacus.round_noise import RoundNoise
from fedcgd.opacus.shards import Shards
from fedcgd.plan import Plan

_COMPARED = 32


@dataclass(frozen=True, kw_only=True)
class GradientSettings:
    """How gradients of examples are made, by the arguments of `make_private`."""

    mode: str
    batch_first: bool
    loss_reduction: Literal["mean", "sum"]
    wrap_model: bool
    copies: int


@dataclass(frozen=True, kw_only=True)
class PrivateRun:
    """What is known of a run when everything that could be refused has been accepted."""

    module: nn.Module
    """The model itself, without Opacus' wrapper."""
    plan: Plan
    key: NoiseKey
    gradients: GradientSettings
    examples: int
    steps: int
    """In an epoch."""
    accumulation_steps: int
    noise: RoundNoise
    ranks: Ranks | None
    shards: Shards | None

    @property
    def parts(self) -> int:
        """In how many parts a round's batch comes, on all processes together."""
        if self.ranks is None or self.accumulation_steps > 1:
            return self.accumulation_steps
        return self.ranks.count

    def facts(self, data_loader: DataLoader[Any]) -> dict[str, object]:
        """What has to be the same on all ranks, by what an error calls it."""
        batches = (self.examples, self.steps, self.parts, data_loader.batch_size, type(data_loader.sampler))
        return {
            "the plan": self.plan.to_description(),
            "the key": self.key.fingerprint,
            "the parameters": [(name, p.shape, p.dtype, p.requires_grad) for name, p in self.module.named_parameters()],
            "how batches are made": batches,
            "how gradients are made": self.gradients,
            "the data set, or the order of its examples": _some_of(data_loader.dataset),
        }

    def private_model(
        self, module: nn.Module, optimizer: optim.Optimizer, tracker: ReleaseTracker
    ) -> tuple[Any, CorrelatedOptimizer]:
        """`module`, whose backward passes leave gradients of examples, and the optimizer that clips, sums and releases them."""
        made = self.gradients
        wrapped = with_sample_gradients(
            module,
            made.mode,
            batch_first=made.batch_first,
            loss_reduction=made.loss_reduction,
            wrap_model=made.wrap_model,
        )
        return wrapped, CorrelatedOptimizer(
            optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer,
            module=self.module,
            tracker=tracker,
            noise=self.noise,
            expected_batch_size=self.examples / self.steps,
            loss_reduction=made.loss_reduction,
            copies=made.copies,
            expanded=wrapped if made.mode == "ew" else None,
            ranks=self.ranks,
            shards=self.shards,
        )

    def private_loader(self, data_loader: DataLoader[Any], tracker: ReleaseTracker) -> RoundLoader:
        """The loader of the batches that the key draws; for debugging (no noise, no secret) they are those of `data_loader`."""
        plan, key = self.plan, self.key
        in_order = (
            plan.noiseless
            and plan.participation.expected_rate is None
            and type(data_loader.sampler) is SequentialSampler
        )
        batches = RoundBatches(
            plan.participation,
            self.examples,
            self.steps,
            key.choices_of,
            tracker,
            self.parts,
            split_in_order(data_loader, self.accumulation_steps) if in_order else None,
            rank=0 if self.ranks is None else self.ranks.rank,
            ranks=1 if self.ranks is None else self.ranks.count,
        )
        return loader_over(data_loader, batches, self.gradients.batch_first, self.gradients.copies)


def _some_of(dataset: Any) -> list[str | None]:
    """What some examples hold, for processes to compare; None for one that is another each time it is read."""

    def read(i: int) -> str:
        with same_random_numbers(()):
            seed_all(i)
            leaves = tree_flatten(dataset[i])[0]
        values = [leaf.tolist() if isinstance(leaf, Tensor | np.ndarray) else leaf for leaf in leaves]
        return repr([value for value in values if isinstance(value, int | float | str | bytes | list)])

    places = {*range(0, len(dataset), -(-len(dataset) // _COMPARED)), len(dataset) - 1}
    return [first if (first := read(i)) == read(i) else None for i in sorted(places)]
