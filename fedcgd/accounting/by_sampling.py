"""Which accountant a run has: the one for its sampling."""

from fedcgd.accounting.accountant import Accountant
from fedcgd.accounting.b_min_sep.accountant import BMinSepAccountant
from fedcgd.accounting.balls_in_bins.accountant import BallsInBinsAccountant
from fedcgd.accounting.gaussian import GaussianAccountant
from fedcgd.accounting.poisson import PoissonAccountant
from fedcgd.accounting.random_allocation import RandomAllocationAccountant
from fedcgd.mechanisms import Mechanism
from fedcgd.participation import Participation
from fedcgd.participation.samplings import Law


def accountant(mechanism: Mechanism, participation: Participation) -> Accountant:
    """The accountant for runs of `mechanism` in which users take part as `participation` says. It costs nothing to make.

    Args:
        mechanism: the matrix C, such as `LambdaCGD(0.9)`.
        participation: who takes part when, over how many rounds.

    Returns:
        What answers for σ, ε and δ of such runs.

    Raises:
        TypeError: for what is no mechanism (its λ alone, its class or its name) or no participation (a number of rounds).

    >>> from fedcgd.mechanisms import LambdaCGD
    >>> run = accountant(LambdaCGD(0.9), Participation(rounds=210, min_separation=21))
    >>> f"{run.noise_multiplier(epsilon=8, delta=1e-5).noise_multiplier:.3f}"
    '4.803'
    """
    if isinstance(mechanism, type) or not hasattr(mechanism, "inverse_row"):
        raise TypeError(f"mechanism must be a value such as LambdaCGD(0.9) or DPSGD(), got {mechanism!r}")
    if not isinstance(participation, Participation):
        raise TypeError(
            f"participation must be a Participation, such as Participation(rounds=100), got {participation!r}"
        )
    return _ACCOUNTANTS[participation.scheme.law](mechanism, participation)


_ACCOUNTANTS: dict[Law, type[Accountant]] = {
    Law.KNOWN: GaussianAccountant,
    Law.COINS: PoissonAccountant,
    Law.ONE_BIN: BallsInBinsAccountant,
    Law.RESTING_COINS: BMinSepAccountant,
    Law.ONE_OF_EACH_EPOCH: RandomAllocationAccountant,
}
