"""`fedcgd select-lambda`: which λ. `fedcgd select-bands`: how many bands."""

from dataclasses import asdict
from pathlib import Path

from fedcgd.accounting import selection
from fedcgd.accounting.guarantee import ADJACENCY
from fedcgd.accounting.selection import LambdaSelection
from fedcgd.cli.commands import SelectBandsOptions, SelectLambdaOptions
from fedcgd.cli.printing import (
    budget,
    check_plot,
    console,
    drawn,
    key_value_table,
    number,
    print_json,
    status,
)
from fedcgd.cli.printing import when as when_figures
from fedcgd.optimisation.catalogue import BANDS, MechanismSpec, spelling_of
from fedcgd.participation import SAMPLINGS


def select_lambda(asked: SelectLambdaOptions) -> None:
    """Choose λ of lambda-cgd from public numbers, never from data."""
    check_plot(asked.plot)
    participation, curvature = asked.participation(asked.rounds), asked.quadratic()
    chosen = asked.objective or ("excess" if curvature is None else "curvature")
    with status(asked.json, "searching") as say:
        found = selection.select_lambda(
            participation,
            objective=chosen,
            epsilon=asked.epsilon,
            delta=asked.delta,
            normalize=asked.normalized,
            workload=asked.workload(asked.rounds),
            curvature=curvature,
            progress=say,
        )
    if asked.plot is not None:
        draw(asked.plot, found)
    if asked.json:
        claim = when_figures(participation) | budget(asked.epsilon, asked.delta)
        print_json(asdict(found) | {"normalized": asked.normalized} | claim)
        return
    rows = [
        ("λ", number(found.lam)),
        ("1/(1 − λ)", number(1 / (1 - found.lam))),
        ("error", f"{number(found.value)} per unit of clip norm"),
        ("error of λ = 0", number(found.values[0])),
        ("participation", str(participation)),
        ("budget", f"ε = {asked.epsilon:g} at δ = {asked.delta:g}; {ADJACENCY}; sampling: {asked.sampling}"),
    ]
    console.print(key_value_table(f"λ by {found.objective}, {asked.rounds} rounds, sampling {asked.sampling}", rows))


def select_bands(asked: SelectBandsOptions) -> None:
    """Choose the number of bands p of a mechanism: more cancel more noise, fewer leave more privacy to sampling."""
    spec, workload, curvature = MechanismSpec.parse(asked.mechanism), asked.workload(asked.rounds), asked.quadratic()
    if spec.open[:1] != (BANDS,):
        raise ValueError(
            f"give a mechanism with bands, without their number, such as banded-toeplitz; got {asked.mechanism!r}"
        )
    longest = asked.apart
    if SAMPLINGS[asked.sampling].takes_groups and asked.apart == 1:
        if asked.sampling_rate is not None:
            raise ValueError(
                "--sampling-rate is of a group of users, and each number of bands has groups of its own: give "
                "--participations, or --separation for one number of groups"
            )
        longest = max(1, asked.rounds // (asked.participations or asked.rounds))
    with status(asked.json, "searching") as say:
        found = selection.select_bands(
            spec,
            lambda p: asked.participation(asked.rounds, p),
            longest,
            epsilon=asked.epsilon,
            delta=asked.delta,
            error=asked.error,
            workload=workload,
            curvature=curvature,
            progress=say,
        )
    if asked.json:
        chosen = {
            "bands": found.bandwidth,
            "mechanism": spelling_of(found.mechanism),
            "noise_multiplier": found.noise_multiplier,
            "errors": found.errors,
        }
        participation = asked.participation(asked.rounds, found.bandwidth)
        print_json(chosen | {"error": asked.error} | when_figures(participation) | budget(asked.epsilon, asked.delta))
        return
    what = asked.error if curvature is None else "loss"
    rows = [(f"p = {p}", f"{what} {number(value)}") for p, value in found.errors]
    rows.append(("least", f"{spelling_of(found.mechanism)}, σ = {number(found.noise_multiplier)}"))
    rows.append(("participation", str(asked.participation(asked.rounds, found.bandwidth))))
    rows.append(("budget", f"ε = {asked.epsilon:g} at δ = {asked.delta:g}; {ADJACENCY}; sampling: {asked.sampling}"))
    console.print(key_value_table(f"{asked.mechanism}, {asked.rounds} rounds", rows))


def draw(path: Path, found: LambdaSelection) -> None:
    """The objective over 1/(1 − λ), both logarithmic, with the choice marked, into the image file `path`."""
    with drawn(path, 6, 4) as figure:
        axes = figure.add_subplot(
            xscale="log", yscale="log", xlabel="1/(1 − λ)", ylabel=f"{found.objective}, per unit of clip norm"
        )
        axes.plot([1 / (1 - lam) for lam in found.lams], found.values, color="black", marker=".")
        axes.plot(1 / (1 - found.lam), found.value, "o", markersize=9, label=f"λ = {found.lam:.4g}")
        axes.legend()
