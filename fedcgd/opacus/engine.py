"""`opacus.PrivacyEngine` with correlated noise."""

import pickle
import secrets
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from opacus.data_loader import CollateFnWithEmpty
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModule, get_gsm_class
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from fedcgd.accounting.guarantee import NO_NOISE, large_delta
from fedcgd.keys import NoiseKey
from fedcgd.mechanisms import Mechanism
from fedcgd.noise.source import NoiseMode
from fedcgd.opacus.batches import RoundBatches, RoundLoader
from fedcgd.opacus.checks import check_fits, check_loader, check_module, refuse_schedulers
from fedcgd.opacus.ghost import CompactHooks, CompactModule, GhostHooks, GhostLoss, GhostModule
from fedcgd.opacus.independence import Independence
from fedcgd.opacus.optimizer import CorrelatedOptimizer, RoundNoise
from fedcgd.opacus.planning import check_clipping, chosen_sampling, plan_of
from fedcgd.opacus.rounds import NothingYet, Rounds
from fedcgd.optimisation.catalogue import mechanism as spelled
from fedcgd.participation import Participation, Sampling
from fedcgd.plan import Plan

Private = tuple[Any, ...]
"""(module, optimizer, data_loader), or (module, optimizer, criterion, data_loader) with ghost clipping."""


_WRAPPERS: dict[str, tuple[Any, Any]] = {"hooks": (CompactModule, CompactHooks), "ghost": (GhostModule, GhostHooks)}
"""Around the model, and into it."""


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
    what is up to the program, and where arguments and answers differ from Opacus'). Batches are divided by their expected size.

    `accountant` and `secure_mode` are Opacus': ε is always found by the accountant of the plan, whichever is named, and
    noise is cryptographic and on a grid in any case, on every device; with secure_mode=True a simulation key and a
    `noise_generator` are refused.
    """

    def __init__(self, key: NoiseKey, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        # PrivacyEngine.__init__ would make an accountant of independent noise, and warn about noise that is not used.
        if not isinstance(key, NoiseKey):  # not shown: it may be a key
            raise TypeError(f"key must be a NoiseKey, for example NoiseKey.generate(); got {type(key).__name__}")
        create_accountant(accountant)  # only to raise for an unknown name what Opacus raises
        if accountant != "prv":
            warnings.warn(
                f"accountant={accountant!r} is not used: ε is an upper bound by the accountant of the plan",
                stacklevel=2,
            )
        if secure_mode and key.simulated:
            raise ValueError("Passing seed is prohibited in secure mode, and the key is that of a simulation seed")
        self.secure_mode, self.secure_rng, self.dataset = secure_mode, None, None
        self._key = key
        self._rounds: Rounds | None = None

    @property
    def accountant(self) -> Rounds | NothingYet:
        """The rounds of the run, where Opacus has its accountant; before `make_private`, of none."""
        return NothingYet() if self._rounds is None else self._rounds

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        plan: Plan | None = None,
        mechanism: Mechanism | str | None = None,
        noise_multiplier: float | None = None,
        max_grad_norm: float | None = None,
        epochs: int | None = None,
        target_delta: float | None = None,
        sampling: Sampling | None = None,
        groups: int | None = None,
        noise: NoiseMode | None = None,
        batch_first: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
        poisson_sampling: bool | None = None,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        accumulation_steps: int = 1,
    ) -> Private:
        """The private counterparts, for the rounds of `plan`.

        In place of a plan, Opacus' `noise_multiplier` (σ) and `max_grad_norm` (ζ) will do, with what they leave open:
        `mechanism`, `epochs`, `target_delta`, and `sampling` as in `make_private_with_epsilon`. With `accumulation_steps` = m
        a round's batch comes from the loader in m parts, and is released once, after the last of them.

        `noise` is `replay` (made again from the key), `buffer` (kept beside the model) or `cpu-buffer`; by default
        whichever of the first two the mechanism does with less. With the `grad_sample_mode` "ghost" linear and embedding layers
        make no per-example gradients, and the criterion is returned too. `noise_generator` seeds a simulation, for tests.
        `batch_first`, `loss_reduction` and `wrap_model` are as in Opacus; `clipping` and `rand_on_empty` have one value each.
        Raises ValueError if the plan and the loader do not fit each other, and for what is not accounted for.
        """
        if self._rounds is not None:
            raise RuntimeError("this engine has made a run private already; make another engine for another run")
        check_clipping(clipping, max_grad_norm)
        if rand_on_empty:
            raise ValueError("rand_on_empty must be False: rows of no example are not accounted for")
        examples, steps = check_loader(data_loader, accumulation_steps)
        if plan is None:
            plan = self._plan(
                steps,
                mechanism,
                noise_multiplier,
                max_grad_norm,
                epochs,
                target_delta,
                sampling,
                poisson_sampling,
                groups,
            )
        else:
            _check_only_the_plan(
                plan,
                {"noise_multiplier": noise_multiplier, "max_grad_norm": max_grad_norm, "target_delta": target_delta},
                mechanism=mechanism, epochs=epochs, sampling=sampling, poisson_sampling=poisson_sampling, groups=groups,
            )  # fmt: skip
        check_fits(plan.participation, steps)
        inner = module._module if isinstance(module, AbstractGradSampleModule) else module
        self.validate(module=inner, optimizer=None, data_loader=None)
        check_module(inner, optimizer, grad_sample_mode)
        moving = [p for p in inner.parameters() if p.requires_grad]
        self._key = self._run_key(noise_generator)
        if plan.noiseless:
            warnings.warn(f"{NO_NOISE}; gradients are clipped as in the real run", stacklevel=2)
        if large := large_delta(plan.delta, examples, "examples"):
            warnings.warn(large, stacklevel=2)
        # torch tells at every step that the first layer's input is data and needs no gradient, which is no news.
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        made_noise = RoundNoise(plan, self._key, sum(p.numel() for p in moving), noise)
        wrapped = self._wrapped(module, grad_sample_mode, batch_first, loss_reduction, wrap_model)
        loss = None
        if grad_sample_mode == "ghost":
            loss = GhostLoss(nn.CrossEntropyLoss() if criterion is None else criterion, loss_reduction)
        rounds = Rounds(plan, "" if self._key.simulated else secrets.token_hex(16), 1 / steps, self._key.fingerprint)
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
        Independence(inner, wrapped if grad_sample_mode == "ew" else inner, batch_first, rounds.handed_out, wrapped)
        batches = RoundBatches(plan.participation, examples, steps, self._choices, rounds, accumulation_steps)
        loader = self._loader(data_loader, batches, batch_first)
        self._rounds = rounds
        return (wrapped, private, loader) if loss is None else (wrapped, private, loss, loader)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        mechanism: Mechanism | str,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float,
        sampling: Sampling | None = None,
        groups: int | None = None,
        poisson_sampling: bool | None = None,
        clipping: str = "flat",
        accumulation_steps: int = 1,
        **options: Any,
    ) -> Private:
        """`make_private` with the plan that has the smallest σ for `epochs` epochs within (`target_epsilon`, `target_delta`).

        `mechanism` is what `Plan.calibrated` takes; `sampling` is one of those named above, with `groups` for "cyclic-poisson".
        As in Opacus, the default is Poisson sampling, and poisson_sampling=False is "none". Poisson sampling is accounted for
        with independent noise (DP-SGD) only: a mechanism with correlated noise needs another one. `options` are `make_private`'s.
        Raises ValueError for what is not accounted for.
        """
        check_clipping(clipping, max_grad_norm)

        def calibrated(participation: Participation) -> Plan:
            return Plan.calibrated(
                mechanism, participation, clip_norm=max_grad_norm, epsilon=target_epsilon, delta=target_delta
            )

        steps = check_loader(data_loader, accumulation_steps)[1]
        sampling = chosen_sampling(sampling, poisson_sampling)
        plan = plan_of(calibrated, steps, epochs=epochs, sampling=sampling, groups=groups)
        return self.make_private(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            plan=plan,
            accumulation_steps=accumulation_steps,
            **options,
        )

    def get_epsilon(self, delta: float) -> float:
        """An upper bound on ε of the rounds so far, at `delta`; adjacency is zero out one example."""
        return self.accountant.get_epsilon(delta)

    def save_checkpoint(
        self, *, noise_scheduler: None = None, grad_clip_scheduler: None = None, **arguments: Any
    ) -> None:
        """`opacus.PrivacyEngine.save_checkpoint`; there are no schedulers of noise or clip norm."""
        refuse_schedulers(noise_scheduler, grad_clip_scheduler)
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
        refuse_schedulers(noise_scheduler, grad_clip_scheduler)
        if self._rounds is None:
            raise RuntimeError("call make_private first, with the plan of the checkpoint")
        # To main memory first: what was saved on a GPU can be loaded without one, and is not there twice with one.
        options = {"map_location": "cpu", **(torch_load_kwargs or {}), "weights_only": True}
        try:
            checkpoint: dict[str, Any] = torch.load(path, **options)
            run, model = checkpoint["privacy_accountant_state_dict"], checkpoint["module_state_dict"]
        except (pickle.UnpicklingError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} holds no checkpoint, or more than tensors and plain values; save_checkpoint makes one"
            ) from error
        self._rounds.load_state_dict(run)
        module.load_state_dict(model, **(module_load_dict_kwargs or {}))
        state = checkpoint.pop("optimizer_state_dict", {})
        if optimizer is not None and state:
            optimizer.load_state_dict(state)
        elif (optimizer is not None) != bool(state):
            warnings.warn(
                "only one of the checkpoint and the call has an optimizer; its state is not loaded", stacklevel=2
            )
        return checkpoint

    def _choices(self) -> bytes:
        assert self._rounds is not None
        return self._key.choices_of(self._rounds.run)

    def _plan(
        self,
        steps: int,
        mechanism: Mechanism | str | None,
        noise_multiplier: float | None,
        clip_norm: float | None,
        epochs: int | None,
        delta: float | None,
        sampling: Sampling | None,
        poisson_sampling: bool | None,
        groups: int | None,
    ) -> Plan:
        if mechanism is None or noise_multiplier is None or clip_norm is None or epochs is None or delta is None:
            given = {
                "mechanism": mechanism, "noise_multiplier": noise_multiplier, "max_grad_norm": clip_norm, "epochs": epochs,
                "target_delta": delta,
            }  # fmt: skip
            missing = ", ".join(name for name, value in given.items() if value is None)
            raise ValueError(
                f"give plan= (Plan.calibrated makes one), or in its place also {missing}: what is accounted for is a whole run "
                "of one mechanism, and not each step by itself as in Opacus"
            )

        def with_noise(participation: Participation) -> Plan:
            return Plan(
                mechanism=spelled(mechanism, participation) if isinstance(mechanism, str) else mechanism,
                participation=participation,
                clip_norm=clip_norm,
                noise_multiplier=noise_multiplier,
                delta=delta,
            )

        sampling = chosen_sampling(sampling, poisson_sampling)
        return plan_of(with_noise, steps, epochs=epochs, sampling=sampling, groups=groups)

    def _run_key(self, noise_generator: torch.Generator | None) -> NoiseKey:
        """The key of the run. Raises ValueError for a seed that would make a private run a simulation."""
        if noise_generator is None:
            return self._key
        if self.secure_mode:
            raise ValueError("Passing seed is prohibited in secure mode")
        if not self._key.simulated:
            raise ValueError(
                "noise_generator is a seed, and the noise comes from the engine's key: for a test make the engine with "
                "NoiseKey.simulation(seed), a simulation, and leave noise_generator out or give it as well"
            )
        seed = torch.randint(2**62, (1,), generator=noise_generator, device=noise_generator.device)
        return NoiseKey.simulation(int(seed))

    def _wrapped(self, module: nn.Module, mode: str, batch_first: bool, loss_reduction: str, wrap_model: bool) -> Any:
        if mode not in ("hooks", "functorch", "ew", "ghost"):
            raise ValueError(f"grad_sample_mode must be hooks, functorch, ew or ghost, got {mode!r}")
        wrappers = _WRAPPERS.get(mode)
        if mode == "hooks" and (
            type(module) is GradSampleModule
            or not any(type(layer) in (nn.Embedding, nn.Conv2d) for layer in module.modules())
        ):
            wrappers = None  # Opacus' own does it
        expected = wrappers[0] if wrappers else get_gsm_class(mode)
        if isinstance(module, AbstractGradSampleModule) and type(module) is not expected:
            raise ValueError(
                f"the module is a {type(module).__name__} already, and grad_sample_mode {mode!r} needs another; give "
                "module.to_standard_module() instead"
            )
        if wrappers is None:
            return self._prepare_model(
                module,
                batch_first=batch_first,
                loss_reduction=loss_reduction,
                grad_sample_mode=mode,
                wrap_model=wrap_model,
            )
        self.validate(module=module, optimizer=None, data_loader=None)
        if isinstance(module, expected):
            if (module.batch_first, module.loss_reduction) != (batch_first, loss_reduction):
                raise ValueError("the module was wrapped with another batch_first or loss_reduction; unwrap it first")
            return module
        return wrappers[0 if wrap_model else 1](module, batch_first=batch_first, loss_reduction=loss_reduction)

    @staticmethod
    def _loader(data_loader: DataLoader[Any], batches: RoundBatches, batch_first: bool) -> RoundLoader:
        first = data_loader.dataset[0]
        parts = list(first.values()) if isinstance(first, Mapping) else list(first)
        return RoundLoader(
            data_loader.dataset,
            batch_sampler=batches,
            collate_fn=_Collate(
                data_loader.collate_fn,
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


class _Collate(CollateFnWithEmpty):  # type: ignore[misc]
    """Opacus', with empty targets too in an empty batch whose examples are the second dimension of the inputs."""

    def _make_empty_batch(self, sample: Any) -> Any:
        if isinstance(sample, Tensor) and sample.dim() == 1:
            return torch.empty_like(sample[:0])
        return super()._make_empty_batch(sample)


def _check_only_the_plan(plan: Any, same: Mapping[str, float | None], **others: Any) -> None:
    """Raise unless `plan` is a plan, what is given beside it says the same, and `others` are not given."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a fedcgd.plan.Plan, got {type(plan).__name__}; Plan.calibrated makes one")
    planned = {"noise_multiplier": plan.noise_multiplier, "max_grad_norm": plan.clip_norm, "target_delta": plan.delta}
    for name, value in same.items():
        if value not in (None, planned[name]):
            raise ValueError(f"{name}={value} contradicts the plan, which has {planned[name]}; leave it out")
    if given := [name for name, value in others.items() if value is not None]:
        raise ValueError(f"the plan says {', '.join(given)} already; leave out the one or the other")
