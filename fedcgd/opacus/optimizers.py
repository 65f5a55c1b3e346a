"""Opacus' optimizers with the noise of a mechanism in place of independent noise."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor

from fedcgd.accounting import compute_epsilon
from fedcgd.clipping import ROUNDING
from fedcgd.opacus.noise import NoiseSource
from fedcgd.plan import Plan


@dataclass
class Releases:
    """The rounds of `plan` that have been released; stands where Opacus keeps its accountant."""

    plan: Plan
    run: str
    """Names the run among all with its key: no two share noise or batches. Empty with a simulation key."""
    attempts: list[int] = field(default_factory=list)
    """Of each released round: which of its noises was used."""

    @property
    def released(self) -> int:
        """How many rounds have been released."""
        return len(self.attempts)

    def next_attempt(self) -> int:
        """A noise that the next round never had: a checkpoint may be loaded twice, and goes on with other data each time."""
        return secrets.randbits(32) if self.run else 0

    def get_epsilon(self, delta: float) -> float:
        """An upper bound on ε of the rounds so far; adjacency is add or remove one example.

        Their number must not depend on what they released. Under Balls-in-Bins this takes seconds, each time.
        """
        if self.released == 0:
            return 0.0
        return compute_epsilon(
            self.plan.mechanism,
            self.plan.participation,
            noise_multiplier=self.plan.noise_multiplier,
            delta=delta,
            released=self.released,
        ).epsilon

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold so that the noise goes on in the right round."""
        return {"plan": self.plan.to_description(), "run": self.run, "attempts": list(self.attempts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. Raises ValueError if it is another plan's."""
        if state["plan"] != self.plan.to_description():
            raise ValueError(f"the checkpoint is of another plan: {state['plan']}, not {self.plan.to_description()}")
        if bool(state["run"]) != bool(self.run):
            raise ValueError(
                "one of checkpoint and engine has a simulation key, the other a secret one; use the checkpoint's"
            )
        self.run, self.attempts = str(state["run"]), list(state["attempts"])


class _CorrelatedNoise:
    """The part that both optimizers share: row t of C⁻¹Z is added to the sum in step t."""

    params: list[Any]
    releases: Releases
    source_of: Callable[[str], NoiseSource]

    def add_noise(self) -> None:
        plan, round = self.releases.plan, self.releases.released
        rounds = plan.participation.rounds
        if round >= rounds:
            raise RuntimeError(
                f"all {rounds} rounds of the plan have been released; make a plan with more epochs to train on"
            )
        sums: list[Tensor] = []
        for p in self.params:
            _check_processed_flag(p.summed_grad)
            sums.append(p.summed_grad.detach().to(torch.float32, copy=True).contiguous())
        attempts = [*self.releases.attempts, self.releases.next_attempt()]
        self.source_of(self.releases.run).add(attempts, sums, plan.stddev)
        for p, noised in zip(self.params, sums, strict=True):
            p.grad = noised.to(p.dtype).view_as(p)
            _mark_as_processed(p.summed_grad)
        self.releases.attempts = attempts


class CorrelatedOptimizer(_CorrelatedNoise, DPOptimizer):  # type: ignore[misc]
    """`opacus.optimizers.DPOptimizer` with correlated noise. An example whose gradient is not finite adds zero.

    Norms are taken in float64, and gradients scaled in float32 at least, so that no rounding lifts one above its bound.
    """

    def clip_and_accumulate(self) -> None:
        samples = self.grad_samples
        rows = [g.reshape(len(g), p.numel()) for p, g in zip(self.params, samples, strict=True)]
        parts = [torch.linalg.vector_norm(row, dim=1, dtype=torch.float64) for row in rows]
        norms = torch.linalg.vector_norm(torch.stack(parts, dim=1), dim=1)
        usable = torch.isfinite(norms)
        factors = torch.where(usable, (self.max_grad_norm * (1 - ROUNDING) / norms).clamp(max=1.0), 0.0)
        everything_usable = bool(usable.all())
        for p, sample in zip(self.params, samples, strict=True):
            _check_processed_flag(p.grad_sample)
            if not everything_usable:  # 0·NaN is NaN, so a factor of zero is not enough
                sample = sample[usable]
            kept = factors if everything_usable else factors[usable]
            dtype = torch.promote_types(p.dtype, torch.float32)
            total = torch.einsum("i,i...", kept.to(dtype), sample.to(dtype))
            p.summed_grad = total if p.summed_grad is None else p.summed_grad + total
            _mark_as_processed(p.grad_sample)


class CorrelatedGhostOptimizer(_CorrelatedNoise, DPOptimizerFastGradientClipping):  # type: ignore[misc]
    """`opacus.optimizers.DPOptimizerFastGradientClipping` with correlated noise.

    As in Opacus, one example with a gradient that is not finite spoils the sum of its batch.
    """
