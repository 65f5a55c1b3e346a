"""What a planner is asked: public numbers alone, so that no plan costs privacy."""

import math
from dataclasses import dataclass

from fedcgd.accounting.guarantee import check_delta, check_epsilon
from fedcgd.participation.samplings import SECRET_SAMPLINGS
from fedcgd.planning.landscape import Landscape, LinearModel
from fedcgd.quadratic import Spectrum


@dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    """A population, a budget, and the limits of the machines.

    Args:
        users: examples, or people where a person is what is protected; the planned number, which must be public.
        epsilon: ε of the whole run.
        delta: δ; well below 1/users.
        secret: the samplings that can be kept secret. Without any, everybody may know who takes part when.
        participations: how often one user may take part at most: epochs, or rounds of a person. This is the work that a
            user's data costs.
        max_cohort: the most users in one round, if machines or the network limit it.
        max_rounds: the most rounds, if time limits them.
        buffers: vectors of the model's size that there is room for to correlate noise; regenerated noise needs none, but time.
        spectrum: eigenvalues of the loss on *public* data like the private ones, in units of the clip norm; default: typical.
        model: a linear model's size, if it is one: the learning rate is then planned for it.
        hidden_layers: of a network: how many layers are trained besides the last. With two or more the rates are smaller; None is
            as one.

    Raises:
        ValueError: for numbers out of range, limits that leave no run, and more than one of spectrum, model and hidden layers.
    """

    users: int
    epsilon: float
    delta: float
    secret: tuple[str, ...] = ()
    participations: int = 20
    max_cohort: int | None = None
    max_rounds: int | None = None
    buffers: int = 32
    spectrum: Spectrum | None = None
    model: LinearModel | None = None
    hidden_layers: int | None = None

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        for name, least in (
            ("users", 2),
            ("participations", 1),
            ("max_cohort", 1),
            ("max_rounds", 1),
            ("buffers", 0),
            ("hidden_layers", 1),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")
        unknown = set(self.secret) - set(SECRET_SAMPLINGS)
        if unknown:
            raise ValueError(
                f"secret must be of {', '.join(SECRET_SAMPLINGS)}, got {', '.join(sorted(unknown))}; leave it empty if "
                "the adversary may learn who takes part when"
            )
        if self.delta >= 1 / self.users:
            raise ValueError(
                f"delta must be below 1/users = {1 / self.users:.3g}, got {self.delta}: otherwise a run may publish a user whole"
            )
        if [self.spectrum is not None, self.model is not None, self.hidden_layers is not None].count(True) > 1:
            raise ValueError(
                "a spectrum, a linear model's size (classes and features) and a network's hidden layers each say what the loss "
                "is: give one of them"
            )
        if self.max_rounds is not None and self.least_steps > self.max_rounds:
            raise ValueError(
                f"{self.users} users in cohorts of at most {self.max_cohort} need {self.least_steps} rounds for one "
                f"participation each, "
                f"and max_rounds is {self.max_rounds}; allow larger cohorts or more rounds"
            )

    @property
    def least_steps(self) -> int:
        """The fewest rounds in which everybody takes part once."""
        return 1 if self.max_cohort is None else math.ceil(self.users / self.max_cohort)

    @property
    def landscape(self) -> Landscape:
        """The loss that recipes are compared on."""
        if self.spectrum is not None:
            return Landscape.from_spectrum(self.spectrum)
        if self.model is not None:
            return Landscape.linear(self.model)
        return Landscape.typical(deep=(self.hidden_layers or 1) > 1)
