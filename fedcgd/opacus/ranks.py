"""The processes that train one model together: what they have to agree about, and how their sums become one.

Each process, a rank, has the whole model, opens the same key, and clips the examples of its part of a round's batch. A round is
released in four steps, none of which a rank begins alone:

1. `agree`: every rank says what it is about to release, and all go on only if all say the same.
2. `from_first`: the nonce, bound to what every rank has summed, is put on record by rank 0, and then told to the others.
3. Each rank adds the noise of its own slice of the coordinates to its own sum.
4. `add_up`: the sums, whole steps of the lattice, become one. They are exact in float64, so that order and grouping say nothing.

A rank that fails before the first step says so there, and no rank goes on; one that dies is missed by the process group, whose
timeout (`init_process_group(timeout=…)`) is how long the others wait for it. Sums without noise pass between the ranks in step 4:
they are one party, and what connects them is as private as one machine's memory.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fedcgd.noise.keys import NONCE_BYTES
from fedcgd.noise.stream import TILE

_MOST_FACTS, _FACT_BYTES = 8, 16
_COUNTS = struct.Struct("<BQ")
_FAILED, _READY = 0, 1


class Ranks:
    """The processes of the default process group, of which this is one; tensors go through `device`."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._device = device

    def share(self, size: int) -> slice:
        """Which of `size` coordinates get their noise here; whole tiles of the noise stream, where there are enough."""
        whole = -(-size // TILE)
        first, last = (min(whole * r // self.count * TILE, size) for r in (self.rank, self.rank + 1))
        return slice(first, last)

    @contextmanager
    def telling_failures(self) -> Iterator[None]:
        """An error in here, before this rank's `agree`, is told to the others, which wait for it there."""
        try:
            yield
        except Exception:
            with suppress(Exception):
                self._exchange(_COUNTS.pack(_FAILED, 0) + bytes(_MOST_FACTS * _FACT_BYTES + NONCE_BYTES))
            raise

    def agree(self, facts: Mapping[str, Any], *, nonce: int = 0, examples: int = 0) -> tuple[list[int], int]:
        """The nonces that the ranks say, in order, and the sum of `examples`.

        Args:
            facts: what has to be the same on all ranks, by what an error calls it.
            nonce: this rank's.
            examples: how many this rank has clipped.

        Raises:
            RuntimeError: on all ranks, if a rank has failed or says something else; on whoever is left, if a rank has ended.
        """
        said = [hashlib.sha256(repr(fact).encode()).digest()[:_FACT_BYTES] for fact in facts.values()]
        said += [bytes(_FACT_BYTES)] * (_MOST_FACTS - len(said))
        message = _COUNTS.pack(_READY, examples) + b"".join(said) + nonce.to_bytes(NONCE_BYTES, "big")
        answers = self._exchange(message)
        counts = [_COUNTS.unpack_from(answer) for answer in answers]
        if failed := [rank for rank, (state, _) in enumerate(counts) if state == _FAILED]:
            raise RuntimeError(
                f"rank {failed[0]} of {self.count} has failed, and its own error says why; nothing of this round is released, on "
                "any rank"
            )
        for at, name in enumerate(facts):
            first = _COUNTS.size + at * _FACT_BYTES
            _check_same(name, [answer[first : first + _FACT_BYTES] for answer in answers])
        nonces = [int.from_bytes(answer[-NONCE_BYTES:], "big") for answer in answers]
        return nonces, sum(examples for _, examples in counts)

    def from_first(self, make: Callable[[], int]) -> int:
        """What `make` returns on rank 0, 128 bits; the others wait until it has. Its error there is one on all."""
        state, made, error = _READY, 0, None
        if self.rank == 0:
            try:
                made = make()
            except Exception as raised:
                state, error = _FAILED, raised
        message = self._tensor(bytes([state]) + made.to_bytes(NONCE_BYTES, "big"))
        with self.together("hear from rank 0"):
            dist.broadcast(message, 0)
        told = bytes(message.cpu().tolist())
        if error is not None:
            raise error
        if told[0] == _FAILED:
            raise RuntimeError(
                "rank 0 could not put the round on record, and its own error says why; nothing is released, on any rank"
            )
        return int.from_bytes(told[1:], "big")

    def any_of(self, here: bool, what: str) -> bool:
        """Whether any rank says `here`; all say it together, to do `what`."""
        said = torch.tensor([here], dtype=torch.uint8, device=self._device)
        with self.together(what):
            dist.all_reduce(said, dist.ReduceOp.MAX)
        return bool(said)

    def add_up(self, steps: Tensor) -> None:
        """Make `steps`, whole numbers as float64, those of all ranks added up, on all ranks."""
        with self.together("add up the round's sum (it is on record, and is tried again under another nonce)"):
            dist.all_reduce(steps)

    def _exchange(self, message: bytes) -> list[bytes]:
        """What all ranks say, in order; messages have one length."""
        mine = self._tensor(message)
        answers = [torch.empty_like(mine) for _ in range(self.count)]
        with self.together("agree about the next release"):
            dist.all_gather(answers, mine)
        return [bytes(answer.cpu().tolist()) for answer in answers]

    def _tensor(self, message: bytes) -> Tensor:
        return torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Whoever ends while the ranks do `what` is missed, and the error says so."""
        try:
            yield
        except RuntimeError as error:  # all that torch.distributed raises
            raise RuntimeError(
                f"rank {self.rank} of {self.count} waited for the others to {what}, and one has ended or did not come within the "
                "process group's timeout: see what the other ranks say, and begin again from the last checkpoint"
            ) from error


def ranks_of(module: nn.Module) -> Ranks | None:
    """The processes that train `module`, made for several; None for a model of one process.

    Raises:
        RuntimeError: if there is no process group.
    """
    if not isinstance(module, DifferentiallyPrivateDistributedDataParallel | FSDPModule):
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "the model is for several processes, and there is no process group: start the program with torchrun, and call "
            "torch.distributed.init_process_group first"
        )
    return Ranks(next(module.parameters()).device)


def _check_same(name: str, said: Sequence[bytes]) -> None:
    odd = [rank for rank, one in enumerate(said) if one != said[0]]
    if odd:
        raise RuntimeError(
            f"the ranks disagree about {name}: rank 0 has another than rank{'s' if odd[1:] else ''} "
            f"{', '.join(map(str, odd))}. Each rank runs the same program on the same data, in the same order, with the same key"
        )
