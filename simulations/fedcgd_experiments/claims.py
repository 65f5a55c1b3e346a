"""What the ε of a table means: no ε is shown without its δ, adjacency, sampling and method."""

from collections.abc import Iterable

from fedcgd_experiments.experiment import Record


def claims(records: Iterable[Record]) -> str:
    """A sentence for each δ and adjacency among `records`: calibrations of a sweep, or runs that say these themselves.

    Empty if there is none.
    """
    methods: dict[str, dict[str, None]] = {}
    for record in records:
        said = {**record.get("setup", {}), **record}
        promise = f"ε at δ = {said['delta']:g}; adjacency: {said['adjacency']}"
        methods.setdefault(promise, {})[f"sampling: {said['sampling']} ({said['method']})"] = None
    return " ".join(f"{promise}; {'; '.join(found)}." for promise, found in methods.items())
