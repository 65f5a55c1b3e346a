"""The spectrum of a model on public data: the largest eigenvalues computed, the others by a curve that lies above them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from fedcgd.curvature.hessian import Hessian
from fedcgd.curvature.lanczos import Vector, density, largest_eigenvalues
from fedcgd.curvature.tail import blocks, fit_power_law
from fedcgd.quadratic import Spectrum

SMALLEST = 1e-6  # eigenvalues below are as good as none in any run: they move nothing in 1e5 steps


def measure_spectrum(
    hessian: Hessian,
    *,
    eigenvalues: int = 100,
    smallest: float = SMALLEST,
    probes: int = 4,
    steps: int = 60,
    seed: int = 0,
    measured_on: dict[str, Any] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Spectrum:
    """The spectrum of `hessian`, what is negative being 0, and what is not computed estimated from above.

    The largest eigenvalues by Lanczos. How many are above the smallest one cared for, by stochastic Lanczos quadrature. Between
    them the larger of a power law through the computed ones (`fit_power_law`), which alone can lie far below the truth, and of
    what the quadrature says; then 0.

    Args:
        hessian: on public data.
        eigenvalues: how many are computed, at least 2. With the dimension or more, all are; if fewer are above `smallest`, those
            are all that count.
        smallest: what is below counts as 0.
        probes: random vectors of the quadrature.
        steps: products with each of them.
        seed: of the random vectors.
        measured_on: what the file says this was of, JSON-able; what was done is added.
        report: is called with a line of text before each part of the work.

    Raises:
        ValueError: for fewer than two eigenvalues.
    """
    if eigenvalues < 2:
        raise ValueError(f"at least 2 eigenvalues are needed, got {eigenvalues}")
    began, before, d = time.process_time(), hessian.products, hessian.dimension

    def spectrum(values: Sequence[float] | Vector, counts: Sequence[float] | None, **method: Any) -> Spectrum:
        origin = {"examples": hessian.examples, "parameters": d, "smallest": smallest, "seed": seed}
        took = {"products": hessian.products - before, "processor_seconds": round(time.process_time() - began, 1)}
        return Spectrum.from_eigenvalues(values, counts, measured_on=dict(measured_on or {}) | origin | method | took)

    if eigenvalues >= d:
        report(f"all {d} columns")
        return spectrum(np.linalg.eigvalsh(hessian.matrix().double().numpy()), None, method="all eigenvalues")
    report(f"{eigenvalues} largest eigenvalues")
    computed = largest_eigenvalues(hessian.product, d, eigenvalues, dtype=hessian.dtype, seed=seed)
    top = computed[computed > smallest]
    largest, ones = top.tolist(), [1.0] * len(top)
    if len(top) < eigenvalues:
        method = "largest eigenvalues by Lanczos"
        return spectrum([*top, 0.0], [*ones, d - len(top)], method=method, largest=largest)
    report(f"how many of every size, by {probes * steps} products")
    spread = density(
        hessian.product, d, probes=probes, steps=steps, dtype=hessian.dtype, device=hessian.device, seed=seed
    )
    counted, error = spread.count_above(smallest)
    count = min(d, max(len(top) + 1, round(counted)))
    curve = fit_power_law(top, count=count, smallest=smallest)
    positions, counts = blocks(len(top) + 1, count)
    # A block has the value of its first position, so that none is below the curve; nor is any above the last that is known.
    fitted = np.minimum(curve(positions), top[-1])
    values = np.minimum(np.maximum(fitted, spread.at(positions)), top[-1])
    total, total_error = spread.sum_positive()
    flat = [d - count] if d > count else []
    return spectrum(
        [*top, *values, *([0.0] * len(flat))],
        [*ones, *counts, *flat],
        method="largest eigenvalues by Lanczos; behind them a power law, raised where stochastic Lanczos quadrature is above",
        largest=largest,
        tail=asdict(curve) | {"sum": float(fitted @ counts), "count_standard_error": error},
        quadrature={
            "probes": probes,
            "steps": steps,
            "sum": total - float(top.sum()),
            "sum_standard_error": total_error,
        },
    )
