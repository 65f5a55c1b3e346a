"""The batches of a run's rounds as a data loader gives them: drawn by the key, in parts, empty ones too, in several copies."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from fedcgd.opacus.independence import same_random_numbers
from fedcgd.opacus.rounds import PrivateRun, Rounds
from fedcgd.participation.batches import ExampleRounds
from fedcgd.participation.samplings import Rows


class RoundBatches(BatchSampler):
    """The batches of one epoch, from the first round that has not been released yet, each in the parts of this process.

    An epoch that was left early goes on where it stopped. A batch is issued only when the one before it has been released, and
    to the loop that began last (see `Rounds`). After the last round StepError is raised.

    A `torch.utils.data.BatchSampler` by its `batch_size`, the expected one, from which `BatchMemoryManager` finds how many
    physical batches there are.

    Args:
        run: whose plan and key draw the batches (`ExampleRounds`).
        rounds: issue them.
        fixed_split: the examples of each round of an epoch; by default they are drawn.
    """

    def __init__(self, run: PrivateRun, rounds: Rounds, fixed_split: list[Rows] | None = None) -> None:
        epoch = run.epoch
        self.batch_size = -(-epoch.examples // (epoch.steps * epoch.parts))
        self.drop_last = False
        self._rank, self._ranks = (0, 1) if run.ranks is None else (run.ranks.rank, run.ranks.count)
        self.rounds, self.parts = rounds, epoch.parts // self._ranks
        self._run, self._fixed_split = run, fixed_split
        self._drawn: tuple[str, ExampleRounds] | None = None
        self.ahead: deque[tuple[Rows, int]] | None = None
        """Set by a `RoundLoader` that issues batches itself: the rows of rounds that this sampler has prepared for it, and how
        many of them are in each part."""

    def __len__(self) -> int:
        return self._run.epoch.steps * self.parts

    def __iter__(self) -> Iterator[list[int]]:
        return self._epoch(self.rounds.enter(), self.rounds.next, self.ahead)

    def _epoch(self, loop: int, start: int, ahead: deque[tuple[Rows, int]] | None) -> Iterator[list[int]]:
        steps = self._run.epoch.steps
        for round in range(start, min((start // steps + 1) * steps, self._run.plan.participation.rounds)):
            if self.rounds.is_over(loop, round):
                return
            rows = self.rows(round)
            mine = np.array_split(rows, self.parts * self._ranks)[self._rank * self.parts :][: self.parts]
            for i, part in enumerate(mine):
                if ahead is None:
                    self.rounds.issue(loop, round, rows, len(part), (i, self.parts))
                else:
                    ahead.append((rows, len(part)))
                yield part.tolist()

    def rows(self, round: int) -> Rows:
        """The examples of one round, in increasing order but for a fixed split."""
        if self._fixed_split is not None:
            return self._fixed_split[round % len(self._fixed_split)]
        run = self.rounds.releases.run  # which may be another when a checkpoint is loaded
        if self._drawn is None or self._drawn[0] != run:
            epoch, secret = self._run.epoch, self._run.key.choices_of(run)
            self._drawn = run, ExampleRounds(self._run.plan.participation, epoch.examples, secret, epoch.steps)
        return self._drawn[1].rows(round)


class RoundLoader(DataLoader[Any]):
    """A data loader over `RoundBatches`, whose workers may prepare batches ahead: each is issued in its own round."""

    batch_sampler: RoundBatches
    collate_fn: "BatchCollation"

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = self.batch_sampler
        ahead: deque[tuple[Rows, int]] = deque()
        batches.ahead = ahead
        try:
            prepared = super().__iter__()
        finally:
            batches.ahead = None
        return self._in_turn(prepared, ahead, batches.rounds.loop, batches.rounds.next)

    def _in_turn(self, prepared: Iterator[Any], ahead: deque[tuple[Rows, int]], loop: int, first: int) -> Iterator[Any]:
        batches = self.batch_sampler
        for i, batch in enumerate(prepared):
            round, part = first + i // batches.parts, i % batches.parts
            if batches.rounds.is_over(loop, round):
                return
            batches.rounds.issue(loop, round, *ahead.popleft(), (part, batches.parts))
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


def cut_to_nothing(batch: Any, batch_first: bool) -> Any:
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


def private_loader(data_loader: DataLoader[Any], run: PrivateRun, rounds: Rounds) -> RoundLoader:
    """The data set of `data_loader` in the batches that the key draws, with its other settings.

    For debugging (no noise, nothing secret) they are those of a loader without shuffling, in its order.
    """
    collate, dataset, copies = data_loader.collate_fn, data_loader.dataset, run.gradients.copies
    if isinstance(dataset, CopiedExamples):
        dataset = dataset.dataset
    if copies > 1:
        dataset = CopiedExamples(dataset, copies)
    if isinstance(collate, BatchCollation):
        collate = collate.wrapped_collator_fn
    in_order = None
    if (
        run.plan.noiseless
        and run.plan.participation.expected_rate is None
        and type(data_loader.sampler) is SequentialSampler
    ):
        batches = [np.array(batch, dtype=np.intp) for batch in data_loader.batch_sampler]  # type: ignore[union-attr]
        several = len(batches) // run.epoch.steps
        in_order = [np.concatenate(batches[i : i + several]) for i in range(0, len(batches), several)]
    return RoundLoader(
        dataset,
        batch_sampler=RoundBatches(run, rounds, in_order),
        collate_fn=BatchCollation(collate, dataset, run.gradients.batch_first, copies),
        num_workers=data_loader.num_workers,
        pin_memory=data_loader.pin_memory,
        worker_init_fn=data_loader.worker_init_fn,
        multiprocessing_context=data_loader.multiprocessing_context,
        prefetch_factor=data_loader.prefetch_factor,
        persistent_workers=False,  # workers of the last epoch would run ahead with its rounds
    )
