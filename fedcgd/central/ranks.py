"""The processes that train one model together: who computes what, and how their sums become one.

Each process, a rank, has the model, the data set and the key, and computes the gradients of its own micro-batches of a round.
Sums are whole steps of the lattice, so that they add up to the same bits on any number of ranks. Rank 0 keeps the ledger, and
puts a round on record before anybody makes noise; then each rank makes the noise of its own slice of the coordinates.

Sums without noise pass between the ranks: they are one party, and what connects them is as private as one machine's memory. A
rank that dies is missed by the process group, whose timeout (`init_process_group(timeout=…)`) is how long the others wait.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from fedcgd.noise.stream import TILE

Value = TypeVar("Value")


class Ranks:
    """The processes of `group`, of which this is one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)

    def share(self, size: int) -> slice:
        """Which of `size` coordinates get their noise here, in whole tiles of the noise stream."""
        tiles = -(-size // TILE)
        first, last = (min(tiles * rank // self.count * TILE, size) for rank in (self.rank, self.rank + 1))
        return slice(first, last)

    @contextmanager
    def telling_failures(self) -> Iterator[None]:
        """An error in here is told to the others, which wait in `agree`."""
        try:
            yield
        except BaseException:
            with suppress(Exception):
                self._all_of(None)
            raise

    def agree(self, facts: dict[str, Any]) -> None:
        """Raise RuntimeError on all ranks if one has failed, or says something else."""
        said = self._all_of(facts)
        if failed := [rank for rank, one in enumerate(said) if one is None]:
            raise RuntimeError(
                f"rank {failed[0]} of {self.count} has failed, and its own error says why; nothing of this round is released"
            )
        for name, here in facts.items():
            if odd := [rank for rank, one in enumerate(said) if one[name] != said[0][name]]:
                raise RuntimeError(
                    f"ranks 0 and {odd[0]} disagree about {name}, and rank {self.rank} has {here}: all ranks run the same "
                    "program on the same data, with the same key"
                )

    def from_first(self, make: Callable[[], Value]) -> Value:
        """What `make` returns on rank 0; its error there is one on all ranks."""
        told: list[Any] = [None, None]
        failure: BaseException | None = None
        if self.rank == 0:
            try:
                told[1] = make()
            except BaseException as error:
                told[0], failure = f"{type(error).__name__}", error
        with self._together("hear from rank 0"):
            dist.broadcast_object_list(told, group=self._group, group_src=0)
        if failure is not None:
            raise failure
        if told[0] is not None:
            raise RuntimeError(
                f"rank 0 has failed ({told[0]}), and its own error says why; nothing of this round is released"
            )
        value: Value = told[1]
        return value

    def add_up(self, total: Tensor) -> None:
        """Make `total`, whole numbers, those of all ranks added up, on all ranks."""
        with self._together("add up the round's sum"):
            dist.all_reduce(total, group=self._group)

    def _all_of(self, mine: Any) -> list[Any]:
        """What each rank says, in their order."""
        said: list[Any] = [None] * self.count
        with self._together("agree about the next release"):
            dist.all_gather_object(said, mine, group=self._group)
        return said

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """A process that ends while the ranks do `what` is missed, and the error says so."""
        try:
            yield
        except RuntimeError as error:  # all that torch.distributed raises
            raise RuntimeError(
                f"rank {self.rank} of {self.count} waited for the others to {what}, and one has ended or did not come within the "
                "process group's timeout: see what the other ranks say, and begin again from the last checkpoint"
            ) from error
