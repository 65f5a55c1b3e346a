"""How a run ended: Flower's Result, with what was planned and what was released."""

from dataclasses import dataclass

from flwr.serverapp.strategy import Result


@dataclass(repr=False)
class RunResult(Result):
    """Flower's `Result` of all releases of a run, also of those before it was resumed."""

    planned: int = 0
    """Rounds of the plan."""
    released: int = 0
    """Rounds released by now."""
    stopped: str = ""
    """Why the run ended before its plan; empty if it did not."""

    @property
    def complete(self) -> bool:
        """Whether every planned round is released."""
        return self.released == self.planned

    def __repr__(self) -> str:
        stopped = f" ({self.stopped})" if self.stopped else ""
        return f"Released: {self.released} of {self.planned} rounds{stopped}\n\n{super().__repr__()}"


class IncompleteRunError(RuntimeError):
    """A run ended before its plan without being asked to. `result` holds what was released; the ledger lets the run go on."""

    def __init__(self, result: RunResult, *, recorded: bool = True) -> None:
        remedy = (
            "Start again with the same ledger and key to go on"
            if recorded
            else "Its record is in memory and ends with this process; with a ledger file and a key file a run can go on"
        )
        nodes = "" if result.released else ". What fails on a node is told in that node's log alone"
        super().__init__(
            f"{result.released} of {result.planned} planned rounds are released: {result.stopped}{nodes}. {remedy}"
        )
        self.result = result
