"""Opacus' optimizers with the noise of a mechanism in place of independent noise."""

from dataclasses import dataclass
from typing import Any

import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor

from fedcgd.accounting import epsilon
from fedcgd.opacus.noise import NoiseSource
from fedcgd.plan import Plan


@dataclass
class Releases:
    """How many rounds of `plan` have been released; stands where Opacus keeps its accountant."""

    plan: Plan
    released: int = 0

    def get_epsilon(self, delta: float) -> float:
        """An upper bound on ε of the rounds so far; adjacency is add or remove one example."""
        if self.released == 0:
            return 0.0
        return epsilon(
            self.plan.mechanism,
            self.plan.participation,
            noise_multiplier=self.plan.noise_multiplier,
            delta=delta,
            released=self.released,
        ).epsilon

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold so that the noise goes on in the right round."""
        return {"plan": self.plan.to_description(), "released": self.released}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. Raises ValueError if it is another plan's."""
        if state["plan"] != self.plan.to_description():
            raise ValueError(f"the checkpoint is of another plan: {state['plan']}, not {self.plan.to_description()}")
        self.released = int(state["released"])


class _CorrelatedNoise:
    """The part that both optimizers share: row t of C⁻¹Z is added to the sum in step t."""

    params: list[Any]
    releases: Releases
    source: NoiseSource

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
        self.source.add(round, sums, plan.stddev)
        for p, noised in zip(self.params, sums, strict=True):
            p.grad = noised.to(p.dtype).view_as(p)
            _mark_as_processed(p.summed_grad)
        self.releases.released += 1


class CorrelatedOptimizer(_CorrelatedNoise, DPOptimizer):  # type: ignore[misc]
    """`opacus.optimizers.DPOptimizer` with correlated noise. An example whose gradient is not finite adds zero."""

    def clip_and_accumulate(self) -> None:
        samples = self.grad_samples
        rows = [g.reshape(len(g), p.numel()) for p, g in zip(self.params, samples, strict=True)]
        norms = torch.stack([row.norm(2, dim=1) for row in rows], dim=1).norm(2, dim=1)
        usable = torch.isfinite(norms)
        factors = torch.where(usable, (self.max_grad_norm / (norms + 1e-6)).clamp(max=1.0), 0.0)
        everything_usable = bool(usable.all())
        for p, sample in zip(self.params, samples, strict=True):
            _check_processed_flag(p.grad_sample)
            if not everything_usable:  # 0·NaN is NaN, so a factor of zero is not enough
                sample = sample[usable]
            kept = factors if everything_usable else factors[usable]
            total = torch.einsum("i,i...", kept.to(p.dtype), sample.to(p.dtype))
            p.summed_grad = total if p.summed_grad is None else p.summed_grad + total
            _mark_as_processed(p.grad_sample)


class CorrelatedGhostOptimizer(_CorrelatedNoise, DPOptimizerFastGradientClipping):  # type: ignore[misc]
    """`opacus.optimizers.DPOptimizerFastGradientClipping` with correlated noise.

    As in Opacus, one example with a gradient that is not finite spoils the sum of its batch.
    """
