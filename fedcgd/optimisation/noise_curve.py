"""NoiseCurve: banded C with unit columns whose noise adds least to the loss on a quadratic.

Problem P1 of Gu et al., "Correlating Cross-Iteration Noise for DP-SGD using Model Curvature", 2026, arXiv:2510.05416.
"""

import numpy as np

from fedcgd.mechanisms import Dense
from fedcgd.mechanisms.mechanism import Vector
from fedcgd.optimisation.banded import check_bandwidth, square_and_gradient, unit_columns
from fedcgd.optimisation.lbfgs import minimise
from fedcgd.participation import Participation
from fedcgd.quadratic import Quadratic
from fedcgd.quadratic.factor import thin_factor

BARRIER = 1.0
"""Weight of −log det(CᵀC)/n next to the loss, over that of the start.

Without it the problem can have no solution: the loss may fall for ever while C becomes singular, and the noise of a round, which
the quadratic forgets, and a network does not, grows without bound. 0.01 gives the least loss but for 1 %, and rounds with 5 times
the noise of independent noise; 1 gives rounds with 1.4 times it, and networks that were trained with 0.01, 0.1, 0.3, 1 and 3 did
best on validation examples with 1 (benchmarks/reports/results_curvature.md).
"""


def noise_curve(
    bandwidth: int,
    participation: Participation,
    *,
    quadratic: Quadratic,
    barrier: float = BARRIER,
) -> Dense:
    """The p-banded C with unit columns of least `final_loss` and `barrier` for participations at least p apart, by L-BFGS.

    With p ≤ b the columns of different participations do not overlap, so that the sensitivity is √k, whatever C is. The free
    numbers are the columns before they are divided by their norms, at first BSR's; O(n·p·r) a step, with r some dozens
    (`thin_factor`). The optimum is that of the convex problem P1.

    Args:
        bandwidth: p, at most b.
        participation: (n, k, b); its sampling does not count.
        quadratic: what is descended on, and how.
        barrier: the weight of −log det(CᵀC)/n next to the loss.

    Raises:
        ValueError: for a larger bandwidth.
    """
    check_bandwidth("noise-curve", bandwidth, participation)
    n = participation.rounds
    band, start = unit_columns("noise-curve", n, bandwidth)
    form = thin_factor(quadratic, n)

    unit = square_and_gradient(band(start)[0], form)[0]

    def objective(x: Vector) -> tuple[float, Vector]:
        entries, back = band(x)
        error, gradient = square_and_gradient(entries, form)
        # log det CᵀC is twice the sum of the logs of the diagonal.
        gradient /= unit
        gradient[:, 0] -= barrier * 2 / (n * entries[:, 0])
        return error / unit - barrier * 2 * float(np.log(entries[:, 0]).mean()), back(gradient)

    x, _ = minimise(objective, start, tolerance=1e-6, history=60)
    return Dense("noise-curve", band(x)[0])
