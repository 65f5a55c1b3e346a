"""One participation of each sampling, as the command line asks for it: what tests of all samplings take."""

from fedcgd.participation import Participation

ROUNDS = 12
"""Of each."""

SAMPLINGS: dict[str, tuple[Participation, list[str]]] = {
    "none": (Participation(rounds=12, min_separation=3), ["--separation", "3"]),
    "balls-in-bins": (
        Participation(rounds=12, min_separation=3, sampling="balls-in-bins"),
        ["--separation", "3"],
    ),
    "poisson": (
        Participation(rounds=12, sampling="poisson", sampling_rate=1 / 3),
        ["--participations", "4"],
    ),
    "cyclic-poisson": (
        Participation(rounds=12, min_separation=2, sampling="cyclic-poisson", sampling_rate=2 / 3),
        ["--separation", "2", "--participations", "4"],
    ),
    "b-min-sep": (
        Participation(rounds=12, min_separation=2, sampling="b-min-sep", sampling_rate=1 / 2),
        ["--separation", "2", "--participations", "4"],
    ),
    "random-allocation": (
        Participation(rounds=12, max_participations=4, sampling="random-allocation"),
        ["--participations", "4"],
    ),
    "shuffle": (
        Participation(rounds=12, max_participations=4, sampling="shuffle"),
        ["--participations", "4"],
    ),
}
