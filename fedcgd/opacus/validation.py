"""What the Opacus engine refuses before any work: loaders, models and optimizers whose releases no plan would cover."""

import math
from typing import Any

from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from fedcgd.central.batches import refuse_repeated
from fedcgd.clipping.per_sample_gradients import refuse_batch_statistics
from fedcgd.opacus.batches import RoundLoader
from fedcgd.opacus.rounds import Epoch
from fedcgd.participation import Participation

_DISTRIBUTED = (
    nn.parallel.DistributedDataParallel,
    nn.DataParallel,
    FullyShardedDataParallel,
    DifferentiallyPrivateDistributedDataParallel,
)


def epoch_of(data_loader: DataLoader[Any], accumulation_steps: int, ranks: int = 1) -> Epoch:
    """An epoch in which a step takes so many batches. Raises for a loader that picks examples its own way."""
    if isinstance(data_loader.dataset, IterableDataset):
        raise TypeError("the data set must have a length and indices, so that the engine can pick its batches")
    if data_loader.batch_sampler is None:
        raise ValueError(
            "the data loader has batch_size=None, so that its batches are the data set's; give it a batch_size"
        )
    if not isinstance(data_loader, RoundLoader) and (
        type(data_loader.batch_sampler) is not BatchSampler
        or type(data_loader.sampler) not in (SequentialSampler, RandomSampler)
    ):
        raise ValueError(
            f"the data loader has a sampler of its own ({type(data_loader.sampler).__name__}), and the engine picks the batches "
            "from the whole data set: give it a plain DataLoader, over a torch.utils.data.Subset if not all examples shall be "
            "used"
        )
    refuse_repeated(data_loader.dataset)
    batches = len(data_loader)
    if not batches:
        raise ValueError(f"the data loader has no batch: its data set has {len(data_loader.dataset)} examples")  # type: ignore[arg-type]
    if accumulation_steps < 1 or batches % accumulation_steps:
        raise ValueError(
            f"accumulation_steps must be at least 1 and divide the {batches} batches of an epoch, got {accumulation_steps}: "
            "choose the batch size accordingly"
        )
    parts = accumulation_steps if accumulation_steps > 1 else ranks
    if parts % ranks:
        raise ValueError(
            f"accumulation_steps must be 1 or a multiple of the {ranks} processes, so that each has as many parts of a batch, "
            f"got {accumulation_steps}"
        )
    return Epoch(examples=len(data_loader.dataset), steps=batches // accumulation_steps, parts=parts)  # type: ignore[arg-type]


def check_fits(participation: Participation, epoch: Epoch) -> None:
    """Raise ValueError unless the rounds of `participation` are whole epochs, and its batches as large as those of the loader."""
    if participation.rounds % epoch.steps:
        raise ValueError(
            f"the plan has {participation.rounds} rounds, and an epoch of the data loader {epoch.steps} steps: plan for a "
            f"multiple of {epoch.steps} rounds, epochs · len(data_loader), or choose batch_size and drop_last so that an epoch "
            "has the steps of the plan"
        )
    rounds, separation = participation.rounds, participation.min_separation
    rate = participation.expected_rate
    if rate is None:
        if separation > epoch.steps or participation.participations < rounds // epoch.steps:
            raise ValueError(
                f"the plan says at most {participation.participations} participations, {separation} rounds apart; with this "
                f"data loader each example takes part {rounds // epoch.steps} times, {epoch.steps} rounds apart"
            )
    elif not math.isclose(rate * epoch.steps, 1.0, rel_tol=1e-9):
        rests = participation.scheme.takes_rate and separation <= epoch.steps
        fitting = Participation.for_cohorts(
            participation.sampling, rounds, users=epoch.steps, cohort_size=1, min_separation=separation if rests else None,
            warm_start=participation.warm_start,
        )  # fmt: skip
        raise ValueError(
            f"the plan expects {rate:.6g} of the examples in a batch, and a data loader with {epoch.steps} steps an epoch has "
            f"batches of 1/{epoch.steps} of them: plan with {fitting.as_python()}, say"
        )


def check_module(module: nn.Module, optimizer: optim.Optimizer, mode: str) -> None:
    """Raise unless the parameters that can move are those that are clipped, and nothing else carries data away.

    `mode` is how the gradients of examples are made.
    """
    _refuse_other_processes(module)
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(
            f"the optimizer must be one torch optimizer of all parameters, got {type(optimizer).__name__}; to step several, take "
            "fedcgd.central.PrivateGradient, which fills in grad for all"
        )
    if type(optimizer).__module__.startswith("accelerate"):
        raise TypeError(
            "the optimizer was given to Accelerate's prepare() already: call make_private first, and then prepare(module, "
            "optimizer) of what it returned, without the loader"
        )
    known = set(module.parameters())
    given = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])  # in order
    if any(p not in known for p in given):
        raise ValueError(
            "Module parameters are different than optimizer Parameters: the optimizer has some that are not the module's; make "
            "it from module.parameters()"
        )
    missing = [name for name, p in module.named_parameters() if p.requires_grad and p not in given]
    if missing:
        raise ValueError(
            f"{missing[0]} and {len(missing) - 1} other parameters of the module need gradients but are not in the optimizer: "
            "freeze them with requires_grad_(False), or give them to the optimizer"
        )
    moving = [p for p in given if p.requires_grad]
    if not moving:
        raise ValueError("no parameter of the optimizer needs a gradient: there is nothing to train")
    if len({p.device for p in moving}) > 1:
        raise ValueError("the parameters must all be on one device")
    if isinstance(optimizer, optim.LBFGS):
        raise TypeError(
            "LBFGS computes gradients several times a step, and a round is released once; take another optimizer"
        )
    refuse_batch_statistics(module)
    for name, layer in module.named_modules():
        if getattr(layer, "max_norm", None) is not None:
            raise ValueError(
                f"{name!r} has max_norm: it changes the embeddings of the tokens that it sees, without clipping or noise"
            )
        if mode == "functorch" and getattr(layer, "padding_idx", None) is not None and _is_trained(layer):
            raise ValueError(f"{name!r} has a padding_idx, whose row 'functorch' trains like others; take 'hooks'")


def _refuse_other_processes(module: nn.Module) -> None:
    """Raise TypeError for a model of several processes whose sums nobody would add up: those of Opacus' own are."""
    for layer in module.modules():
        spread = any(isinstance(p, DTensor) for p in layer.parameters(recurse=False))
        allowed = layer is module and isinstance(layer, DifferentiallyPrivateDistributedDataParallel)
        if spread or (isinstance(layer, _DISTRIBUTED) and not allowed):
            raise TypeError(
                f"{type(layer).__name__} is not supported there: it would add gradients up before they are clipped, or nothing "
                "would, or its parameters are spread over the processes. Put "
                "opacus.distributed.DifferentiallyPrivateDistributedDataParallel around the whole model, once, in a process for "
                "each device; a model in fully_shard is trained by fedcgd.central.PrivateGradient"
            )


def _is_trained(layer: nn.Module) -> bool:
    return any(p.requires_grad for p in layer.parameters(recurse=False))


def refuse_schedulers(noise_scheduler: Any, grad_clip_scheduler: Any) -> None:
    if noise_scheduler is not None or grad_clip_scheduler is not None:
        raise ValueError(
            "noise and clip norm are the plan's, the same in every round: there is no noise_scheduler or grad_clip_scheduler"
        )
