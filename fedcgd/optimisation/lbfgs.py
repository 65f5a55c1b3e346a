"""L-BFGS in float64: deterministic, stopped when it no longer gains."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedcgd.optimisation import Progress

_ROUND = 20  # iterations between two reports


def minimise(
    objective: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    iterations: int = 2000,
    tolerance: float = 1e-9,
    history: int = 20,
    progress: Progress | None = None,
) -> tuple[Tensor, float]:
    """(argument, value) of a local minimum of `objective` near `start`, whichever of all seen arguments was best.

    `history` is how many steps the second derivatives are estimated from. Ends when 20 iterations gain less than
    `tolerance`, relatively, or after `iterations`.
    """
    x = start.detach().clone().double().requires_grad_()
    best, best_value = x.detach().clone(), objective(x.detach()).item()
    if not len(x):
        return best, best_value
    optimizer = torch.optim.LBFGS(
        [x], max_iter=_ROUND, history_size=history, line_search_fn="strong_wolfe", tolerance_change=0.0
    )

    def closure() -> Tensor:
        nonlocal best, best_value
        optimizer.zero_grad()
        value = objective(x)
        value.backward()  # type: ignore[no-untyped-call]
        if value.item() < best_value:
            best, best_value = x.detach().clone(), value.item()
        return value

    for done in range(_ROUND, iterations + _ROUND, _ROUND):
        before = best_value
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        if progress is not None:
            progress(done, best_value)
        if not before - best_value > tolerance * abs(best_value):
            break
    return best, best_value
