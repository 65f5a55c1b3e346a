"""`fedcgd curve`: from a model and public examples to its spectrum, and to noise that is fitted to it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from fedcgd.cli.options import JsonOption, WhenOptions, function_named, takes
from fedcgd.cli.printing import (
    check_plot,
    console,
    drawn,
    key_value_table,
    number,
    print_json,
    status,
)
from fedcgd.curvature.tail import PowerLaw
from fedcgd.mechanisms import Mechanism
from fedcgd.optimisation import catalogue
from fedcgd.optimisation.catalogue import MechanismSpec, spelling_of, write_mechanism
from fedcgd.quadratic import Quadratic, Spectrum

if TYPE_CHECKING:
    from fedcgd.curvature.public import Public

TASKS = "fedcgd_simulations.public:public_examples"  # in the repository, and not in the wheel


@takes(WhenOptions)
def curve_command(
    when: WhenOptions,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FUNCTION]",
            help="A function without arguments that returns a fedcgd.curvature.public.Public: your model, its loss and public "
            "examples. The module is looked for in this folder too.",
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="In place of a function: a task of the repository's simulations.")
    ] = None,
    spectrum: Annotated[
        Path | None, typer.Option(help="In place of a function: what an earlier call wrote; nothing is measured.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the spectrum to this JSON file.")] = None,
    model: Annotated[str | None, typer.Option(help="With --task: one of its models.")] = None,
    public: Annotated[
        str, typer.Option(help="With --task: `held-out`, its validation images, or another task's, made to fit.")
    ] = "held-out",
    examples: Annotated[int, typer.Option(min=1, help="With --task: how many public examples.")] = 1000,
    eigenvalues: Annotated[
        int, typer.Option(min=2, help="How many of the largest to compute; the others are estimated from above.")
    ] = 100,
    pretraining_epochs: Annotated[
        int, typer.Option(min=0, help="Of training on random labels before; 0 for the model as it is.")
    ] = 20,
    pretraining_rate: Annotated[float, typer.Option(help="Learning rate of that training.")] = 0.1,
    clip_norm: Annotated[
        float | None, typer.Option(help="ζ of the private training: examples that will be clipped count less.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random labels and vectors.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the eigenvalues, computed and estimated, into this image file.")
    ] = None,
    mechanism: Annotated[
        str | None,
        typer.Option(
            "--mechanism",
            help="Then fit this noise to the spectrum: noise-curve:p, lambda-cgd, band-inv-mf:p, blt:d, …",
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="With --mechanism: the number of releases n.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="With --mechanism: η, what a mean of clipped updates is multiplied by.")
    ] = None,
    mechanism_file: Annotated[
        Path | None, typer.Option(help="With --mechanism: write it to this JSON file, which is then spelled file:PATH.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure the curvature of a model's loss on public examples, and fit noise to it.

    The labels are random, and the model learns them first: that makes it unsure, and its loss as curved as it will be. Nothing
    private is looked at, so it costs no ε; see to it that the examples are public.

    Example: fedcgd curve --task digits --model tanh-cnn --clip-norm 1 --eigenvalues 20 -o spectrum.json --mechanism noise-curve:8
    --rounds 100 --separation 20 --learning-rate 0.5 --mechanism-file noise.json
    """
    check_plot(plot)
    if sum(each is not None for each in (source, task, spectrum)) != 1:
        raise ValueError("say whose curvature: one of MODULE:FUNCTION, --task and --spectrum")
    if mechanism is None and any(given is not None for given in (rounds, learning_rate, mechanism_file)):
        raise ValueError("--rounds, --learning-rate and --mechanism-file are for a --mechanism to be fitted; give one")
    participation = None
    if mechanism is not None:
        if rounds is None or learning_rate is None:
            raise ValueError("noise is fitted to a run: give its --rounds and its --learning-rate")
        participation = when.participation(rounds, MechanismSpec.parse(mechanism).bands)
    if spectrum is not None:
        measured = Spectrum.load(spectrum)
    else:
        chosen = {"task": task, "model": model, "public": public}
        examples_of = _load(TASKS, **chosen, examples=examples) if task else _load(str(source))
        settings = {"pretraining_epochs": pretraining_epochs, "pretraining_rate": pretraining_rate}
        origin = (chosen if task else {"source": source}) | settings
        measured = _measure(examples_of, origin, eigenvalues=eigenvalues, clip_norm=clip_norm, seed=seed, quiet=json)
    if output is not None:
        measured.save(output)
    if plot is not None:
        draw(plot, measured)
    fitted = None
    if mechanism is not None and participation is not None and learning_rate is not None:
        with status(json) as say:
            say(f"fitting {mechanism}")
            quadratic = Quadratic(measured, learning_rate)
            fitted = catalogue.mechanism(mechanism, participation, curvature=quadratic)
        if mechanism_file is not None:
            write_mechanism(fitted, mechanism_file)
    show(measured, output, fitted, mechanism_file, json=json)


def _measure(
    public: "Public",
    origin: dict[str, Any],
    *,
    eigenvalues: int,
    clip_norm: float | None,
    seed: int,
    quiet: bool,
) -> Spectrum:
    from fedcgd.curvature.measure import measure_spectrum
    from fedcgd.curvature.public import pretrained

    with status(quiet) as say:
        trained = pretrained(
            public, epochs=origin["pretraining_epochs"], learning_rate=origin["pretraining_rate"], seed=seed, report=say
        )
        say("products with the Hessian")
        labels = {"labels": "random" if public.targets is None else "given", "clip_norm": clip_norm}
        return measure_spectrum(
            trained.hessian(clip_norm=clip_norm, seed=seed),
            eigenvalues=eigenvalues,
            seed=seed,
            measured_on=origin | labels,
            report=lambda effort: say(str(effort)),
        ).spectrum


def show(
    spectrum: Spectrum, output: Path | None, fitted: Mechanism | None, mechanism_file: Path | None, *, json: bool
) -> None:
    """What was measured, in a few numbers, and what was fitted to it."""
    facts = spectrum.measured_on
    written = mechanism_file and str(mechanism_file)
    if json:
        figures = {name: getattr(spectrum, name) for name in ("dimension", "effective_dimension", "largest", "trace")}
        files = {"file": output and str(output), "mechanism_file": written}
        print_json(figures | {"measured_on": dict(facts)} | files | {"mechanism": fitted and spelling_of(fitted)})
        return
    tail, quadrature = facts.get("tail"), facts.get("quadrature")
    rows = [
        ("parameters", f"{spectrum.dimension:,}"),
        ("largest eigenvalue", number(spectrum.largest)),
        ("trace", number(spectrum.trace)),
        ("effective dimension", f"{number(spectrum.effective_dimension)} (trace / largest)"),
    ]
    rows += [(name.replace("_", " "), str(facts[name])) for name in ("examples", "method") if name in facts]
    if tail and quadrature:
        rows.append(("tail: power law", f"sums to {number(tail['sum'])}"))
        spread = f"{number(quadrature['sum'])} ± {number(quadrature['sum_standard_error'])}"
        rows.append(("tail: quadrature", f"sums to {spread}"))
    if "products" in facts:
        took = f"{facts['products']} products, {facts['processor_seconds']} s of processor time"
        rows.append(("took", f"{took}, {facts['memory_bytes'] / 2**30:.1f} GiB at most"))
    if output is not None:
        rows.append(("written to", str(output)))
    if fitted is not None:
        where = f", written to {written}: --mechanism file:{written}" if written else ""
        rows.append(("fitted", spelling_of(fitted) + where))
    console.print(key_value_table("Spectrum of the Hessian on public examples", rows))


def draw(path: Path, spectrum: Spectrum) -> None:
    """Eigenvalues against their positions, both logarithmic: computed, the power law through them, and what is used."""
    values, counts = spectrum.arrays()
    with drawn(path, 6, 4) as figure:
        axes = figure.add_subplot(xscale="log", yscale="log", xlabel="position", ylabel="eigenvalue")
        axes.step(np.cumsum(counts), values, where="pre", color="black", label="used")
        if largest := spectrum.measured_on.get("largest"):
            axes.plot(np.arange(1, len(largest) + 1), largest, ".", color="black", label="computed")
        if tail := spectrum.measured_on.get("tail"):
            law = PowerLaw(**{name: tail[name] for name in ("scale", "exponent", "count", "smallest")})
            positions = np.unique(np.geomspace(1, law.count, 200).round())
            axes.plot(positions, law(positions), "--", color="0.5", label="power law through them")
        axes.legend()


def _load(source: str, **options: Any) -> "Public":
    from fedcgd.curvature.public import Public

    hint = (
        "it is in the repository's folder simulations, which must be in PYTHONPATH"
        if source == TASKS
        else "see PYTHONPATH"
    )
    found = function_named(source, hint)(**options)
    if not isinstance(found, Public):
        raise ValueError(  # noqa: TRY004 — what is typed on the command line is a value
            f"{source} returned a {type(found).__name__}, not a fedcgd.curvature.public.Public"
        )
    return found
