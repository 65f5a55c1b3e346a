"""The pure step of central training: (model, the round's examples, plan, key) → the noised mean gradient of the round."""

import hashlib
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedcgd.accounting.guarantee import NO_NOISE, Guarantee, large_delta
from fedcgd.central.batches import Examples, Transform, parts_of, seeded
from fedcgd.central.gradients import ExampleGradients, Loss, as_spread
from fedcgd.central.ranks import Ranks
from fedcgd.central.releases import Releases
from fedcgd.clipping.per_sample_gradients import add_clipped_rows, rows_at_once
from fedcgd.noise.keys import NoiseKey
from fedcgd.participation.batches import ExampleRounds
from fedcgd.plan import Plan
from fedcgd.release.callbacks import CentralRelease


class PrivateGradient:
    """Each call makes the `grad` of what is trained (Σ_i clip(∇ loss of example i) + ζσ·(C⁻¹Z)_t) / batch size of round t.

    A round is a call, and a user is an example. Any torch optimizer steps with the gradients. What a call releases is a function
    of the trained parameters, the round's examples, the plan and the key:

    - The examples of a round are drawn by the key, as the plan's participation says (`fedcgd.central.batches`).
    - The gradient of each example is computed alone, with copies of the model's buffers (`fedcgd.central.gradients`), and clipped
      to L2 norm `plan.clip_norm` over exactly the parameters that are trained. One that is not finite adds zero.
    - Sums are divided by the batch size that the plan expects, never by that of the round.
    - Random numbers that the model draws (dropout) follow from the key.

    Guarantee: what all calls of a run fill in has `plan.guarantee()`; adjacency: zero out one example. It rests on two things
    that the caller alone can see to: `data[i]` depends on example i alone, and model and loss keep nothing from call to call but
    parameters and buffers.

    With a `record`, a round is on the ledger before its gradient is filled in, and a run that was killed goes on (`state_dict`).

    Args:
        model: its parameters with `requires_grad` are trained; nothing else in it changes.
        loss: (outputs, targets) of a batch of one example → its loss; several numbers are added up.
        data: `data[i]` is a tuple (*inputs, target) of tensors and numbers, of which the model gets a batch of one.
        plan: what runs and what is accounted for.
        key: decides noise, batches and randomness: anyone who holds it can remove the noise.
        record: the path of the run's ledger (`fedcgd ledger verify`). Without one the run ends with the process.
        transform: (*inputs, target) → such a tuple, changed at random: the augmentation.
        augmentation_multiplicity: K: how often the transform is called for each example. The gradients of the K copies are
            averaged before they are clipped (De et al., "Unlocking High-Accuracy Differentially Private Image Classification
            through Scale", 2022, arXiv:2204.13650).
        micro_batch: of how many examples gradients exist at once; by default as many as fit in 32 MiB, or up to eight in 128 MiB;
            on a GPU as many as fit in a sixteenth of its memory.
        group: the processes that train one model together, as `torch.distributed.group.WORLD`; each computes micro-batches of its
            own. With a `micro_batch` of the same size, any number of them has the same bits.
        on_release: called at the end of each call, with its `CentralRelease`; the optimizer moves the model after that.

    Raises:
        TypeError: for what is no key, no plan or no tuple.
        ValueError: for BatchNorm in training; if nothing is trained; for a `micro_batch` below 1; and as `Ledger.open` does.

    >>> from torch.utils.data import TensorDataset
    >>> from fedcgd import LambdaCGD, Participation
    >>> model, data = nn.Linear(4, 2), TensorDataset(torch.ones(80, 4), torch.zeros(80, dtype=torch.long))
    >>> participation = Participation(rounds=20, min_separation=10)
    >>> plan = Plan.calibrated(LambdaCGD(0.5), participation, clip_norm=1.0, epsilon=8, delta=1e-5)
    >>> step = PrivateGradient(model, nn.functional.cross_entropy, data, plan, key=NoiseKey.generate())
    >>> step()
    >>> model.weight.grad.shape, step.round
    (torch.Size([2, 4]), 1)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Any,
        plan: Plan,
        *,
        key: NoiseKey,
        record: Path | str | None = None,
        transform: Transform | None = None,
        augmentation_multiplicity: int = 1,
        micro_batch: int | None = None,
        group: dist.ProcessGroup | None = None,
        on_release: Callable[[CentralRelease], object] | None = None,
    ) -> None:
        if not isinstance(key, NoiseKey):  # not shown: it may be a key
            raise TypeError(f"key must be a NoiseKey, for example NoiseKey.generate(); got {type(key).__name__}")
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be a fedcgd.Plan, got {type(plan).__name__}; Plan.calibrated makes one")
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch must be at least 1, or None for the default; got {micro_batch}")
        self.plan, self._on_release = plan, on_release
        self._round = 0
        self._model, trained = model, _trained(model)
        self._shapes = [(name, p.shape) for name, p in trained.items()]
        self._sizes = [p.numel() for p in trained.values()]
        if not trained:
            raise ValueError("no parameter of the model is trained: set requires_grad of those that are")
        device, size = next(iter(trained.values())).device, sum(self._sizes)
        self._gradients = ExampleGradients(model, loss, spread=group is not None)
        self._examples = Examples(data, transform, augmentation_multiplicity)
        parts = parts_of(plan.participation, len(data))
        settings = {"kind": "central", "examples": len(data), "parameters": size}
        self._ranks = ranks = None if group is None else Ranks(group)
        self._rank, self._count = (0, 1) if ranks is None else (ranks.rank, ranks.count)
        if ranks is not None:
            ranks.agree(
                {"plan and data": (repr(plan), settings), "the key": key.fingerprint, "parameters": self._shapes}
            )
        if plan.noiseless:
            warnings.warn(f"{NO_NOISE}; gradients are clipped as in the real run", stacklevel=2)
        if large := large_delta(plan.delta, len(data), "examples", exposed=1.0):
            warnings.warn(large, stacklevel=2)
        self._releases = Releases(plan, key, size, record=record, configuration=settings, device=device, ranks=ranks)
        self._secret = key.choices_of(self._releases.run)
        self._batches = ExampleRounds(plan.participation, len(data), self._secret, parts)
        if micro_batch is None:
            micro_batch = rows_at_once(size, device)
            if ranks is not None:
                micro_batch = max(1, min(micro_batch, math.ceil(self._batches.planned_size / ranks.count)))
        self._micro_batch = micro_batch
        self._scale = self._releases.step / self._batches.planned_size

    def __call__(self) -> None:
        """Release the next round into the `grad` of the trained parameters.

        Raises:
            RuntimeError: after the last round, and if other parameters are trained than at first.
            ValueError: for BatchNorm in training, and as the ledger does; nothing is released then.
            Exception: what model or loss raise.
        """
        trained = _trained(self._model)
        released = self._release(trained)
        if released is None:
            self._round = self._releases.count
            released = self._release(trained)
        assert released is not None  # noqa: S101
        mean = released.to(torch.float64) * self._scale
        for p, part in zip(trained.values(), torch.split(mean, self._sizes), strict=True):
            p.grad = as_spread(part.view(p.shape).to(p.dtype), p)
        self._round += 1
        if self._on_release is not None:
            self._on_release(CentralRelease(release=self._round, plan=self.plan))

    def _release(self, trained: dict[str, nn.Parameter]) -> Tensor | None:
        """The noised sum of the next round; None if that is on record with another sum."""
        if self._round >= self.plan.participation.rounds:
            raise RuntimeError(
                f"all {self.plan.participation.rounds} rounds of the plan are released, and no more are accounted for: plan for "
                "more rounds, in another run"
            )
        if [(name, p.shape) for name, p in trained.items()] != self._shapes:
            raise RuntimeError(
                "the parameters that are trained are not those of the first step (frozen, unfrozen or replaced since), and the "
                "plan's clip norm is for these: make another PrivateGradient, with a plan of its own, for another phase"
            )
        rows = self._batches.rows(self._round)
        seed = hashlib.sha256(self._secret + f"fedcgd randomness {self._round}".encode()).digest()
        device = next(iter(trained.values())).device  # the model may have been moved since the round before
        total = self._releases.zeros(device)
        with nullcontext() if self._ranks is None else self._ranks.telling_failures():
            values = self._gradients.begin(trained)
            for start in range(self._rank * self._micro_batch, len(rows), self._count * self._micro_batch):
                examples = self._examples.stack(rows[start : start + self._micro_batch], seed, device)
                with seeded(seed, f"model {start}", device):
                    parts = self._gradients(values, examples)
                    add_clipped_rows(total, parts, None, self.plan.clip_norm, self._releases.grid)
        if self._ranks is not None:
            self._ranks.agree({"the size of micro-batches": self._micro_batch})
        return self._releases.release(total, self._round, rows)

    @property
    def round(self) -> int:
        """The round of the next call, from 0; `plan.participation.rounds` after the last."""
        return self._round

    def guarantee(self) -> Guarantee:
        """An upper bound on ε of the rounds released so far, at the plan's δ; adjacency: zero out one example.

        That of a part of a run holds under its `condition` only; where that may be false, `plan.guarantee()` holds.
        """
        return self.plan.guarantee(released=self._releases.count)

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, to be saved with the model and the optimizer of the same moment.

        Raises:
            RuntimeError: for a run without a record: nothing could say what was released after this moment.
        """
        if not self._releases.recorded:
            raise RuntimeError(
                "a run without record= cannot go on in another process: nothing would say which rounds were released after the "
                "checkpoint. Give PrivateGradient the path of a ledger"
            )
        return {"run": self._releases.run, "round": self._round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`, with the model and the optimizer that were saved with it.

        Rounds that were released after it are computed again, and are the same releases if they have the same sums.

        Args:
            state: what `state_dict` returned.

        Raises:
            ValueError: for another dictionary, the state of another run, or one that is ahead of the record.
        """
        if set(state) != {"run", "round"}:
            raise ValueError(
                "this is not what state_dict of a PrivateGradient returned: the model's and the optimizer's are apart"
            )
        if state["run"] != self._releases.run:
            raise ValueError("the checkpoint is of another run than the record: give the record= of its run")
        if not 0 <= state["round"] <= self._releases.count:
            raise ValueError(
                f"the checkpoint is of round {state['round']}, and the record has {self._releases.count} rounds: it is an older "
                "copy. Put the latest one back"
            )
        self._round = int(state["round"])


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
