"""`opacus.PrivacyEngine` with correlated noise."""

import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn, optim
from torch.utils.data import DataLoader

from fedcgd.accounting.guarantee import NO_NOISE, large_delta
from fedcgd.central.ranks import Ranks
from fedcgd.central.releases import Releases
from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.schedule import Schedule
from fedcgd.noise.keys import NoiseKey
from fedcgd.opacus.accountant import RunAccountant
from fedcgd.opacus.batches import private_loader
from fedcgd.opacus.buffers import FirstBuffers
from fedcgd.opacus.first_batches import FirstBatches
from fedcgd.opacus.ghost import with_sample_gradients
from fedcgd.opacus.losses import GhostLoss
from fedcgd.opacus.optimizer import CorrelatedOptimizer
from fedcgd.opacus.plan_arguments import check_clipping, chosen_sampling, plan_from, plan_of, workload_of
from fedcgd.opacus.rounds import Epoch, GradientSettings, PrivateRun, Rounds, attach, detach_earlier_runs
from fedcgd.opacus.validation import check_fits, check_module, epoch_of, refuse_schedulers
from fedcgd.participation import Participation
from fedcgd.plan import Plan
from fedcgd.release import CentralRelease, NoiseMode

Private = tuple[Any, ...]
"""(module, optimizer, data_loader), or (module, optimizer, criterion, data_loader) with ghost clipping."""


class _Shared(TypedDict, total=False):
    """The arguments of both ways to make a model private but the mode, on which the types of the results depend."""

    module: Required[nn.Module]
    optimizer: Required[optim.Optimizer]
    criterion: Any
    data_loader: Required[DataLoader[Any]]
    mechanism: Mechanism | str | None
    sampling: str | None
    groups: int | None
    noise: NoiseMode | None
    batch_first: bool
    loss_reduction: Literal["mean", "sum"]
    poisson_sampling: bool | None
    clipping: str
    noise_generator: torch.Generator | None
    wrap_model: bool
    rand_on_empty: bool
    accumulation_steps: int
    augmentation_multiplicity: int
    assume_independent: str | None


class _OfPlan(_Shared, total=False):
    plan: Plan | None
    noise_multiplier: float | None
    max_grad_norm: float | None
    epochs: int | None
    target_delta: float | None


class _WithEpsilon(_Shared, total=False):
    target_epsilon: Required[float]
    target_delta: Required[float]
    epochs: Required[int]
    max_grad_norm: Required[float]
    schedule: Schedule


class CorrelatedPrivacyEngine(PrivacyEngine):  # type: ignore[misc]
    """Makes a model, an optimizer and a data loader train with x̂_t = x_t + ζσ·(C⁻¹Z)_t, as `opacus.PrivacyEngine` does.

    A round is an optimizer step, a user is an example, and an epoch is len(data_loader) steps. The returned loader
    picks the batches, by the sampling of the plan's participation:

    - none: a fixed split into batches, the same in each epoch; anyone who knows it learns no more than ε allows.
    - balls-in-bins: each example in one secret random batch, the same in each epoch.
    - random-allocation: each example in one secret random batch of each epoch, drawn anew.
    - poisson: each example in each step with probability 1/len(data_loader).
    - cyclic-poisson: `min_separation` groups in turn, each of the group's examples with probability groups/len(data_loader).

    An engine makes one run private; runs of other engines have other noise and other batches, also under the same key (except a
    simulation key, which repeats a run). A checkpoint goes on with its run: to go back to one and train on from there again
    publishes rounds twice, with fresh noise, and ε counts them once.

    Guarantee: a step releases, once, the gradients of exactly the examples that the loader issued for its round, each clipped
    to the plan's norm over exactly the parameters that move (`fedcgd.opacus.rounds`, `fedcgd.opacus.clipped_sum`), and buffers
    stay what they were; anything else that the engine can see raises before noise is drawn. It cannot
    see whether the loss of an example depends on others (`check_independence` and docs/independence.md say what it can see, and
    docs/central.md where arguments and answers differ from Opacus'). Batches are divided by their expected size.

    A model in Opacus' `DifferentiallyPrivateDistributedDataParallel` is trained by all processes of its group, each with its
    share of every batch and of the noise (`fedcgd.central.ranks`, docs/guides/distributed.md).

    Args:
        key: decides noise and batches: anyone who holds it can remove the noise.
        accountant: as in Opacus, and without effect: ε is always found by the accountant of the plan.
        secure_mode: with True a simulation key and a `noise_generator` are refused. Noise is cryptographic and on a grid in any
            case, on every device.
        record: the path of the run's ledger (`fedcgd ledger verify`), which rank 0 keeps. It has each release, durably, before
            there is noise of it, so that no round is released twice when a run goes on from a checkpoint. Without one nobody
            knows, and that is a warning.
        on_release: called with a `CentralRelease` after each step, on every rank: `fedcgd.release.to_wandb(run)`, for example.

    Raises:
        TypeError: for what is no NoiseKey.
        ValueError: for an unknown accountant, and a simulation key in secure mode.

    >>> from torch.utils.data import TensorDataset
    >>> model, data = nn.Linear(4, 2), TensorDataset(torch.zeros(80, 4), torch.zeros(80, dtype=torch.long))
    >>> engine = CorrelatedPrivacyEngine(NoiseKey.generate())
    >>> model, optimizer, loader = engine.make_private_with_epsilon(
    ...     module=model, optimizer=optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, batch_size=8),
    ...     mechanism="lambda-cgd:0.5", sampling="none", epochs=2, max_grad_norm=1.0, target_epsilon=8, target_delta=1e-5,
    ... )
    >>> engine.get_epsilon(delta=1e-5)  # before the first step
    0.0
    """

    def __init__(
        self,
        key: NoiseKey,
        *,
        accountant: str = "prv",
        secure_mode: bool = False,
        record: Path | str | None = None,
        on_release: Callable[[CentralRelease], object] | None = None,
    ) -> None:
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
        self._key, self._record, self._on_release = key, record, on_release
        self._account: RunAccountant | None = None

    @property
    def accountant(self) -> RunAccountant:
        """The rounds of the run, where Opacus has its accountant. Raises RuntimeError before `make_private`."""
        if self._account is None:
            raise RuntimeError(
                "there is no run yet: call make_private first, with the plan of the checkpoint if there is one"
            )
        return self._account

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an engine cannot be copied or pickled: two copies would release the same rounds, and its key would be written, too. "
            "Make another engine with the key for another run; save_checkpoint keeps where a run stands"
        )

    @overload
    def make_private(
        self, *, grad_sample_mode: Literal["ghost"], **arguments: Unpack[_OfPlan]
    ) -> tuple[nn.Module, CorrelatedOptimizer, GhostLoss, DataLoader[Any]]: ...

    @overload
    def make_private(
        self, *, grad_sample_mode: Literal["hooks", "functorch"] = "hooks", **arguments: Unpack[_OfPlan]
    ) -> tuple[nn.Module, CorrelatedOptimizer, DataLoader[Any]]: ...

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
        sampling: str | None = None,
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
        augmentation_multiplicity: int = 1,
        assume_independent: str | None = None,
    ) -> Private:
        """The private counterparts, for the rounds of a plan.

        The model and the wrapped optimizer belong to this run from now on: an earlier run of theirs ends.

        Args:
            module: in train mode; the model, or what an earlier `make_private` returned.
            optimizer: of all parameters that are trained.
            criterion: with ghost clipping, the loss; `CrossEntropyLoss()` by default.
            data_loader: a plain one; the engine picks the batches. With `noise_multiplier` 0, the sampling "none" and no
                shuffling they are those of the loader, in its order, so that a run can be compared with one without privacy.
            plan: what runs, and is accounted for. In its place Opacus' `noise_multiplier` (σ) and `max_grad_norm` (ζ) will do,
                with what they leave open: `mechanism`, `epochs`, `target_delta`, and `sampling` (with `groups`, or Opacus'
                `poisson_sampling`) as in `make_private_with_epsilon`.
            mechanism: a mechanism, or its name as the command line has it.
            noise_multiplier: σ, noise in units of the clip norm.
            max_grad_norm: ζ, the L2 norm that gradients of examples are clipped to.
            epochs: so many passes over the loader.
            target_delta: δ.
            sampling: how batches are drawn.
            groups: of cyclic Poisson sampling.
            noise: `replay` (regenerated from the key), `buffer` (kept next to the model) or `cpu-buffer`; by default whichever of
                the first two the mechanism does with less.
            batch_first: as in Opacus.
            loss_reduction: as in Opacus.
            poisson_sampling: as in Opacus.
            clipping: "flat".
            noise_generator: seeds a simulation, for tests.
            grad_sample_mode: "hooks", "functorch" or "ghost"; with the last one linear layers make no per-sample gradients on
                sequences either, and the criterion is returned too.
            wrap_model: as in Opacus.
            rand_on_empty: False.
            accumulation_steps: in how many batches of the loader a round's batch comes; it is released once, after the last. Of
                several processes each has an equal number of them; 1 is one for each process.
            augmentation_multiplicity: in how many copies the loader gives each example, rows that follow one another, labels
                too: it reads the example so often from the data set, whose transformations make them differ, or the example is
                a list of so many tuples or mappings. Their gradients are averaged before they are clipped (De et al.,
                "Unlocking High-Accuracy Differentially Private Image Classification through Scale", 2022, arXiv:2204.13650).
            assume_independent: why examples are independent where a check says that they are not; recorded with the run, whose
                checks then warn.

        Returns:
            (module, optimizer, data_loader), and with ghost clipping (module, optimizer, criterion, data_loader).

        Raises:
            ValueError: if plan and loader do not fit each other, and for what is not accounted for.
            TypeError: for a model, an optimizer or a data set of a kind that cannot be made private.
            RuntimeError: if this engine has released rounds: another run takes another engine.
        """
        if self._account is not None and self._account.released:
            raise RuntimeError("this engine has made a run private already; make another engine for another run")
        inner: nn.Module = module._module if isinstance(module, AbstractGradSampleModule) else module
        gradients = GradientSettings(
            mode=grad_sample_mode, batch_first=batch_first, loss_reduction=loss_reduction, wrap_model=wrap_model,
            copies=augmentation_multiplicity,
        )  # fmt: skip
        given = {
            "mechanism": mechanism, "noise_multiplier": noise_multiplier, "max_grad_norm": max_grad_norm, "epochs": epochs,
            "target_delta": target_delta, "sampling": sampling, "poisson_sampling": poisson_sampling, "groups": groups,
        }  # fmt: skip
        ranks = ranks_of(inner)
        with nullcontext() if ranks is None else ranks.telling_failures():
            check_clipping(clipping, max_grad_norm)
            _check_options(rand_on_empty, augmentation_multiplicity, assume_independent)
            epoch = epoch_of(data_loader, accumulation_steps, 1 if ranks is None else ranks.count)
            plan = plan_from(plan, given, epoch.steps)
            self._validate(inner, optimizer, plan, epoch, grad_sample_mode)
            run = PrivateRun(
                module=inner,
                optimizer=optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer,
                plan=plan,
                key=self._run_key(noise_generator),
                gradients=gradients,
                epoch=epoch,
                ranks=ranks,
            )
        if ranks is not None:
            ranks.agree(run.facts(data_loader))
        accountant = self._begin(run, noise, assume_independent)
        wrapped = with_sample_gradients(
            module, grad_sample_mode, batch_first=batch_first, loss_reduction=loss_reduction, wrap_model=wrap_model,
            copies=augmentation_multiplicity,
        )  # fmt: skip
        private = CorrelatedOptimizer(run, accountant.rounds)
        if (tell := self._on_release) is not None:

            def after_step(*_: Any) -> None:
                tell(CentralRelease(release=accountant.released, plan=run.plan))

            private.handles.append(run.optimizer.register_step_post_hook(after_step))
        loader = private_loader(data_loader, run, accountant.rounds)
        probing = inner.register_forward_pre_hook(FirstBatches(run, accountant, loader).before, with_kwargs=True)
        attach(inner, [*private.handles, probing, *FirstBuffers(inner).watch(inner)], accountant.rounds)
        self._key, self._account = run.key, accountant
        if grad_sample_mode == "ghost":
            loss = GhostLoss(nn.CrossEntropyLoss() if criterion is None else criterion, loss_reduction)
            return wrapped, private, loss, loader
        return wrapped, private, loader

    @overload
    def make_private_with_epsilon(
        self, *, grad_sample_mode: Literal["ghost"], **arguments: Unpack[_WithEpsilon]
    ) -> tuple[nn.Module, CorrelatedOptimizer, GhostLoss, DataLoader[Any]]: ...

    @overload
    def make_private_with_epsilon(
        self, *, grad_sample_mode: Literal["hooks", "functorch"] = "hooks", **arguments: Unpack[_WithEpsilon]
    ) -> tuple[nn.Module, CorrelatedOptimizer, DataLoader[Any]]: ...

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        mechanism: Mechanism | str | None = None,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float,
        sampling: str | None = None,
        groups: int | None = None,
        poisson_sampling: bool | None = None,
        clipping: str = "flat",
        accumulation_steps: int = 1,
        schedule: Schedule = "constant",
        **options: Any,
    ) -> Private:
        """`make_private` with the plan that has the smallest σ for `epochs` epochs within (`target_epsilon`, `target_delta`).

        Args:
            module: as in `make_private`, and so are the others that are not named here.
            optimizer: as in `make_private`.
            criterion: as in `make_private`.
            data_loader: as in `make_private`.
            mechanism: what `Plan.calibrated` takes; it has to be given. One without a number, such as "lambda-cgd", is chosen
                for the momentum of the `optimizer` and for the `schedule`.
            target_epsilon: ε of the whole run.
            target_delta: δ.
            epochs: so many passes over the loader.
            max_grad_norm: ζ.
            sampling: one of those named above. As in Opacus, the default is Poisson sampling, which is accounted for with
                independent noise (DP-SGD) only: a mechanism with correlated noise needs another one.
            groups: for "cyclic-poisson".
            poisson_sampling: False is the sampling "none".
            clipping: "flat".
            accumulation_steps: as in `make_private`.
            schedule: how the learning rate will move: "constant", "linear" (to 0) or "cosine". To move it is your scheduler's
                task.
            options: `make_private`'s.

        Returns:
            What `make_private` returns.

        Raises:
            ValueError: without a mechanism, and for what is not accounted for.
        """
        check_clipping(clipping, max_grad_norm)
        if mechanism is None:
            raise ValueError(
                'give also mechanism: mechanism="dp-sgd" is the independent noise of Opacus; mechanism="lambda-cgd" correlates '
                'it, with sampling="none" or sampling="balls-in-bins"'
            )

        def calibrated(participation: Participation) -> Plan:
            return Plan.calibrated(
                mechanism,
                participation,
                clip_norm=max_grad_norm,
                epsilon=target_epsilon,
                delta=target_delta,
                workload=workload_of(optimizer, schedule, participation.rounds),
            )

        steps = epoch_of(data_loader, accumulation_steps).steps
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
        """An upper bound on ε of the rounds so far; adjacency: zero out one example. 0 before the first.

        Of a run that ends here it is true only if the decision to end it depended on no model that it released. If it did
        (early stopping by public examples), the ε of the whole plan holds. What was decided by private examples without noise,
        as training losses and private validation are, no ε covers. `accountant.plan.guarantee(released=n)` prints the condition.

        Args:
            delta: δ.
        """
        return self.accountant.get_epsilon(delta)

    def save_checkpoint(
        self, *, noise_scheduler: None = None, grad_clip_scheduler: None = None, **arguments: Any
    ) -> None:
        """`opacus.PrivacyEngine.save_checkpoint`: the model, the optimizer, and where the run stands.

        Args:
            noise_scheduler: None: the noise is the plan's.
            grad_clip_scheduler: None: the clip norm is the plan's.
            arguments: as in Opacus: `path`, `module`, `optimizer`, …

        Raises:
            ValueError: for a scheduler.
            RuntimeError: before `make_private`.
        """
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
        """Go on from `save_checkpoint`: with its model, its run and its round.

        Only tensors and plain values are read, never code.

        Args:
            path: the checkpoint, or an open file.
            module: what `make_private` returned, with the plan of the checkpoint.
            optimizer: what `make_private` returned; None leaves the optimizer's state out.
            noise_scheduler: None: the noise is the plan's.
            grad_clip_scheduler: None: the clip norm is the plan's.
            module_load_dict_kwargs: for `module.load_state_dict`.
            torch_load_kwargs: for `torch.load`.

        Returns:
            The checkpoint, without the state of the optimizer.

        Raises:
            ValueError: before anything is changed, if the checkpoint is of another plan, or if this engine has released rounds
                that the checkpoint does not know; and for a scheduler.
            RuntimeError: before `make_private`.
        """
        refuse_schedulers(noise_scheduler, grad_clip_scheduler)
        accountant = self.accountant
        # To main memory first: what was saved on a GPU can be loaded without one, and is not there twice with one.
        options = {"map_location": "cpu", **(torch_load_kwargs or {}), "weights_only": True}
        try:
            checkpoint: dict[str, Any] = torch.load(path, **options)
            run, model = checkpoint["privacy_accountant_state_dict"], checkpoint["module_state_dict"]
        except (pickle.UnpicklingError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} holds no checkpoint, or more than tensors and plain values; save_checkpoint makes one"
            ) from error
        state = checkpoint.pop("optimizer_state_dict", {})
        accountant.load_state_dict(run)
        module.load_state_dict(model, **(module_load_dict_kwargs or {}))
        if optimizer is not None and state:
            optimizer.load_state_dict(state)
        elif (optimizer is not None) != bool(state):
            warnings.warn(
                "only one of the checkpoint and the call has an optimizer; its state is not loaded", stacklevel=2
            )
        return checkpoint

    def _validate(self, inner: nn.Module, optimizer: optim.Optimizer, plan: Plan, epoch: Epoch, mode: str) -> None:
        """Refuse what the plan does not cover; `inner` is the model itself."""
        check_fits(plan.participation, epoch)
        self.validate(module=inner, optimizer=None, data_loader=None)
        check_module(inner, optimizer, mode)
        if plan.noiseless:
            warnings.warn(f"{NO_NOISE}; gradients are clipped as in the real run", stacklevel=3)
        elif plan.clip_norm > 1e4:
            warnings.warn(
                f"max_grad_norm is {plan.clip_norm:g}, and noise follows it: gradients of examples are seldom longer than 100, "
                "so that little of them would be left. For a comparison without clipping and noise take noise_multiplier=0",
                stacklevel=3,
            )
        if large := large_delta(plan.delta, epoch.examples, "examples", exposed=1.0):
            warnings.warn(large, stacklevel=3)
        try:
            plan.to_description()
        except ValueError as error:
            if self._record is not None:
                raise
            warnings.warn(f"this run can be trained, but not saved (save_checkpoint will fail): {error}", stacklevel=3)
        # torch tells at every step that the first layer's input is data and needs no gradient, which is no news.
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)

    def _begin(self, run: PrivateRun, noise: NoiseMode | None, assumed: str | None) -> RunAccountant:
        """The account of the run, whose name and record all ranks have; earlier runs of the model end."""
        size = sum(p.numel() for p in run.trained)
        releases = Releases(
            run.plan, run.key, size, record=self._record, device=run.trained[0].device, ranks=run.ranks, mode=noise,
            configuration={"kind": "central", "examples": run.epoch.examples, "parameters": size},
        )  # fmt: skip
        if self._account is not None:
            self._account.rounds.end()  # of another model, perhaps: its releases would be on nobody's account
        if released := detach_earlier_runs(run.module):
            warnings.warn(
                f"an earlier run has released {released} rounds of this model: what it and the new run tell of an example "
                "together is more than the ε of either, unless their examples are of different people; both ε, and both δ, add "
                "up (fedcgd.compose has less than their sum)",
                stacklevel=3,
            )
        return RunAccountant(Rounds(run.plan, releases), run.epoch, run.key.fingerprint, assumed)

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
        seed = torch.empty(1, dtype=torch.int64, device=noise_generator.device).random_(generator=noise_generator)
        return NoiseKey.simulation(int(seed))


def ranks_of(module: nn.Module) -> Ranks | None:
    """The processes that train `module`, if it is made for several.

    Raises:
        RuntimeError: if there is no process group for a model that is made for one.
    """
    if not isinstance(module, DifferentiallyPrivateDistributedDataParallel):
        return None
    if (world := dist.group.WORLD if dist.is_available() else None) is None:
        raise RuntimeError(
            "the model is for several processes, and there is no process group: start the program with torchrun, and call "
            "torch.distributed.init_process_group first"
        )
    return Ranks(world)


def _check_options(rand_on_empty: bool, augmentation_multiplicity: int, assume_independent: str | None) -> None:
    if rand_on_empty:
        raise ValueError("rand_on_empty must be False: rows of no example are not accounted for")
    if augmentation_multiplicity < 1:
        raise ValueError(f"augmentation_multiplicity must be at least 1, got {augmentation_multiplicity}")
    if assume_independent is not None and not assume_independent.strip():
        raise ValueError("assume_independent must say why examples are independent: it is recorded with the run")
