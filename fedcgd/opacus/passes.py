"""The per-sample gradients of a backward pass, as Opacus' hooks leave them in the parameters."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fedcgd.opacus.gradient_forms import DenseGradients, PerSampleGradients


def passes_of(parameter: Any) -> list[PerSampleGradients]:
    """The gradients of the examples for `parameter`, one entry for each backward pass."""
    found = getattr(parameter, "grad_sample", None)
    passes = found if isinstance(found, list) else [] if found is None else [found]
    return [DenseGradients(one) if isinstance(one, Tensor) else one for one in passes]


def check_passes(
    module: nn.Module, parameters: Sequence[nn.Parameter], rows: Sequence[PerSampleGradients], copies: int
) -> list[PerSampleGradients]:
    """`rows` of one backward pass, an entry for each of `parameters`, with the mean of each `copies` rows in their place.

    Raises:
        RuntimeError: if there are other numbers of rows for some parameters than for others, or no multiple of `copies`.
    """
    examples = max(row.examples for row in rows)
    odd = {p for p, row in zip(parameters, rows, strict=True) if row.examples != examples}
    if odd:
        names = [name for name, p in module.named_parameters() if p in odd]
        raise RuntimeError(
            f"the parameters have gradients of different numbers of examples, {names[0]!r} and {len(names) - 1} others "
            f"of fewer than {examples}: the batch must be the first dimension (or batch_first=False) of the input of "
            "every layer. Position ids that a model makes itself have one row for all; give it position_ids with a row "
            "for each example, or freeze that layer"
        )
    if copies == 1:
        return list(rows)
    if examples % copies:
        raise RuntimeError(
            f"the model was given {examples} rows, no multiple of augmentation_multiplicity={copies}: give it all copies of an "
            "example one after the other, as inputs of shape (examples, copies, …) have them after inputs.flatten(0, 1)"
        )
    return [row.averaged(copies) for row in rows]
