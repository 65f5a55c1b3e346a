"""`opacus.PrivacyEngine` with correlated noise."""

import secrets
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from opacus import PrivacyEngine
from opacus.data_loader import wrap_collate_with_empty
from opacus.optimizers import DPOptimizer
from torch import nn, optim
from torch.utils.data import DataLoader

from fedcgd.accounting import calibrate
from fedcgd.keys import NoiseKey
from fedcgd.mechanisms import Mechanism
from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import RELATIVE_LOSS
from fedcgd.noise.source import GeneratorNormals, GridNormals, NoiseMode, NoiseSource, grid_of
from fedcgd.opacus.batches import RoundBatches, RoundLoader
from fedcgd.opacus.optimizers import CorrelatedGhostOptimizer, CorrelatedOptimizer, Releases
from fedcgd.participation import Participation, Sampling
from fedcgd.plan import Plan

Private = tuple[Any, ...]
"""(module, optimizer, data_loader), or (module, optimizer, criterion, data_loader) with ghost clipping."""


_GHOST_ROUNDING = 2.0**-16 + RELATIVE_LOSS
"""Ghost clipping aims this far below the bound, relatively: it takes norms and scales in float32, and its sum is rounded as a
whole, so that a user can move the rounded sum by up to a grid step more in each coordinate.
"""


class CorrelatedPrivacyEngine(PrivacyEngine):  # type: ignore[misc]
    """Makes a model, an optimizer and a data loader train with x̂_t = x_t + ζσ·(C⁻¹Z)_t, as `opacus.PrivacyEngine` does.

    A round is an optimizer step, a user is an example, and an epoch is len(data_loader) steps. The returned loader
    picks the batches, by `sampling`:

    - none (default): a fixed split into batches, the same in each epoch; whoever knows it learns no more than ε allows.
    - balls-in-bins: each example in one secret random batch, the same in each epoch.
    - poisson: each example in each step with probability 1/len(data_loader).
    - cyclic-poisson: `groups` groups in turn, each of the group's examples with probability groups/len(data_loader).

    `key` decides noise and batches: who has it can take the noise away. An engine makes one run private; runs of other engines
    have other noise and other batches, also under the same key (except a simulation key, which repeats a run). Take one
    optimizer step for each batch, or the loader stops the loop. A checkpoint goes on with its run: to go back to one and
    train on from there again publishes rounds twice, with fresh noise, and ε counts them once.
    Batches are divided by their expected size. `get_epsilon` and `save_checkpoint` work as in Opacus.
    """

    def __init__(self, *, key: NoiseKey) -> None:
        # PrivacyEngine.__init__ would make an accountant of independent noise, and warn about noise that is not used.
        self.secure_mode, self.secure_rng, self.dataset = False, None, None
        self._key = key
        self._used = False

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        mechanism: Mechanism,
        noise_multiplier: float,
        max_grad_norm: float,
        epochs: int,
        sampling: Sampling | None = None,
        groups: int | None = None,
        poisson_sampling: bool | None = None,
        noise: NoiseMode | None = None,
        batch_first: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
        clipping: str = "flat",
        noise_generator: None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
    ) -> Private:
        """The private counterparts, for `epochs` epochs with noise multiplier σ = `noise_multiplier`.

        σ is the standard deviation of a coordinate of Z over `max_grad_norm`: it includes the sensitivity of C.
        `noise` is `replay` (made again from the key), `buffer` (kept beside the model) or `cpu-buffer`; by default
        whichever of the first two the mechanism does with less.
        `grad_sample_mode` is `hooks`, `functorch`, `ew` or `ghost`. With `ghost` the criterion is returned too.
        `poisson_sampling` is another way to say sampling "poisson" or "none"; `clipping` and `noise_generator` are
        there for callers of Opacus and have one value each.
        Raises ValueError for what is not accounted for.
        """
        if clipping != "flat":
            raise ValueError(f"clipping must be flat, got {clipping!r}: the sensitivity of no other is accounted for")
        if noise_generator is not None:
            raise ValueError("noise_generator cannot be given: the noise comes from the engine's key")
        if self._used:
            raise RuntimeError("this engine has made a run private already; make another engine for another run")
        # torch tells at every step that the first layer's input is data and needs no gradient, which is no news.
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        participation = _participation(len(data_loader), epochs, sampling, groups, poisson_sampling)
        plan = Plan(
            mechanism=mechanism,
            participation=participation,
            clip_norm=max_grad_norm,
            noise_multiplier=noise_multiplier,
            delta=min(1e-5, 1 / (2 * len(data_loader.dataset))),  # type: ignore[arg-type]
        )
        _check_same_parameters(module, optimizer)
        ghost = grad_sample_mode == "ghost"
        if ghost and any(torch.finfo(p.dtype).bits < 32 for p in module.parameters()):
            raise ValueError("ghost clipping needs float32 parameters: in a shorter format norms exceed their bound")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise TypeError("DistributedDataParallel is not supported: each process would add its own noise")
        wrapped = self._prepare_model(
            module,
            batch_first=batch_first,
            max_grad_norm=max_grad_norm * (1 - _GHOST_ROUNDING) if ghost else max_grad_norm,
            loss_reduction=loss_reduction,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
        )
        if hasattr(wrapped, "forbid_grad_accumulation"):
            wrapped.forbid_grad_accumulation()
        self.accountant = Releases(plan, "" if self._key.simulated else secrets.token_hex(16))
        examples, steps = len(data_loader.dataset), len(data_loader)  # type: ignore[arg-type]
        private = (CorrelatedGhostOptimizer if ghost else CorrelatedOptimizer)(
            optimizer=optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=examples / steps,
            loss_reduction=loss_reduction,
        )
        private.releases = self.accountant
        device = next(module.parameters()).device
        grid = grid_of(plan, sum(p.numel() for p in private.params)) if device.type == "cpu" else None

        @lru_cache(maxsize=1)
        def source_of(run: str) -> NoiseSource:
            secret = self._key.noise_of(run)
            normals = GeneratorNormals(secret, device) if grid is None else GridNormals(NoiseStream(secret), grid)
            return NoiseSource(mechanism, participation.rounds, normals, noise)

        def nonce_of(run: str, total: NDArray[Any], earlier: Sequence[int]) -> int:
            return self._key.nonce_of(run, total, earlier=earlier, attempt=0)

        source_of(self.accountant.run)  # so that a wrong `noise` is refused here
        private.source_of, private.nonce_of, private.grid = source_of, nonce_of, grid
        loader = self._loader(data_loader, participation, batch_first)
        self._used = True
        if ghost:
            loss = nn.CrossEntropyLoss(reduction=loss_reduction) if criterion is None else criterion
            ghost_loss = self._prepare_criterion(
                module=wrapped, optimizer=private, criterion=loss, loss_reduction=loss_reduction
            )
            return wrapped, private, ghost_loss, loader
        return wrapped, private, loader

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        mechanism: Mechanism,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float,
        sampling: Sampling | None = None,
        groups: int | None = None,
        poisson_sampling: bool | None = None,
        **options: Any,
    ) -> Private:
        """`make_private` with the smallest σ that keeps `epochs` epochs within (`target_epsilon`, `target_delta`)."""
        participation = _participation(len(data_loader), epochs, sampling, groups, poisson_sampling)
        guarantee = calibrate(mechanism, participation, epsilon=target_epsilon, delta=target_delta)
        return self.make_private(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            mechanism=mechanism,
            noise_multiplier=guarantee.noise_multiplier,
            max_grad_norm=max_grad_norm,
            epochs=epochs,
            sampling=sampling,
            groups=groups,
            poisson_sampling=poisson_sampling,
            **options,
        )

    def _loader(self, data_loader: DataLoader[Any], participation: Participation, batch_first: bool) -> DataLoader[Any]:
        batches = RoundBatches(
            participation,
            len(data_loader.dataset),  # type: ignore[arg-type]
            len(data_loader),
            lambda: self._key.choices_of(self.accountant.run),
            lambda: self.accountant.released,
        )
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


def _check_same_parameters(module: nn.Module, optimizer: optim.Optimizer) -> None:
    known = set(module.parameters())
    if any(p not in known for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer has parameters that are not the module's; make it from module.parameters()")


def _participation(
    steps: int, epochs: int, sampling: Sampling | None, groups: int | None, poisson_sampling: bool | None
) -> Participation:
    """What `epochs` epochs of `steps` steps are, for the sampling that was asked for in either way."""
    if poisson_sampling is not None:
        if sampling is not None and poisson_sampling != (sampling == "poisson"):
            raise ValueError(f"poisson_sampling={poisson_sampling} contradicts sampling {sampling!r}; give one of them")
        sampling = sampling or ("poisson" if poisson_sampling else "none")
    sampling = sampling or "none"
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
