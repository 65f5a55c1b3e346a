"""How the loss of mechanisms changes with the rounds, the dimension, the effective dimension and ν, everything else equal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedcgd.mechanisms import Mechanism, NuDPFTRL
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.optimisation import catalogue
from fedcgd.participation import Participation
from fedcgd.quadratic import Quadratic, Spectrum
from fedcgd.quadratic.loss import final_loss

Step = Callable[[str], None]


@dataclass(frozen=True)
class Curve:
    """Losses at equal privacy, for σ_{ε,δ} = 1.

    Attributes:
        what: what changes.
        x: its values.
        losses: mechanism → the loss at each x; nan where the mechanism does not exist.
    """

    what: str
    x: tuple[float, ...]
    losses: dict[str, tuple[float, ...]]


def private_loss(mechanism: Mechanism, participation: Participation, quadratic: Quadratic) -> float:
    """`final_loss` times the squared sensitivity under (k, b): what noise of the same privacy adds, whatever the sampling.

    Args:
        mechanism: the matrix C.
        participation: (n, k, b).
        quadratic: what is descended on, and how.
    """
    found = sensitivity(mechanism, participation).value
    return found**2 * final_loss(mechanism, participation.rounds, quadratic)


def against_rounds(spellings: Sequence[str], participation: Participation, quadratic: Quadratic, step: Step) -> Curve:
    """Runs of an eighth to twice as many rounds; a user takes part as often, at distances that grow with the run.

    Args:
        spellings: the mechanisms, as on the command line.
        participation: (n, k, b) of the run that others are shorter or longer than.
        quadratic: what is descended on, and how.
        step: is called with a line of text for each point.
    """
    n, k = participation.rounds, participation.participations
    lengths = sorted({max(k, round(n * factor)) for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2)})
    runs = [
        (float(t), Participation(rounds=t, min_separation=max(1, t // k), max_participations=k), quadratic)
        for t in lengths
    ]
    return _curve("rounds", spellings, runs, step)


def against_dimension(
    spellings: Sequence[str], participation: Participation, quadratic: Quadratic, step: Step
) -> Curve:
    """The largest 1, …, d eigenvalues alone: directions that are nearly flat are added without changing ‖H‖.

    Args:
        spellings: the mechanisms, as on the command line.
        participation: (n, k, b).
        quadratic: with all d eigenvalues.
        step: is called with a line of text for each point.
    """
    spectrum = quadratic.spectrum
    sizes = np.unique(np.round(np.geomspace(1, spectrum.dimension, 8)))
    chosen = [(float(d), participation, replace(quadratic, spectrum=_largest(spectrum, float(d)))) for d in sizes]
    return _curve("dimension", spellings, chosen, step)


def against_effective_dimension(
    spellings: Sequence[str], participation: Participation, quadratic: Quadratic, step: Step
) -> Curve:
    """Eigenvalues ‖H‖·(μ/‖H‖)^s with s from 4 to 0, where all are equal: d and ‖H‖ stay, and d_eff grows up to d.

    Args:
        spellings: the mechanisms, as on the command line.
        participation: (n, k, b).
        quadratic: with the eigenvalues μ.
        step: is called with a line of text for each point.
    """
    spectrum, largest = quadratic.spectrum, quadratic.spectrum.largest
    points = []
    for power in (4.0, 2.0, 1.0, 0.5, 0.25, 0.0):
        values, counts = spectrum.arrays()
        bent = Spectrum.from_eigenvalues(largest * (values / largest) ** power, counts)
        points.append((bent.effective_dimension, participation, replace(quadratic, spectrum=bent)))
    return _curve("effective dimension", spellings, points, step)


def against_nu(participation: Participation, quadratic: Quadratic) -> Curve:
    """ν-DP-FTRL for ν from 10⁻⁴ to 1, against what independent noise loses.

    Args:
        participation: (n, k, b).
        quadratic: what is descended on, and how.
    """
    nus = tuple(np.geomspace(1e-4, 0.999, 25).tolist())
    losses = {"nu-dp-ftrl": tuple(private_loss(NuDPFTRL(nu), participation, quadratic) for nu in nus)}
    losses["dp-sgd"] = (private_loss(catalogue.mechanism("dp-sgd", participation), participation, quadratic),) * len(
        nus
    )
    return Curve("ν", nus, losses)


def _largest(spectrum: Spectrum, dimension: float) -> Spectrum:
    counts = np.array(spectrum.counts)
    kept = np.minimum(counts, np.maximum(dimension - (np.cumsum(counts) - counts), 0.0))
    return Spectrum.from_eigenvalues(np.array(spectrum.eigenvalues)[kept > 0], kept[kept > 0])


def _curve(
    what: str, spellings: Sequence[str], points: Sequence[tuple[float, Participation, Quadratic]], step: Step
) -> Curve:
    losses: dict[str, list[float]] = {spelling: [] for spelling in spellings}
    for x, participation, quadratic in points:
        step(f"{what} = {x:.4g}")
        for spelling in spellings:
            try:
                made = catalogue.mechanism(spelling, participation, curvature=quadratic)
                losses[spelling].append(private_loss(made, participation, quadratic))
            except ValueError:  # more bands than rounds between participations, for example
                losses[spelling].append(float("nan"))
    return Curve(what, tuple(x for x, _, _ in points), {name: tuple(found) for name, found in losses.items()})
