"""What the ε of a table means: no ε is shown without its δ, adjacency, sampling and method."""

from collections.abc import Iterable, Mapping

from fedcgd.accounting import ADJACENCY
from fedcgd_experiments.experiment import Record, identity
from fedcgd_experiments.sweep import to_point

_FORMER = {"add or remove one user": ADJACENCY}  # what records of earlier versions say of the same proof


def claims(records: Iterable[Record]) -> str:
    """A sentence for each δ and adjacency among `records`: calibrations of a sweep, or runs that say these themselves.

    Empty if there is none.
    """
    methods: dict[str, dict[str, None]] = {}
    for record in records:
        said = {**record.get("setup", {}), **record}
        adjacency = _FORMER.get(said["adjacency"], said["adjacency"])
        promise = f"ε at δ = {said['delta']:g}; adjacency: {adjacency}"
        methods.setdefault(promise, {})[f"sampling: {said['sampling']} ({said['method']})"] = None
    return " ".join(f"{promise}; {'; '.join(found)}." for promise, found in methods.items())


def claims_of_runs(runs: Iterable[Record], calibrations: Mapping[str, Record]) -> str:
    """`claims` of the calibrations that the `runs` of a sweep were made with, by their setup's `identity`.

    Raises ValueError if one is missing.
    """
    names = dict.fromkeys(identity(to_point(run).setup) for run in runs)
    missing = [name for name in names if name not in calibrations]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(names)} setups have runs and no calibration, which says what their ε means: give all the "
            f"files that `sweep` wrote; the first is {missing[0]}"
        )
    return claims(calibrations[name] for name in names)
