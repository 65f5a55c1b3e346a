"""The spectrum of a model on public data: the largest eigenvalues computed, the others by a curve that lies above them."""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedcgd.curvature.hessian import Hessian
from fedcgd.curvature.lanczos import Density, density, largest_eigenpairs
from fedcgd.curvature.tail import PowerLaw, blocks, fit_power_law
from fedcgd.quadratic import Spectrum

SMALLEST = 1e-6  # eigenvalues below are as good as none in any run: they move nothing in 1e5 steps


@dataclass(frozen=True)
class Effort:
    """What a measurement has taken so far.

    Attributes:
        doing: what it does now, in words.
        products: products of the Hessian with a vector.
        seconds: since it began.
        memory: the most that the process has held, in bytes; 0 on Windows.
    """

    doing: str
    products: int
    seconds: float
    memory: int

    def __str__(self) -> str:
        return f"{self.doing}: {self.products} products, {self.seconds:.0f} s, {self.memory / 2**30:.1f} GiB"


Report = Callable[[Effort], None]


@dataclass(frozen=True)
class Measurement:
    """A spectrum, and what it was made of.

    Attributes:
        spectrum: the result.
        largest: the eigenvalues that were computed, falling.
        tail: the curve of the others; None where `largest` are all that are above the smallest one cared for.
        density: how many there are of every size; None without a tail.
        effort: what it took.
    """

    spectrum: Spectrum
    largest: tuple[float, ...]
    tail: PowerLaw | None
    density: Density | None
    effort: Effort


def measure_spectrum(
    hessian: Hessian,
    *,
    eigenvalues: int = 100,
    smallest: float = SMALLEST,
    probes: int = 4,
    steps: int = 60,
    seed: int = 0,
    measured_on: dict[str, Any] | None = None,
    report: Report | None = None,
) -> Measurement:
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
        report: is called with the effort so far, at most once a second.

    Raises:
        ValueError: for fewer than two eigenvalues.
    """
    if eigenvalues < 2:
        raise ValueError(f"at least 2 eigenvalues are needed, got {eigenvalues}")
    watched = _Watched(hessian, report)
    d = hessian.dimension
    origin = dict(measured_on or {}) | {
        "examples": hessian.examples,
        "parameters": d,
        "smallest": smallest,
        "seed": seed,
    }
    if eigenvalues >= d:
        watched.doing = "all columns"
        everything = np.linalg.eigvalsh(watched.matrix().double().numpy())[::-1]
        kept = tuple(float(value) for value in everything)
        spectrum = Spectrum.from_eigenvalues(
            everything, measured_on=origin | {"method": "all eigenvalues"} | watched.taken()
        )
        return Measurement(spectrum, kept, None, None, watched.effort())
    watched.doing = f"{eigenvalues} largest eigenvalues"
    computed, _ = largest_eigenpairs(watched.product, d, eigenvalues, dtype=hessian.dtype, seed=seed)
    top = computed[computed > smallest]
    origin |= {"method": "largest eigenvalues by Lanczos", "largest": top.tolist()}
    if len(top) < eigenvalues:
        spectrum = Spectrum.from_eigenvalues(
            [*top, 0.0], [*np.ones(len(top)), d - len(top)], measured_on=origin | watched.taken()
        )
        return Measurement(spectrum, tuple(top.tolist()), None, None, watched.effort())
    watched.doing = "how many of every size"
    spread = density(
        watched.product, d, probes=probes, steps=steps, dtype=hessian.dtype, device=hessian.device, seed=seed
    )
    counted, error = spread.count_above(smallest)
    count = min(d, max(len(top) + 1, round(counted)))
    curve = fit_power_law(top, count=count, smallest=smallest)
    positions, counts = blocks(len(top) + 1, count)
    # A block has the value of its first position, so that none is below the curve; nor is any above the last that is known.
    fitted = np.minimum(curve(positions), top[-1])
    values = np.minimum(np.maximum(fitted, spread.at(positions)), top[-1])
    total, total_error = spread.sum_positive()
    origin |= {
        "method": "largest eigenvalues by Lanczos; behind them a power law, raised where stochastic Lanczos quadrature is above",
        "tail": asdict(curve) | {"sum": float(fitted @ counts), "count_standard_error": error},
        "quadrature": {
            "probes": probes,
            "steps": steps,
            "sum": total - float(top.sum()),
            "sum_standard_error": total_error,
        },
    }
    flat = d - count
    spectrum = Spectrum.from_eigenvalues(
        [*top, *values, *([0.0] if flat else [])],
        [*np.ones(len(top)), *counts, *([flat] if flat else [])],
        measured_on=origin | watched.taken(),
    )
    return Measurement(spectrum, tuple(top.tolist()), curve, spread, watched.effort())


def _most_memory() -> int:
    try:
        import resource
    except ImportError:  # Windows, which does not tell without another package
        return 0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


class _Watched:
    """A Hessian that tells how far its measurement is, at most once a second."""

    def __init__(self, hessian: Hessian, report: Report | None) -> None:
        self.doing = ""
        self._hessian, self._report = hessian, report
        self._before, self._started, self._told = hessian.products, time.monotonic(), 0.0
        self._processor = time.process_time()

    def effort(self) -> Effort:
        seconds = time.monotonic() - self._started
        return Effort(self.doing, self._hessian.products - self._before, seconds, _most_memory())

    def taken(self) -> dict[str, Any]:
        effort = self.effort()
        return {
            "products": effort.products,
            "processor_seconds": round(time.process_time() - self._processor, 1),
            "memory_bytes": effort.memory,
        }

    def product(self, vector: Tensor) -> Tensor:
        result = self._hessian.product(vector)
        self._tell()
        return result

    def matrix(self) -> Tensor:
        return self._hessian.matrix(lambda _: self._tell())

    def _tell(self) -> None:
        effort = self.effort()
        if self._report is not None and effort.seconds - self._told >= 1:
            self._told = effort.seconds
            self._report(effort)
