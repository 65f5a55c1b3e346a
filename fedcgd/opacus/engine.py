"""`opacus.PrivacyEngine` with correlated noise."""

import math
import secrets
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from opacus import PrivacyEngine
from opacus.data_loader import wrap_collate_with_empty
from opacus.grad_sample import AbstractGradSampleModule, get_gsm_class
from opacus.optimizers import DPOptimizer
from torch import nn, optim
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from fedcgd.gradients import refuse_batch_statistics
from fedcgd.keys import NoiseKey
from fedcgd.noise.source import NoiseMode
from fedcgd.opacus.batches import RoundBatches, RoundLoader
from fedcgd.opacus.ghost import GhostHooks, GhostLoss, GhostModule
from fedcgd.opacus.independence import Independence
from fedcgd.opacus.optimizer import CorrelatedOptimizer, RoundNoise
from fedcgd.opacus.rounds import Rounds
from fedcgd.participation import Participation, Sampling
from fedcgd.plan import Plan

Private = tuple[Any, ...]
"""(module, optimizer, data_loader), or (module, optimizer, criterion, data_loader) with ghost clipping."""


class CorrelatedPrivacyEngine(PrivacyEngine):  # type: ignore[misc]
    """Makes a model, an optimizer and a data loader train with x̂_t = x_t + ζσ·(C⁻¹Z)_t, as `opacus.PrivacyEngine` does.

    A round is an optimizer step, a user is an example, and an epoch is len(data_loader) steps. The returned loader
    picks the batches, by the sampling of the plan's participation:

    - none: a fixed split into batches, the same in each epoch; whoever knows it learns no more than ε allows.
    - balls-in-bins: each example in one secret random batch, the same in each epoch.
    - poisson: each example in each step with probability 1/len(data_loader).
    - cyclic-poisson: `min_separation` groups in turn, each of the group's examples with probability groups/len(data_loader).

    `key` decides noise and batches: who has it can take the noise away. An engine makes one run private; runs of other engines
    have other noise and other batches, also under the same key (except a simulation key, which repeats a run). A checkpoint
    goes on with its run: to go back to one and train on from there again publishes rounds twice, with fresh noise, and ε counts
    them once.

    Guarantee: a step releases, once, the gradients of exactly the examples that the loader gave out for its round, each clipped
    to the plan's norm over exactly the parameters that move (see `Rounds` and `fedcgd.opacus.clipping`); anything else that it
    can see raises before noise is drawn. It cannot see whether the loss of an example depends on others (docs/central.md lists
    what is up to the program). Batches are divided by their expected size. `get_epsilon` and `save_checkpoint` are as in Opacus.
    """

    def __init__(self, key: NoiseKey) -> None:
        # PrivacyEngine.__init__ would make an accountant of independent noise, and warn about noise that is not used.
        self.secure_mode, self.secure_rng, self.dataset = False, None, None
        self._key = key
        self.accountant: Rounds | None = None
        """The rounds of the run; None before there is one."""

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        plan: Plan,
        noise: NoiseMode | None = None,
        batch_first: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
    ) -> Private:
        """The private counterparts, for the rounds of `plan`.

        `noise` is `replay` (made again from the key), `buffer` (kept beside the model) or `cpu-buffer`; by default
        whichever of the first two the mechanism does with less. With the `grad_sample_mode` "ghost" linear and embedding layers
        make no per-example gradients, and the criterion is returned too. `batch_first`, `loss_reduction` and `wrap_model` are
        as in Opacus.
        Raises ValueError if the plan and the loader do not fit each other, and for what is not accounted for.
        """
        if self.accountant is not None:
            raise RuntimeError("this engine has made a run private already; make another engine for another run")
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be a fedcgd.plan.Plan, got {type(plan).__name__}; Plan.calibrated makes one")
        examples, steps = _check_loader(data_loader)
        _check_fits(plan.participation, steps)
        inner = module._module if isinstance(module, AbstractGradSampleModule) else module
        _check_module(inner, optimizer)
        # torch tells at every step that the first layer's input is data and needs no gradient, which is no news.
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        moving = [p for p in inner.parameters() if p.requires_grad]
        made_noise = RoundNoise(plan, self._key, sum(p.numel() for p in moving), noise)
        wrapped = self._wrapped(module, grad_sample_mode, batch_first, loss_reduction, wrap_model)
        loss = None
        if grad_sample_mode == "ghost":
            loss = GhostLoss(nn.CrossEntropyLoss() if criterion is None else criterion, loss_reduction)
        rounds = Rounds(plan, "" if self._key.simulated else secrets.token_hex(16))
        if isinstance(optimizer, CorrelatedOptimizer):
            optimizer.retire()
        private = CorrelatedOptimizer(
            optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer,
            module=inner,
            rounds=rounds,
            noise=made_noise,
            expected_batch_size=examples / steps,
            loss_reduction=loss_reduction,
            expanded=wrapped if grad_sample_mode == "ew" else None,
        )
        Independence(inner, wrapped if grad_sample_mode == "ew" else inner, batch_first)
        loader = self._loader(
            data_loader, RoundBatches(plan.participation, examples, steps, self._choices, rounds), batch_first
        )
        self.accountant = rounds
        return (wrapped, private, loader) if loss is None else (wrapped, private, loss, loader)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        mechanism: Any,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float,
        sampling: Sampling | None = None,
        groups: int | None = None,
        poisson_sampling: bool | None = None,
        clipping: str = "flat",
        noise_generator: None = None,
        **options: Any,
    ) -> Private:
        """`make_private` with the plan that has the smallest σ for `epochs` epochs within (`target_epsilon`, `target_delta`).

        `mechanism` is what `Plan.calibrated` takes; `sampling` is one of those named above, with `groups` for "cyclic-poisson".
        As in Opacus, the default is Poisson sampling, and poisson_sampling=False is "none". Poisson sampling is accounted for
        with independent noise (DP-SGD) only: a mechanism with correlated noise needs another one.
        `clipping` and `noise_generator` are there for callers of Opacus and have one value each; `options` are `make_private`'s.
        Raises ValueError for what is not accounted for.
        """
        if clipping != "flat":
            raise ValueError(f"clipping must be flat, got {clipping!r}: the sensitivity of no other is accounted for")
        if noise_generator is not None:
            raise ValueError("noise_generator cannot be given: the noise comes from the engine's key")
        if sampling is not None and poisson_sampling is not None and poisson_sampling != (sampling == "poisson"):
            raise ValueError(f"poisson_sampling={poisson_sampling} contradicts sampling {sampling!r}; give one of them")
        _, steps = _check_loader(data_loader)

        def plan(sampling: Sampling) -> Plan:
            return Plan.calibrated(
                mechanism=mechanism,
                participation=_participation(steps, epochs, sampling, groups),
                clip_norm=max_grad_norm,
                epsilon=target_epsilon,
                delta=target_delta,
            )

        if sampling is None and poisson_sampling is not None:
            sampling = "poisson" if poisson_sampling else "none"
        try:
            chosen = plan(sampling or "poisson")
        except ValueError as error:
            if sampling is not None:
                raise
            raise ValueError(_choose_a_sampling(plan, error)) from None
        return self.make_private(
            module=module, optimizer=optimizer, criterion=criterion, data_loader=data_loader, plan=chosen, **options
        )

    def get_epsilon(self, delta: float) -> float:
        """An upper bound on ε of the rounds so far, at `delta`; adjacency is add or remove one example."""
        return 0.0 if self.accountant is None else self.accountant.get_epsilon(delta)

    def save_checkpoint(
        self, *, noise_scheduler: None = None, grad_clip_scheduler: None = None, **arguments: Any
    ) -> None:
        """`opacus.PrivacyEngine.save_checkpoint`; there are no schedulers of noise or clip norm."""
        _refuse_schedulers(noise_scheduler, grad_clip_scheduler)
        super().save_checkpoint(**arguments)

    def load_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: CorrelatedOptimizer | None = None,
        noise_scheduler: None = None,
        grad_clip_scheduler: None = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Go on from `save_checkpoint`: with its model, its run and its round; returns the checkpoint.

        Only tensors and plain values are read, never code. Raises ValueError, before anything is changed, if the checkpoint is of
        another plan, or if this engine has released rounds that the checkpoint does not know.
        """
        _refuse_schedulers(noise_scheduler, grad_clip_scheduler)
        if self.accountant is None:
            raise RuntimeError("call make_private first, with the plan of the checkpoint")
        options = {**(torch_load_kwargs or {}), "weights_only": True}
        checkpoint: dict[str, Any] = torch.load(path, **options)
        self.accountant.load_state_dict(checkpoint["privacy_accountant_state_dict"])
        module.load_state_dict(checkpoint["module_state_dict"], **(module_load_dict_kwargs or {}))
        state = checkpoint.pop("optimizer_state_dict", {})
        if optimizer is not None and state:
            optimizer.load_state_dict(state)
        elif (optimizer is not None) != bool(state):
            warnings.warn(
                "only one of the checkpoint and the call has an optimizer; its state is not loaded", stacklevel=2
            )
        return checkpoint

    def _choices(self) -> bytes:
        assert self.accountant is not None
        return self._key.choices_of(self.accountant.run)

    def _wrapped(self, module: nn.Module, mode: str, batch_first: bool, loss_reduction: str, wrap_model: bool) -> Any:
        if mode not in ("hooks", "functorch", "ew", "ghost"):
            raise ValueError(f"grad_sample_mode must be hooks, functorch, ew or ghost, got {mode!r}")
        expected = GhostModule if mode == "ghost" else get_gsm_class(mode)
        if isinstance(module, AbstractGradSampleModule) and type(module) is not expected:
            raise ValueError(
                f"the module is a {type(module).__name__} already, and grad_sample_mode {mode!r} needs another; give "
                "module.to_standard_module() instead"
            )
        if mode != "ghost":
            return self._prepare_model(
                module,
                batch_first=batch_first,
                loss_reduction=loss_reduction,
                grad_sample_mode=mode,
                wrap_model=wrap_model,
            )
        self.validate(module=module, optimizer=None, data_loader=None)
        if isinstance(module, GhostModule):
            if (module.batch_first, module.loss_reduction) != (batch_first, loss_reduction):
                raise ValueError("the module was wrapped with another batch_first or loss_reduction; unwrap it first")
            return module
        return (GhostModule if wrap_model else GhostHooks)(
            module, batch_first=batch_first, loss_reduction=loss_reduction
        )

    @staticmethod
    def _loader(data_loader: DataLoader[Any], batches: RoundBatches, batch_first: bool) -> RoundLoader:
        first = data_loader.dataset[0]
        parts = list(first.values()) if isinstance(first, Mapping) else list(first)
        return RoundLoader(
            data_loader.dataset,
            batch_sampler=batches,
            collate_fn=wrap_collate_with_empty(
                collate_fn=data_loader.collate_fn,
                batch_first=batch_first,
                sample_empty_shapes=[(0, *getattr(part, "shape", ())) for part in parts],
                dtypes=[getattr(part, "dtype", torch.long) for part in parts],
            ),
            num_workers=data_loader.num_workers,
            pin_memory=data_loader.pin_memory,
            worker_init_fn=data_loader.worker_init_fn,
            multiprocessing_context=data_loader.multiprocessing_context,
            prefetch_factor=data_loader.prefetch_factor,
            persistent_workers=False,  # workers of the last epoch would run ahead with its rounds
        )


def _check_loader(data_loader: DataLoader[Any]) -> tuple[int, int]:
    """(examples, steps of an epoch). Raises for a loader that picks examples in a way of its own."""
    if isinstance(data_loader.dataset, IterableDataset):
        raise TypeError("the data set must have a length and indices, so that the engine can pick its batches")
    if not isinstance(data_loader, RoundLoader) and (
        type(data_loader.batch_sampler) is not BatchSampler
        or type(data_loader.sampler) not in (SequentialSampler, RandomSampler)
    ):
        raise ValueError(
            f"the data loader has a sampler of its own ({type(data_loader.sampler).__name__}), and the engine picks the batches "
            "from the whole data set: give it a plain DataLoader, over a torch.utils.data.Subset if not all examples shall be "
            "used"
        )
    repeated = _repeated(data_loader.dataset)
    if repeated:
        raise ValueError(
            f"the data set has example {repeated[0]} and {len(repeated) - 1} others more than once (a Subset with repeated "
            "indices, or the same data set twice in a ConcatDataset): ε counts an example once in its round. To weigh examples, "
            "weigh their losses"
        )
    return len(data_loader.dataset), len(data_loader)  # type: ignore[arg-type]


def _repeated(dataset: Any) -> list[int]:
    """Which examples of `dataset` are one example of the data sets that it was made from, again."""
    if not isinstance(dataset, Subset | ConcatDataset):
        return []
    origins = _origins(dataset)
    last = {origin: i for i, origin in enumerate(origins)}
    return [i for i, origin in enumerate(origins) if last[origin] != i]  # the earlier ones


def _origins(dataset: Any) -> list[tuple[int, int]]:
    """For each example: (which data set without parts, its index there)."""
    if isinstance(dataset, ConcatDataset):
        return [origin for part in dataset.datasets for origin in _origins(part)]
    if isinstance(dataset, Subset):
        whole = _origins(dataset.dataset)
        return [whole[int(i)] for i in dataset.indices]
    return [(id(dataset), i) for i in range(len(dataset))]


def _check_fits(participation: Participation, steps: int) -> None:
    """Raise ValueError unless batches of a loader with `steps` steps an epoch keep the promise of `participation`."""
    rounds, separation = participation.rounds, participation.min_separation
    if rounds % steps:
        raise ValueError(
            f"the plan has {rounds} rounds, and an epoch of the data loader {steps} steps: plan for a multiple of {steps} "
            "rounds, epochs · len(data_loader)"
        )
    rate = participation.sampling_rate
    if rate is not None:
        if not math.isclose(rate * steps, separation, rel_tol=1e-9):
            raise ValueError(
                f"the plan's sampling_rate is {rate}, and a data loader with {steps} steps an epoch has batches of "
                f"{separation}/{steps} of the examples of a round's group: plan with sampling_rate={separation / steps}"
            )
        if separation > steps:
            raise ValueError(f"the plan has {separation} groups, and the data loader only {steps} steps an epoch")
    elif participation.sampling == "balls-in-bins" and separation != steps:
        raise ValueError(
            f"the plan has {separation} bins (min_separation), and the data loader {steps} steps an epoch; they must be equal"
        )
    elif separation > steps or participation.participations < rounds // steps:
        raise ValueError(
            f"the plan says at most {participation.participations} participations, {separation} rounds apart; with this data "
            f"loader each example takes part {rounds // steps} times, {steps} rounds apart"
        )


def _check_module(module: nn.Module, optimizer: optim.Optimizer) -> None:
    """Raise unless the parameters that can move are those that are clipped, and nothing else carries data away."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise TypeError("DistributedDataParallel is not supported: each process would add its own noise")
    known = set(module.parameters())
    given = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])  # in order
    if any(p not in known for p in given):
        raise ValueError("the optimizer has parameters that are not the module's; make it from module.parameters()")
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


def _participation(steps: int, epochs: int, sampling: Sampling, groups: int | None) -> Participation:
    """What `epochs` epochs of `steps` steps are."""
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    if (groups is not None) != (sampling == "cyclic-poisson"):
        raise ValueError(f"groups goes with cyclic-poisson sampling, got groups={groups} and sampling {sampling!r}")
    rounds = epochs * steps
    if sampling == "poisson":
        return Participation(rounds=rounds, sampling=sampling, sampling_rate=1 / steps)
    if groups is None:
        return Participation(rounds=rounds, min_separation=steps, sampling=sampling)
    if not 1 <= groups <= steps:
        raise ValueError(f"groups must be between 1 and the {steps} steps of an epoch, got {groups}")
    return Participation(rounds=rounds, min_separation=groups, sampling=sampling, sampling_rate=groups / steps)


def _choose_a_sampling(plan: Any, error: ValueError) -> str:
    """What to tell who left the sampling to Opacus' default, which `error` refused."""
    try:
        sigma = f"noise_multiplier {plan('none').noise_multiplier:.4g}"
    except ValueError as refused:
        sigma = str(refused)
    return (
        f"the default of Opacus is Poisson sampling, and here that cannot be: {error}. Say which sampling to use:\n"
        f"  sampling='none' (also poisson_sampling=False), a fixed split, which anybody may know: {sigma}\n"
        "  sampling='balls-in-bins', each example in one secret random batch of each epoch: less noise, found in seconds to "
        "minutes\n"
        "  sampling='cyclic-poisson' with groups=, for banded mechanisms; sampling='poisson' for DP-SGD"
    )


def _refuse_schedulers(noise_scheduler: Any, grad_clip_scheduler: Any) -> None:
    if noise_scheduler is not None or grad_clip_scheduler is not None:
        raise ValueError(
            "noise and clip norm are the plan's, the same in every round: there is no noise_scheduler or grad_clip_scheduler"
        )
