"""Opacus' optimizers with the noise of a mechanism in place of independent noise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed

from fedcgd.accounting import compute_epsilon
from fedcgd.clipping import ROUNDING
from fedcgd.gradients import sum_in_steps
from fedcgd.noise.quantisation import Grid
from fedcgd.noise.source import NoiseSource
from fedcgd.plan import Plan


@dataclass
class Releases:
    """The rounds of `plan` that have been released; stands where Opacus keeps its accountant."""

    plan: Plan
    run: str
    """Names the run among all with its key: no two share noise or batches. Empty with a simulation key."""
    nonces: list[int] = field(default_factory=list)
    """Of each released round: which of its noises was used."""

    @property
    def released(self) -> int:
        """How many rounds have been released."""
        return len(self.nonces)

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
        return {"plan": self.plan.to_description(), "run": self.run, "nonces": list(self.nonces)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. Raises ValueError if it is another plan's."""
        if state["plan"] != self.plan.to_description():
            raise ValueError(f"the checkpoint is of another plan: {state['plan']}, not {self.plan.to_description()}")
        if bool(state["run"]) != bool(self.run):
            raise ValueError(
                "one of checkpoint and engine has a simulation key, the other a secret one; use the checkpoint's"
            )
        self.run, self.nonces = str(state["run"]), list(state["nonces"])


class _CorrelatedNoise:
    """The part that both optimizers share: row t of C⁻¹Z is added to the sum in step t."""

    params: list[Any]
    releases: Releases
    source_of: Callable[[str], NoiseSource]
    nonce_of: Callable[[str, NDArray[Any], Sequence[int]], int]
    """(run, sum, nonces of the rounds before) → the nonce for the noise of that sum."""
    grid: Grid | None
    """What the sum and its noise are rounded to; None on a GPU, where both are float32."""

    def add_noise(self) -> None:
        releases = self.releases
        rounds = releases.plan.participation.rounds
        if releases.released >= rounds:
            raise RuntimeError(
                f"all {rounds} rounds of the plan have been released; make a plan with more epochs to train on"
            )
        for p in self.params:
            _check_processed_flag(p.summed_grad)
        sums = torch.cat([p.summed_grad.detach().reshape(-1) for p in self.params])
        if self.grid is None:
            noised = sums.to(torch.float32)
            nonces = self._nonces(noised.cpu().numpy())
            self.source_of(releases.run).add(noised, nonces, releases.plan.stddev)
        else:
            # A ghost optimizer's sum is float, and rounded as a whole.
            total = sums.numpy() if sums.dtype == torch.int64 else self.grid.to_steps(sums.to(torch.float32).numpy())
            nonces = self._nonces(total)
            self.source_of(releases.run).add(total, nonces, releases.plan.stddev)
            noised = torch.from_numpy(self.grid.from_steps(total).astype(np.float32))
        for p, part in zip(self.params, torch.split(noised, [p.numel() for p in self.params]), strict=True):
            p.grad = part.to(p.dtype).view_as(p)
            _mark_as_processed(p.summed_grad)
        releases.nonces = nonces

    def _nonces(self, total: NDArray[Any]) -> list[int]:
        """The nonces of the rounds with that of the next, whose sum is `total`."""
        releases = self.releases
        return [*releases.nonces, self.nonce_of(releases.run, total, releases.nonces)]


class CorrelatedOptimizer(_CorrelatedNoise, DPOptimizer):  # type: ignore[misc]
    """`opacus.optimizers.DPOptimizer` with correlated noise. An example whose gradient is not finite adds zero.

    Norms are taken in float64, and gradients scaled in float32 at least, so that no rounding lifts one above its bound. On the
    CPU each example's gradient is rounded to the grid, and the sum is exact.
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
            if self.grid is None:
                total = torch.einsum("i,i...", kept.to(dtype), sample.to(dtype))
            else:
                clipped = sample.to(dtype).reshape(len(sample), p.numel()) * kept.to(dtype)[:, None]
                total = sum_in_steps(clipped, self.grid).view_as(p)
            p.summed_grad = total if p.summed_grad is None else p.summed_grad + total
            _mark_as_processed(p.grad_sample)


class CorrelatedGhostOptimizer(_CorrelatedNoise, DPOptimizerFastGradientClipping):  # type: ignore[misc]
    """`opacus.optimizers.DPOptimizerFastGradientClipping` with correlated noise.

    One example with a gradient that is not finite spoils its whole batch. The sum is made in floating point, by the backward
    pass, and rounded to the grid as a whole.
    """
