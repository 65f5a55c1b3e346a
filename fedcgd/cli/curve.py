"""`fedcgd curve`: from a model and public examples to its spectrum, and to noise that is fitted to it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcgd.cli.commands import CurveOptions
from fedcgd.cli.options import function_named
from fedcgd.cli.printing import (
    console,
    key_value_table,
    number,
    print_json,
    status,
)
from fedcgd.mechanisms import Mechanism
from fedcgd.optimisation import catalogue
from fedcgd.optimisation.catalogue import MechanismSpec, spelling_of
from fedcgd.optimisation.mechanism_json import write_mechanism
from fedcgd.quadratic import Quadratic, Spectrum

if TYPE_CHECKING:
    from fedcgd.curvature.public import Public

TASKS = "fedcgd_simulations.public:public_examples"  # in the repository, and not in the wheel


def curve(asked: CurveOptions) -> None:
    """Measure the curvature of a model's loss on public examples, and fit noise to it."""
    if sum(each is not None for each in (asked.source, asked.task, asked.spectrum)) != 1:
        raise ValueError("say whose curvature: one of MODULE:FUNCTION, --task and --spectrum")
    if asked.mechanism is None and any(
        given is not None for given in (asked.rounds, asked.learning_rate, asked.mechanism_file)
    ):
        raise ValueError("--rounds, --learning-rate and --mechanism-file are for a --mechanism to be fitted; give one")
    participation = None
    if asked.mechanism is not None:
        if asked.rounds is None or asked.learning_rate is None:
            raise ValueError("noise is fitted to a run: give its --rounds and its --learning-rate")
        participation = asked.participation(asked.rounds, MechanismSpec.parse(asked.mechanism).bands)
    if asked.spectrum is not None:
        measured = Spectrum.load(asked.spectrum)
    else:
        chosen = {"task": asked.task, "model": asked.model, "public": asked.public}
        examples_of = _load(TASKS, **chosen, examples=asked.examples) if asked.task else _load(str(asked.source))
        settings = {"pretraining_epochs": asked.pretraining_epochs, "pretraining_rate": asked.pretraining_rate}
        origin = (chosen if asked.task else {"source": asked.source}) | settings
        measured = _measure(
            examples_of,
            origin,
            eigenvalues=asked.eigenvalues,
            clip_norm=asked.clip_norm,
            seed=asked.seed,
            quiet=asked.json,
        )
    if asked.output is not None:
        measured.save(asked.output)
    fitted = None
    if asked.mechanism is not None and participation is not None and asked.learning_rate is not None:
        with status(asked.json) as say:
            say(f"fitting {asked.mechanism}")
            quadratic = Quadratic(measured, asked.learning_rate)
            fitted = catalogue.mechanism(asked.mechanism, participation, curvature=quadratic)
        if asked.mechanism_file is not None:
            write_mechanism(fitted, asked.mechanism_file)
    show(measured, asked.output, fitted, asked.mechanism_file, json=asked.json)


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
        labels = {"labels": "random" if public.targets is None else "given", "clip_norm": clip_norm}
        return measure_spectrum(
            trained.hessian(clip_norm=clip_norm, seed=seed),
            eigenvalues=eigenvalues,
            seed=seed,
            measured_on=origin | labels,
            report=say,
        )


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
    rows = [
        ("parameters", f"{spectrum.dimension:,}"),
        ("largest eigenvalue", number(spectrum.largest)),
        ("trace", number(spectrum.trace)),
        ("effective dimension", f"{number(spectrum.effective_dimension)} (trace / largest)"),
    ]
    rows += [
        (name.replace("_", " "), str(facts[name]))
        for name in ("examples", "method", "products", "processor_seconds")
        if name in facts
    ]
    if output is not None:
        rows.append(("written to", str(output)))
    if fitted is not None:
        where = f", written to {written}: --mechanism file:{written}" if written else ""
        rows.append(("fitted", spelling_of(fitted) + where))
    console.print(key_value_table("Spectrum of the Hessian on public examples", rows))


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
