"""Which examples are in which step: a batch sampler over the rounds that the plan's participation draws."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset

from fedcgd.opacus.independence import same_random_numbers
from fedcgd.opacus.release_tracker import ReleaseTracker
from fedcgd.participation import Participation
from fedcgd.participation.batches import ExampleRounds
from fedcgd.participation.samplings import Rows


class RoundBatches(BatchSampler):
    """The batches of one epoch of `steps` rounds, from the first round that has not been released yet, each in `parts` parts.

    An epoch that was left early goes on where it stopped. A batch is issued only when the one before it has been released, and
    to the loop that began last (see `ReleaseTracker`). After the last round RuntimeError is raised.

    They are those of `ExampleRounds`: pure functions of the secret that `key(run)` returns. The run may change when a checkpoint
    is loaded.

    A `torch.utils.data.BatchSampler` by its `batch_size`, the expected one, from which `BatchMemoryManager` finds how many
    physical batches there are.
    """

    def __init__(
        self,
        participation: Participation,
        examples: int,
        steps: int,
        key: Callable[[str], bytes],
        tracker: ReleaseTracker,
        parts: int = 1,
        fixed_split: list[Rows] | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """The batches of a run.

        Args:
            participation: that of the plan.
            examples: how many there are.
            steps: rounds of an epoch.
            key: by a run's name the secret that decides its batches.
            tracker: issues them.
            parts: how many batches the loaders give for a round, all together.
            fixed_split: with the sampling "none", the examples of each round of an epoch; by default drawn by the key.
            rank: which of the processes this is: each has `parts` / `ranks` parts of each round.
            ranks: how many processes there are, all with the same secret.
        """
        self.batch_size = -(-examples // (steps * parts))
        self.drop_last = False
        self._fixed_split = fixed_split
        self._participation = participation
        self._examples = examples
        self._steps = steps
        self.tracker = tracker
        self._key = key
        self.parts = parts // ranks
        self._ranks, self._rank = ranks, rank
        self._rounds: ExampleRounds | None = None
        self.ahead: deque[tuple[int, int]] | None = None
        """Set by a `RoundLoader` that issues batches itself: the sizes of batches that this sampler prepared for it, and of the
        rounds' whole batches."""

    def __len__(self) -> int:
        return self._steps * self.parts

    def __iter__(self) -> Iterator[list[int]]:
        return self._epoch(self.tracker.enter(), self.tracker.released, self.ahead)

    def _epoch(self, loop: int, start: int, ahead: deque[tuple[int, int]] | None) -> Iterator[list[int]]:
        end = min((start // self._steps + 1) * self._steps, self._participation.rounds)
        for round in range(start, end):
            batch = self.batch(round)
            mine = np.array_split(batch, self.parts * self._ranks)[self._rank * self.parts :][: self.parts]
            for i, part in enumerate(mine):
                if ahead is None:
                    self.tracker.issue_batch(loop, round, len(part), part=i, parts=self.parts, whole=len(batch))
                else:
                    ahead.append((len(part), len(batch)))
                yield part.tolist()

    def batch(self, round: int) -> Rows:
        """The examples of one round, in increasing order."""
        if self._fixed_split is not None:
            return self._fixed_split[round % len(self._fixed_split)]
        key = self._key(self.tracker.run)
        if self._rounds is None or self._rounds.key != key:
            self._rounds = ExampleRounds(self._participation, self._examples, key, self._steps)
        return self._rounds.rows(round)


class RoundLoader(DataLoader[Any]):
    """A data loader over `RoundBatches`, whose workers may prepare batches ahead: each is issued in its own round."""

    batch_sampler: RoundBatches
    collate_fn: "BatchCollation"

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = self.batch_sampler
        ahead: deque[tuple[int, int]] = deque()
        batches.ahead = ahead
        try:
            prepared = super().__iter__()
        finally:
            batches.ahead = None
        return self._in_turn(prepared, ahead, batches.tracker.loop, batches.tracker.released)

    def _in_turn(self, prepared: Iterator[Any], ahead: deque[tuple[int, int]], loop: int, first: int) -> Iterator[Any]:
        batches = self.batch_sampler
        for i, batch in enumerate(prepared):
            round, part = first + i // batches.parts, i % batches.parts
            examples, whole = ahead.popleft()
            batches.tracker.issue_batch(loop, round, examples, part=part, parts=batches.parts, whole=whole)
            self.collate_fn.note(batch)
            yield batch


class BatchCollation:
    """A `collate_fn` for batches that may be empty, and whose examples may come in several copies.

    An empty batch is the first example of the data set, collated and cut to nothing, whatever that is made of. `latest` is the
    batch that was made last, in this process, until somebody has looked at it.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], dataset: Any, batch_first: bool, copies: int) -> None:
        self.wrapped_collator_fn = collate_fn
        self.latest: Any = None
        self._dataset, self._batch_first, self._copies = dataset, batch_first, copies
        self._wanted = True

    def __call__(self, examples: list[Any]) -> Any:
        if examples:
            rows = examples if self._copies == 1 else [row for copies in examples for row in copies]
            made = self.wrapped_collator_fn(rows)
        else:
            with same_random_numbers(()):
                one = [self._dataset[0]] if self._copies == 1 else self._dataset[0][:1]
                made = self.wrapped_collator_fn(one)
            whole = isinstance(made, list) and len(made) == 1 and made[0] is one[0]  # a list of examples
            made = [] if whole else cut_to_nothing(made, self._batch_first)
        self.note(made)
        return made

    def note(self, batch: Any) -> None:
        """Keep `batch`, which may have been made in another process, if nobody has looked at one."""
        if self._wanted:
            self.latest = batch

    def take_latest(self) -> Any:
        """The batch that was made last; no other one is kept."""
        self._wanted, batch, self.latest = False, self.latest, None
        return batch


def cut_to_nothing(batch: Any, batch_first: bool = True) -> Any:
    """`batch`, of one example, without it: tensors of no rows, lists and tuples of none of its values, by the same names.

    What is of another kind stays: its row would be one that no round has, and the step refuses it.
    """
    match batch:
        case Tensor():
            dim = 0 if batch_first or batch.dim() < 2 else 1
            return batch.narrow(dim, 0, 0) if batch.dim() else batch
        case np.ndarray():
            return batch[:0] if batch.ndim else batch
        case Mapping():
            parts = {name: cut_to_nothing(part, batch_first) for name, part in batch.items()}
            try:
                return type(batch)(parts)  # type: ignore[call-arg]
            except TypeError:
                return parts
        case list() | tuple():
            if not any(isinstance(part, Tensor | Mapping | list | tuple) for part in batch):
                return type(batch)() if type(batch) in (list, tuple) else batch
            made = [cut_to_nothing(part, batch_first) for part in batch]
            return type(batch)(*made) if hasattr(batch, "_fields") else type(batch)(made)
    return batch


class CopiedExamples(Dataset[list[Any]]):
    """Each example of `dataset` in `copies` copies that follow one another, whose gradients are averaged.

    An example that is a list of so many tuples or mappings has its copies itself. Any other is read so often, so that what the
    data set does to it at random makes other copies of it.
    """

    def __init__(self, dataset: Any, copies: int) -> None:
        self.dataset, self.copies = dataset, copies

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> list[Any]:
        example = self.dataset[index]
        if isinstance(example, list) and all(isinstance(part, tuple | Mapping) for part in example):
            if len(example) != self.copies:
                raise ValueError(
                    f"augmentation_multiplicity is {self.copies}, and an example is a list of {len(example)} copies: "
                    "make it a list of as many, or one example, which is read so often"
                )
            return example
        return [example, *(self.dataset[index] for _ in range(self.copies - 1))]


def loader_over(data_loader: DataLoader[Any], batches: RoundBatches, batch_first: bool, copies: int) -> RoundLoader:
    """The data set of `data_loader` in `batches`, with its other settings; each example in so many copies."""
    collate, dataset = data_loader.collate_fn, data_loader.dataset
    if isinstance(dataset, CopiedExamples):
        dataset = dataset.dataset
    if copies > 1:
        dataset = CopiedExamples(dataset, copies)
    if isinstance(collate, BatchCollation):
        collate = collate.wrapped_collator_fn
    return RoundLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=BatchCollation(collate, dataset, batch_first, copies),
        num_workers=data_loader.num_workers,
        pin_memory=data_loader.pin_memory,
        worker_init_fn=data_loader.worker_init_fn,
        multiprocessing_context=data_loader.multiprocessing_context,
        prefetch_factor=data_loader.prefetch_factor,
        persistent_workers=False,  # workers of the last epoch would run ahead with its rounds
    )


def split_in_order(data_loader: DataLoader[Any], accumulation_steps: int) -> list[Rows]:
    """The examples of each round of an epoch as a loader without shuffling has them: in its order, in its batches."""
    batches = [np.array(batch, dtype=np.intp) for batch in data_loader.batch_sampler]  # type: ignore[union-attr]
    return [
        np.concatenate(batches[start : start + accumulation_steps])
        for start in range(0, len(batches), accumulation_steps)
    ]
