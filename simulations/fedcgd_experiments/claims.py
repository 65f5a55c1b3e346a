"""What the ε of a table means: no ε is shown without its δ, adjacency, sampling and method."""

from collections.abc import Iterable

from fedcgd_experiments.results import Row


def claims(rows: Iterable[Row]) -> str:
    """A sentence for each δ and adjacency among `rows`; empty if there is none."""
    methods: dict[str, dict[str, None]] = {}
    for row in rows:
        claim = f"ε at δ = {row['delta']:g}; adjacency: {row['adjacency']}"
        methods.setdefault(claim, {})[f"sampling: {row['sampling']} ({row['method']})"] = None
    return " ".join(f"{claim}; {'; '.join(found)}." for claim, found in methods.items())
