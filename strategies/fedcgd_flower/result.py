"""How a run ended: Flower's Result, with what was planned and what was released."""

from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result


@dataclass(frozen=True, kw_only=True)
class ReleaseEvent:
    """What `on_release` is given after a release: nothing that is not released.

    Metrics have the names that Flower's `Result` has.

    Attributes:
        release: its number, from 1.
        planned: the rounds of the plan.
        arrays: the whole model, as in the result.
        train_metrics: the ε spent, as `train_metrics_clientapp` of the result has it.
        evaluate_metrics_serverapp: what `evaluate_fn` measured; None if there is none, or it returned None.
        evaluate_metrics_clientapp: what users measured: with noise if it is a `PrivateEvaluation`, without if metrics of clients
            are forwarded; None if this release was not evaluated.
    """

    release: int
    planned: int
    arrays: ArrayRecord
    train_metrics: MetricRecord
    evaluate_metrics_serverapp: MetricRecord | None
    evaluate_metrics_clientapp: MetricRecord | None


OnRelease = Callable[[ReleaseEvent], object]


@dataclass(repr=False)
class RunResult(Result):
    """Flower's `Result` of all releases of a run, also of those before it was resumed.

    Attributes:
        arrays (ArrayRecord): the model that was released last, or the initial one.
        train_metrics_clientapp (dict[int, MetricRecord]): release → the ε spent.
        evaluate_metrics_serverapp (dict[int, MetricRecord]): release → what `evaluate_fn` measured.
        evaluate_metrics_clientapp (dict[int, MetricRecord]): release → what users measured.
        planned: the rounds of the plan.
        released: the rounds that are released by now.
        stopped: why the run ended before its plan; empty if it did not.
        advice: what can be done about that, as far as it is known.
    """

    planned: int = 0
    released: int = 0
    stopped: str = ""
    advice: str = ""

    @property
    def complete(self) -> bool:
        """Whether every planned round is released."""
        return self.released == self.planned

    def __repr__(self) -> str:
        stopped = f" ({self.stopped})" if self.stopped else ""
        return f"Released: {self.released} of {self.planned} rounds{stopped}\n\n{super().__repr__()}"


class IncompleteRunError(RuntimeError):
    """A run ended before its plan without being asked to. With its ledger and its key it can go on.

    Attributes:
        result (RunResult): what was released.
    """

    def __init__(self, result: RunResult, *, recorded: bool = True) -> None:
        remedy = (
            f"{'Then start' if result.advice else 'Start'} again with the same ledger and key to go on"
            if recorded
            else "Its record is in memory and ends with this process; with a ledger file and a key file a run can go on"
        )
        nodes = "" if result.released else ". The reason for a node's failure is in that node's log alone"
        super().__init__(
            f"{result.released} of {result.planned} planned rounds are released: {result.stopped}{nodes}. "
            f"{f'What helps: {result.advice}. ' if result.advice else ''}{remedy}"
        )
        self.result = result
