"""Poisson sampling: in each round a user takes part with probability q, independently of everything else."""

from fedcgd.participation.promise import Promise
from fedcgd.participation.samplings.cyclic_poisson import CyclicPoisson


class Poisson(CyclicPoisson):
    """Cyclic Poisson sampling of one group; b = 1."""

    name = "poisson"
    takes_groups = False
    has_bins = False
    assumption = (
        "Each user tosses its own coin in each round, independently of everything else. The deployment must keep the "
        "outcomes secret (also the size of the cohort), must not fill up or cut cohorts to a fixed size, must not "
        "replace absent users, and must divide by a fixed number."
    )

    def check(self, run: Promise) -> None:
        """b is 1."""
        super().check(run)
        if run.min_separation != 1:
            raise ValueError(f"poisson sampling has min_separation 1, got {run.min_separation}; use cyclic-poisson")
