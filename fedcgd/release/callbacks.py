"""What a run tells after each release, `on_release`, and functions that show it: in TensorBoard, Weights & Biases and MLflow."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fedcgd.plan import Plan


class Released(Protocol):
    """What every `on_release` is given: numbers that are released, and nothing else."""

    @property
    def release(self) -> int:
        """Its number, from 1."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Name → value."""


@dataclass(frozen=True, kw_only=True)
class CentralRelease:
    """A release of central training: of `PrivateGradient` or `CorrelatedPrivacyEngine`.

    Attributes:
        release: its number, from 1.
        plan: of the run.
    """

    release: int
    plan: Plan

    @property
    def metrics(self) -> dict[str, float]:
        """ε of the releases so far, an upper bound that is quick to find, and δ; adjacency: zero out one example."""
        spent = self.plan.quick_guarantee(released=self.release)
        return {"epsilon": spent.epsilon, "delta": spent.delta}


def to_tensorboard(writer: Any) -> Callable[[Released], None]:
    """An `on_release` that adds each metric as a scalar.

    Args:
        writer: `torch.utils.tensorboard.SummaryWriter(…)`.

    >>> class Writer:
    ...     def add_scalar(self, name, value, step):
    ...         print(name, value, step)
    >>> from fedcgd import DPSGD, Participation
    >>> plan = Plan(
    ...     mechanism=DPSGD(), participation=Participation(rounds=1), clip_norm=1.0, noise_multiplier=0, delta=1e-5
    ... )
    >>> to_tensorboard(Writer())(CentralRelease(release=1, plan=plan))
    epsilon inf 1
    delta 1e-05 1
    """

    def show(event: Released) -> None:
        for name, value in event.metrics.items():
            writer.add_scalar(name, value, event.release)

    return show


def to_wandb(run: Any) -> Callable[[Released], None]:
    """An `on_release` that logs the metrics under the release's number.

    Args:
        run: `wandb.init(…)`.
    """
    return lambda event: run.log(dict(event.metrics), step=event.release)


def to_mlflow(mlflow: Any) -> Callable[[Released], None]:
    """An `on_release` that logs the metrics to the active run.

    Args:
        mlflow: the module, or another object with its `log_metrics`.
    """
    return lambda event: mlflow.log_metrics(dict(event.metrics), step=event.release)
