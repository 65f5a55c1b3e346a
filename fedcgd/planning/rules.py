"""What the planner takes for granted: every number of it that was chosen, or found by trying, with where it is from.

None touches ε: a different number makes another ranking. What was tried is in docs/guides/planning.md.
"""

from dataclasses import dataclass

from fedcgd.mechanisms.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Recipes that are compared."""

    ways: tuple[tuple[Schedule, float], ...] = (("constant", 0.0), ("linear", 0.0), ("constant", 0.9), ("linear", 0.9))
    """Schedules and momenta."""
    steps: tuple[int, ...] = (1, 2, 3, 5, 7, 10, 14, 20, 30)
    """Rounds of an epoch; more, √2 times as many each, while they are better by `level`, or must be."""
    fewer_participations: tuple[int, ...] = (1, 2, 3, 5, 7, 10, 14, 20, 30, 50)
    """Of the whole batch, where each costs little to try: so that more participations never end with more loss."""
    sampled_steps: tuple[int, ...] = (2, 3, 5, 10, 20)
    """Those of `steps` that DP-SGD is tried at with a secret sampling, where each needs a calibration."""
    shares: tuple[float, ...] = (0.5, 1.0)
    """Parts of the λ/(1 − λ) of the rule for the schedule."""
    sampled_lambdas: tuple[float, ...] = (0.5, 0.8)
    """Of DP-λCGD under a sampling, where each needs draws."""
    sampled_bands: tuple[int, ...] = (4, 8)
    """Of BSR under a sampling, likewise."""
    most_bands: int = 32
    """Of banded Toeplitz noise: more take minutes to optimise."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """What counts as better, and where a search ends."""

    level: float = 0.02
    """Recipes whose losses differ by no more than this part are as good: theory is not better than that."""
    worse: float = 1.05
    """After two cohort sizes in a row with so many times the best loss no smaller cohorts are tried."""
    nearly: float = 1.2
    """Times the least loss: what theory may be wrong about, so that a rehearsal decides."""
    setups: int = 2
    """Set-ups that a dear mechanism is tried at."""
    most_rounds: int = 4000
    """Unless a problem says otherwise: of what theory answers in seconds."""
    network_steps: int = 20
    """Rounds of an epoch that were best on 35 networks, where theory holds others for as good."""


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Ratios of signal to noise, by trials with six sets of 10 to 1000 users, linear models and networks."""

    hopeless: float = 10.0
    """Below, nothing useful was learned."""
    warning: float = 30.0
    """Below, the noise wins."""
    kept: tuple[tuple[float, int, int], ...] = (
        (10, 0, 20), (30, 0, 40), (60, 0, 50), (120, 15, 80), (250, 40, 100), (1000, 60, 100),
    )  # fmt: skip
    """Below so much, between so many percent of what a model gains over guessing without noise were kept."""


@dataclass(frozen=True, kw_only=True)
class Landscapes:
    """Power laws (factor, decay): factor·i^−decay in direction i of the loss, for updates clipped to norm 1."""

    directions: int = 600
    """Of the typical landscape."""
    curvature: tuple[float, float] = (0.6, 2.25)
    """Of the typical landscape. This and `energy` were found by trying them on 35 networks and 17 linear models."""
    energy: tuple[float, float] = (0.33, 1.8)
    """The loss that is to be won in the typical landscape."""
    deep: float = 2.0
    """A network with two hidden layers or more is as much more sensitive to its weights: so much smaller are its best rates."""
    input_decay: float = 0.8
    """Of a linear model: the share of the inputs' square norm that a direction has. Found with `linear_energy` by trying on
    eleven sets; what they are matters little."""
    linear_energy: tuple[float, float] = (0.75, 0.95)
    """Of a linear model: the part of log(classes) that can be won."""
    spectrum_energy: tuple[float, float] = (0.26, 0.92)
    """The loss that is to be won in the directions of a measured spectrum."""
    counted: tuple[int, int] = (8, 16)
    """Directions that are counted one by one, and groups of the others."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Learning rates that are tried."""

    first: tuple[int, int] = (4, 28)
    """Steps of √2 in progress, the first and the last."""
    further: tuple[int, int] = (8, 120)
    """Steps that are added while the best rate is the first or last that was tried; and no more than these."""
    unstable: float = 1e6
    """Where a model that diverges is stopped: far above all losses, and its square is finite."""
    rehearsed: tuple[float, ...] = (1 / 3, 3**-0.5, 1.0, 3**0.5, 3.0)
    """Parts of the planned rate in a rehearsal."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """All of it."""

    tried: Tried = Tried()
    ranking: Ranking = Ranking()
    signal: Signal = Signal()
    landscapes: Landscapes = Landscapes()
    rates: Rates = Rates()


RULES = Rules()
