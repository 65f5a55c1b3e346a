"""How near the truth bounds are, and what that may cost: every number of the accounting that is chosen and not derived.

None decides whether a bound holds; a different number makes another bound, perhaps looser, or slower to find. Numbers that
follow from mathematics or from floating point stand where they are used, with their derivation.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What is asked around a search."""

    kept_after: float = 1.0
    """Seconds: what takes less is found again, not read from the disk."""
    near_budget: float = 1.01
    """Times a budget of two digits: an ε up to there may be the budget that σ was calibrated for, and that is tried. Searches
    differ by less; beyond, a second one would be in vain."""
    largest_budget: float = 100.0
    """That anybody calibrates for: beyond, no budget is tried."""
    profile_points: int = 16
    """Pairs (ε, δ) of a sampled run's profile, each in a second or a few: interpolation errs by their distance
    squared."""
    beyond_profile: float = 20.0
    """One part of so many of δ is where a profile ends: what is left is noise compared with the error of its points."""
    norm_iterations: int = 4
    """Of the norm of C; the first brings most."""


@dataclass(frozen=True, kw_only=True)
class LossGrid:
    """Privacy losses on a grid (`sampled`, `losses`)."""

    fine: float = 2e-4
    """The step, as a part of ε: costs about half of that in ε."""
    steps: tuple[float, float] = (1e-5, 1e-3)
    """The least step, and the largest for an ε of tens."""
    coarse: float = 2e-5
    """The step for a huge ε, as a part of it."""
    per_spread: float = 8
    """Steps in a standard deviation of one release's loss, which must be told from none."""
    negligible: float = 1e-6
    """Of δ, for losses that count as infinite."""
    unknown: float = 1e-20
    """The same, absolutely, while δ is not known."""
    accuracy: float = 1e-5
    """Relative, of a calibrated σ."""
    rough: tuple[float, float] = (10, 1e-3)
    """Times the step, and the accuracy, of a first search, which takes a tenth of the time."""


@dataclass(frozen=True, kw_only=True)
class RatioGrid:
    """Means of log-normal variables on a grid (`log_normal_means`): twice as fine changes ε by less than 0.02 %."""

    fine: float = 0.01
    """A step, as a part of the distance from the mean, or of the standard deviation."""
    widest: float = 0.02
    """A step of the logarithm."""
    outside: float = 1e-13
    """Of tilted losses, that may lie above the window of a transform: its rounding is about as large."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Sizes: of what the processor keeps near, and of what memory holds. Larger is slower or does not fit, smaller is slower."""

    block: int = 2**18
    """Numbers in one block of draws: 2 MiB, of which a few go through the second cache at a time."""
    steps: int = 16
    """Steps of a geometric sum that one product with a matrix makes."""
    table: int = 2**25
    """Entries of a table of pairs: 0.25 GiB."""
    matrix: int = 2**24
    """Entries of C, and points of a transform, at a time: 0.13 and 0.5 GiB."""
    sums: int = 2**18
    """Sums of two variables at a time."""
    cells: float = 2e6
    """Of a grid of losses, about."""
    rows: int = 256
    """Columns of a dense C at a time."""
    sparse: int = 32
    """Bands of a matrix that is kept sparse: beyond, Fourier transforms are faster."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How many draws (`random_participation`)."""

    pilot: tuple[int, int] = (1000, 2**12)
    """Of one step of the search: for removing a user, and for adding one."""
    order: tuple[int, float] = (400, 0.01)
    """Tuples that choose the order of the moment; and the part of them that must be accepted."""
    removing: tuple[int, int] = (2**12, 2**20)
    """Fewest and most of a confirmation."""
    adding: tuple[int, ...] = (2**12, 2**13, 2**14, 2**15, 2**16, 2**17, 2**18)
    """Of a confirmation: the first that make sure that adding does not rule."""
    numbers: tuple[float, float] = (6.5e7, 6e7)
    """Numbers drawn for one direction of a confirmation at most, about: some seconds."""
    overhead: int = 100
    """Numbers that a draw takes as much time as, besides one for each round."""
    precision: tuple[float, float, float] = (0.07, 0.03, 3e7)
    """The part of δ that more draws should not be spent on; the same while draws take a second or two;
    and how many numbers those are."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """How few draws propose a number, and what is done where fresh ones do not confirm it."""

    steps: tuple[int, int] = (12, 10)
    """Of a search at most; and, with the confirmation, about."""
    near: tuple[float, float] = (0.1, 1.0)
    """Distances in log δ: close enough; and so far that an eighth of the draws shows the way."""
    move: tuple[float, float, float] = (2.0, 0.5, 0.01)
    """In log σ or log ε: down at most, up at most, and a bracket in which δ jumps, so that the search ends."""
    slope: tuple[float, float, float] = (2.0, 40.0, 0.08)
    """−log δ over log σ or log ε: least and most; and the distance below which two points with few draws show none."""
    finer: tuple[int, float] = (16, 0.05)
    """Times as many draws, once, where the search ended, but no more than leave δ such a scatter."""
    care: tuple[float, float] = (1.3, 0.01)
    """Times the slope, on the last step down, which stays so far of log δ below its goal: what fails takes longer than
    all before."""
    negligible: float = 0.9
    """Of what removing a user costs: where adding one will be shown to cost less, more draws are of no use."""
    tries: tuple[int, float] = (8, 1.004)
    """Confirmations at most, that share the failure probability; and times σ, at least, after one that failed."""


@dataclass(frozen=True, kw_only=True)
class Chains:
    """Followed users under b-min-separation: a grid for the likelihood ratio, states for pairs."""

    gap: tuple[float, float] = (2e-3, 1.0)
    """The distance of the two bounds on log S that is aimed at; and one beyond which draws would show no amplification."""
    points: tuple[int, ...] = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    """Of a grid: as few as are enough."""
    depths: tuple[float, ...] = (1.5, 3.0, 5.0)
    """−log of the least point that is not 0, over the largest: the best is taken."""
    trials: int = 8
    """Draws that a grid is chosen by."""
    points_per_draw: int = 12
    """Points through which a draw goes in the time that the rest of it takes."""
    faded: float = 0.02
    """The part of a round that is too little to follow: rejection undoes what that is too much."""
    rounds: int = 2**17
    """Beyond, a few thousand draws take minutes: the answer is that of the bounds without draws."""
    level: float = 0.45
    """From one level of what is left of earlier rounds to the next."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The search for a number of a mechanism, such as λ (`search`, `selection`)."""

    grid: tuple[int, float] = (24, 1e-7)
    """Numbers that closed forms are tried at first, and the tolerance of the search that follows, in log(1/(1 − number))."""
    sampled: tuple[int, float] = (6, 0.1)
    """The same where each needs a calibration: the error hardly changes over such a distance."""
    start: float = 1e-3
    """The tolerance of the closed form's best number, beside which the sampled search begins."""
    calibrations: int = 12
    """About, that a sampled search takes."""
    sweeps: tuple[int, float] = (30, 1e-4)
    """Over several numbers that depend on each other, at most; and the gain below which one is the last."""


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """All of it."""

    answers: Answers = Answers()
    losses: LossGrid = LossGrid()
    ratios: RatioGrid = RatioGrid()
    memory: Memory = Memory()
    drawing: Drawing = Drawing()
    search: Search = Search()
    chains: Chains = Chains()
    choice: Choice = Choice()


TOLERANCES = Tolerances()
