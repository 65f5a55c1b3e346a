"""What can be asked on the command line: the options of each command, and where the work is done.

Apart from that work, so that help loads no accountant.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import click

from fedcgd.cli.declare import Argument, Option
from fedcgd.cli.options import (
    DeltaOption,
    EpsilonOption,
    ErrorOption,
    FitOptions,
    JsonOption,
    MechanismOption,
    MethodOption,
    NoiseMultiplierOption,
    ReleasedOption,
    RoundsOption,
    RunOptions,
    WhenOptions,
    completed_mechanisms,
    usual,
)
from fedcgd.participation.samplings import SECRET_SAMPLINGS
from fedcgd.support.choices import LambdaObjective

LedgerArgument = Annotated[Path, Argument(help="The ledger file.")]
RegisterOption = Annotated[
    Path | None,
    Option(help="The register of the key's runs (noise.key.runs). Default: one beside the ledger that knows the run."),
]
KeyArgument = Annotated[Path, Argument(help="The keeper's key file. Its record lies beside it.")]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Rank whole recipes for a budget, DP-SGD among them: mechanism, sampling, cohort, rounds, schedule, rate.

    They are ranked by the loss that theory expects of the last model, on a quadratic: 1 is an untrained model, 0 the best.

    Only public numbers go in, so that the answer costs no privacy. A --spectrum or --proxy of private data would make ε wrong.

    Example: fedcgd plan --users 1260 --epsilon 1 --delta 1e-5 --turns 20 --classes 10 --features 64 --uncentred 0.9
    """

    users: Annotated[int, Option(help="Examples, or people where a person is what is protected. A public number.")]
    epsilon: EpsilonOption
    delta: DeltaOption
    secret: Annotated[
        list[str] | None,
        Option(
            type=click.Choice(SECRET_SAMPLINGS),
            help="A sampling that you can keep secret, in logs too; repeat the option for several. Without it anybody may know "
            "who takes part when. The last two take a minute or more.",
        ),
    ] = None
    turns: Annotated[int, Option(help="How often one user takes part at most: epochs, or turns of a person.")] = 20
    max_cohort: Annotated[int | None, Option(help="The most users in a round. Default: all.")] = None
    max_rounds: Annotated[int | None, Option(help="The most rounds. Default: 4000.")] = None
    buffers: Annotated[
        int, Option(help="How many vectors of the model's size there is memory for, to correlate noise.")
    ] = 32
    clip_norm: Annotated[
        float, Option(help="L2 norm that each user's update is clipped to; learning rates are printed for it.")
    ] = 1.0
    spectrum: Annotated[
        Path | None,
        Option(help="The spectrum of *public* data like the private ones, as `fedcgd curve` writes it."),
    ] = None
    spectrum_is_public: Annotated[
        bool, Option("--spectrum-is-public", help="Says that nobody's private data are in --spectrum.")
    ] = False
    classes: Annotated[
        int | None, Option(help="Outputs of a linear model, such as softmax regression; give --features too.")
    ] = None
    features: Annotated[
        int | None,
        Option(help="Inputs of the linear model, the bias not counted; examples are scaled to norm 1."),
    ] = None
    uncentred: Annotated[
        float,
        Option(
            help="The part that the inputs' mean has of their square norm: 0 if standardised, 0.7 to 0.9 for raw pixels."
        ),
    ] = 0.0
    hidden_layers: Annotated[
        int | None,
        Option(
            help="Of a network that is trained whole: its layers besides the last. With two or more, rates are smaller."
        ),
    ] = None
    proxy: Annotated[
        str | None,
        Option(
            metavar="MODULE:FUNCTION",
            help="A function that trains a *public* task like the private one: recipes and rates are tried on it, and its scores "
            "rank them. The module is looked for in this folder too.",
        ),
    ] = None
    proxy_is_public: Annotated[
        bool, Option("--proxy-is-public", help="Says that nobody's private data are in --proxy.")
    ] = False
    record: Annotated[
        Path | None,
        Option(help="With --proxy: a JSONL file of what was tried, from which the next command goes on."),
    ] = None
    repeats: Annotated[int, Option(help="With --proxy: seeds of each training; more for small proxies.")] = 1
    processes: Annotated[int, Option(help="With --proxy: how many trainings run at once.")] = 1
    plot: Annotated[
        Path | None,
        Option(help="Also draw the expected loss against turns, a curve for each kind, into this PNG or SVG."),
    ] = None
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(RunOptions):
    """What `calibrate`, `epsilon` and `delta` share."""

    rounds: RoundsOption
    method: MethodOption = None
    error: ErrorOption = "rmse"
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(BudgetOptions):
    """Find the smallest noise multiplier σ that keeps the whole run within (ε, δ).

    Example: fedcgd calibrate --mechanism lambda-cgd:0.9 --rounds 3900 --separation 390 --epsilon 8 --delta 1e-5
    """

    epsilon: EpsilonOption
    delta: DeltaOption


@dataclass(frozen=True, kw_only=True)
class KnownNoiseOptions(BudgetOptions):
    """Where σ is given the mechanism is too: without a budget there is nothing that λ or p could be chosen for."""

    mechanism: MechanismOption = field()


@dataclass(frozen=True, kw_only=True)
class EpsilonOptions(KnownNoiseOptions):
    """Find an upper bound on ε for a given noise multiplier σ, for the whole run or the rounds released so far.

    Example: fedcgd epsilon --mechanism lambda-cgd:0.9 --rounds 3900 --separation 390 --noise-multiplier 4.36 --delta 1e-5
    """

    noise_multiplier: NoiseMultiplierOption
    delta: DeltaOption
    released: ReleasedOption = None


@dataclass(frozen=True, kw_only=True)
class DeltaOptions(KnownNoiseOptions):
    """Find an upper bound on δ at some ε for a given noise multiplier σ, for the whole run or the rounds released so far.

    Example: fedcgd delta --mechanism lambda-cgd:0.9 --rounds 3900 --separation 390 --noise-multiplier 4.36 --epsilon 8
    """

    noise_multiplier: NoiseMultiplierOption
    epsilon: EpsilonOption
    released: ReleasedOption = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions(FitOptions):
    """Compare mechanisms: σ, sensitivity and errors at one budget, best RMSE first; with --curvature, least loss first.

    A mechanism that the sampling does not cover is listed with the reason. Numbers left out are chosen for the budget.

    Example: fedcgd compare --mechanism dp-sgd --mechanism bisr:16 --rounds 3900 --separation 390 --epsilon 8 --delta 1e-5
    """

    rounds: RoundsOption
    epsilon: EpsilonOption
    delta: DeltaOption
    mechanism: Annotated[
        list[str] | None,
        Option(
            shell_complete=completed_mechanisms,
            help="NAME, NAME:VALUE, …, all also with :normalized behind it; repeat it. Default: the rows of Table 4.",
        ),
    ] = None
    error: ErrorOption = "rmse"
    plot: Annotated[Path | None, Option(help="Also draw the RMSE of each as a bar, into this PNG or SVG file.")] = None
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class SelectLambdaOptions(FitOptions):
    """Choose λ of lambda-cgd from public numbers, never from data.

    Example: fedcgd select-lambda --objective rmse --rounds 3900 --separation 390 --epsilon 8 --delta 1e-5
    """

    rounds: RoundsOption
    epsilon: EpsilonOption
    delta: DeltaOption
    objective: Annotated[
        LambdaObjective | None,
        Option(
            help="rmse and max-se ignore the sampling; amplified-rmse counts it in; practical is a third of that on 1/(1 − λ), "
            "and excess on λ/(1 − λ); curvature is the root of the loss on --curvature. Default: excess, or "
            "curvature if there is one."
        ),
    ] = None
    normalized: Annotated[bool, Option("--normalized", help="Of C_λ with unit columns.")] = False
    plot: Annotated[Path | None, Option(help="Also draw the objective over 1/(1 − λ) into this PNG file.")] = None
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class SelectBandsOptions(FitOptions):
    """Choose the number of bands p of a mechanism: more cancel more noise, fewer leave more privacy to sampling.

    Tries p = 1, 2, 4, … and the longest. Under cyclic-poisson without --separation each p has its own p groups, and k =
    --participations; otherwise p is at most --separation.

    Example: fedcgd select-bands --sampling cyclic-poisson --rounds 128 --participations 8 --epsilon 2 --delta 1e-8
    """

    rounds: RoundsOption
    epsilon: EpsilonOption
    delta: DeltaOption
    mechanism: Annotated[
        str,
        Option(help="A mechanism with bands, without numbers: banded-toeplitz, bsr, bifr, bisr:normalized, …"),
    ] = "banded-toeplitz"
    error: ErrorOption = "rmse"
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class CurveOptions(WhenOptions):
    """Measure the curvature of a model's loss on public examples, and fit noise to it.

    The labels are random, and the model learns them first: that makes it unsure, and its loss as curved as it will be. Nothing
    private is looked at, so it costs no ε; see to it that the examples are public.

    Example: fedcgd curve --task digits --model tanh-cnn --clip-norm 1 --eigenvalues 20 -o spectrum.json --mechanism noise-curve:8
    --rounds 100 --separation 20 --learning-rate 0.5 --mechanism-file noise.json
    """

    source: Annotated[
        str | None,
        Argument(
            metavar="[MODULE:FUNCTION]",
            help="A function without arguments that returns a fedcgd.curvature.public.Public: your model, its loss and public "
            "examples. The module is looked for in this folder too.",
        ),
    ] = None
    task: Annotated[str | None, Option(help="In place of a function: a task of the repository's simulations.")] = None
    spectrum: Annotated[
        Path | None, Option(help="In place of a function: what an earlier call wrote; nothing is measured.")
    ] = None
    output: Annotated[Path | None, Option("--output", "-o", help="Write the spectrum to this JSON file.")] = None
    model: Annotated[str | None, Option(help="With --task: one of its models.")] = None
    public: Annotated[
        str, Option(help="With --task: `held-out`, its validation images, or another task's, made to fit.")
    ] = "held-out"
    examples: Annotated[int, Option(min=1, help="With --task: how many public examples.")] = 1000
    eigenvalues: Annotated[
        int, Option(min=2, help="How many of the largest to compute; the others are estimated from above.")
    ] = 100
    pretraining_epochs: Annotated[
        int, Option(min=0, help="Of training on random labels before; 0 for the model as it is.")
    ] = 20
    pretraining_rate: Annotated[float, Option(help="Learning rate of that training.")] = 0.1
    clip_norm: Annotated[
        float | None, Option(help="ζ of the private training: examples that will be clipped count less.")
    ] = None
    seed: Annotated[int, Option(help="Of the random labels and vectors.")] = 0
    plot: Annotated[
        Path | None, Option(help="Also draw the eigenvalues, computed and estimated, into this image file.")
    ] = None
    mechanism: Annotated[
        str | None,
        Option(
            "--mechanism",
            help="Then fit this noise to the spectrum: noise-curve:p, lambda-cgd, band-inv-mf:p, blt:d, …",
        ),
    ] = None
    rounds: Annotated[int | None, Option(help="With --mechanism: the number of releases n.")] = None
    learning_rate: Annotated[
        float | None, Option(help="With --mechanism: η, what a mean of clipped updates is multiplied by.")
    ] = None
    mechanism_file: Annotated[
        Path | None, Option(help="With --mechanism: write it to this JSON file, which is then spelled file:PATH.")
    ] = None
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class TheoryOptions(WhenOptions):
    """Show what the noise of each mechanism adds to the loss on a quadratic with a given spectrum, least first.

    Loss: what the noise adds after all rounds. Gradient norm: what it adds to the mean of the squared norm over all rounds: large
    where noise is large on the way and cancelled at the end. Stationary: the loss of a run without end in which a user takes part
    once. All per (clip norm / cohort)², at the budget.

    Example: fedcgd theory --spectrum spectrum.json --rounds 1000 --separation 100 --epsilon 8 --delta 1e-5
    """

    spectrum: Annotated[Path, Option(help="A spectrum, as `fedcgd curve` writes it (JSON), of public data.")]
    rounds: RoundsOption
    epsilon: EpsilonOption
    delta: DeltaOption
    learning_rate: Annotated[
        float | None,
        Option(help="η; below 2/‖H‖. Default: 1/‖H‖, where descent on the steepest direction is fastest."),
    ] = None
    mechanism: Annotated[
        list[str] | None,
        Option(
            shell_complete=completed_mechanisms,
            help="A mechanism, as everywhere; repeat it. What can be fitted to the spectrum is shown without that, and fitted. "
            "Default: one or two of each kind.",
        ),
    ] = None
    plot: Annotated[
        Path | None,
        Option(help="Also draw losses against rounds, d, d_eff and ν into this PNG or SVG file; takes a minute."),
    ] = None
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(RunOptions):
    """Print the chain of reasoning behind ε, in words and numbers, with what each assumption demands of a deployment.

    Example: fedcgd explain --mechanism lambda-cgd:0.9 --rounds 3900 --separation 390 --epsilon 8 --delta 1e-5
    """

    rounds: RoundsOption
    delta: DeltaOption
    epsilon: Annotated[float | None, Option("--epsilon", check=usual, help="Budget ε; or give --noise-multiplier.")] = (
        None
    )
    noise_multiplier: Annotated[
        float | None, Option("--noise-multiplier", help="σ: noise per unit of clip norm; or give --epsilon.")
    ] = None
    clip_norm: Annotated[float, Option("--clip-norm", help="ζ: L2 bound on a user's update of a round.")] = 1.0
    plot: Annotated[Path | None, Option(help="Also draw the run's trade-off curve (f-DP) into this PNG file.")] = None
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class AuditOptions(RunOptions):
    """Try to refute (ε, δ): of this installation's noise, or with --scores of a federated run. Exit code 1 if refuted.

    The noise is added by the very code that a run uses, to worst-case users and to none, and their releases are told apart.
    Under a secret sampling the noise is audited against the ε that the same σ gives to an adversary who knows the rounds. Under
    b-min-sep and random-allocation users whose rounds are drawn as a run draws them are told apart too, against ε itself.

    Example: fedcgd audit --mechanism lambda-cgd:0.9 --rounds 100 --separation 20 --epsilon 2 --delta 1e-5
    """

    epsilon: EpsilonOption
    delta: DeltaOption
    rounds: Annotated[int | None, Option("--rounds", help="Number of releases n; leave out with --scores.")] = None
    noise_multiplier: Annotated[
        float | None, Option("--noise-multiplier", help="σ that is said to give ε. Default: the calibrated one.")
    ] = None
    scores: Annotated[
        Path | None,
        Option(help='JSON file of a federated run\'s canaries: {"included": [score, …], "held_out": [score, …]}.'),
    ] = None
    trials: Annotated[int, Option(help="Simulated canaries; 40000 tell σ from 0.9σ.")] = 40_000
    confidence: Annotated[float, Option(help="How sure a refutation is.")] = 0.99
    seed: Annotated[int, Option(min=0, help="Of the simulated noise and canaries; the result is repeatable.")] = 0
    path: Annotated[
        Literal["server", "opacus"],
        Option(help="Whose releases: those of a Flower server, or of the Opacus engine."),
    ] = "server"
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write what a run promises, and why: a page for a reviewer, or the privacy statement that goes with its model.

    All of it comes from the ledger, which is compared with the register of its key. Exit code 1 if the records contradict each
    other. The HTML page has counts of users and rounds, which are not differentially private; the statement counts nobody.

    Example: fedcgd report run.db -o report.html
    """

    path: LedgerArgument
    output: Annotated[
        Path,
        Option(
            "--output", "-o", help="report.html: the page for a reviewer. statement.md or .json: the privacy statement."
        ),
    ]
    register: RegisterOption = None


@dataclass(frozen=True, kw_only=True)
class LedgerOptions:
    """Say where a run stands: rounds, attempts, ε so far.

    Example: fedcgd ledger show run.db
    """

    path: LedgerArgument
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Derive ε again from the records alone; exit code 1 if they contradict each other, the plan or the register of the key.

    Without the register an older copy of the ledger looks like a shorter run. What a careful forger can do all the same, the
    page for reviewers says.

    Example: fedcgd ledger verify run.db && echo sound
    """

    path: LedgerArgument
    register: RegisterOption = None
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Print all records as JSON, without user ids and models. Cohort sizes are in it: they are not differentially private.

    Example: fedcgd ledger export run.db > run.json
    """

    path: LedgerArgument


@dataclass(frozen=True, kw_only=True)
class ComposeOptions:
    """Say what several runs cost together each user who was in them; users are the same if their ids are.

    Whoever was asked in a run is given that run's whole bound; under a secret sampling everybody is counted as in the run.
    The private evaluations of a run count with it: their ledger is looked for beside the run's.
    An older copy of a ledger changes nothing. Copies of one run that went on in two places are both counted, and said.
    Every run counts against every joint budget that one of them was begun with, named there or not.
    Exit code 1 if a ledger contradicts itself or the register of its key, or if a joint budget is exceeded.

    Example: fedcgd ledger compose A.db B.db
    """

    paths: Annotated[list[Path], Argument(help="The ledgers of runs over the same people.")]
    delta: Annotated[float | None, Option(help="δ of all runs together. Default: that of their plans.")] = None
    user: Annotated[str | None, Option(help="Only this user.")] = None
    register: RegisterOption = None
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Write the last released model, before or after the run is sealed, by name: the arrays that the run trained, and no others.

    Counters, frozen layers and statistics that stayed as they were are not in the ledger. With --carried they come from the file
    (.npz or .safetensors) of the model that the run began with, and the whole model is written.

    Example: fedcgd ledger model run.db model.npz --carried initial.npz
    """

    path: LedgerArgument
    target: Annotated[Path, Argument(help="Where to: .npz or .safetensors.")]
    carried: Annotated[
        Path | None, Option(help="The model that the run began with, for its arrays that were not trained.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class AdoptOptions:
    """Declare a ledger the latest of its run, where the register of its key's runs (noise.key.runs) is lost.

    Nothing else can tell whether another copy of the run went on: if one did, ε was spent twice. The declaration is recorded in
    the ledger, and verify and the report say so. If the register is only elsewhere, put it back instead.

    Example: fedcgd ledger adopt run.db --key-file noise.key
    """

    path: LedgerArgument
    key_file: Annotated[Path, Option(help="The run's key file; its register lies beside it.")]
    runs: Annotated[Path | None, Option(help="The register, if it is not beside the key file.")] = None


@dataclass(frozen=True, kw_only=True)
class SealOptions:
    """End a run for good and delete its key, so that nobody can remove the noise from what was released.

    Example: fedcgd ledger seal run.db --key-file noise.key
    """

    path: LedgerArgument
    key_file: Annotated[Path | None, Option(help="The run's key file, which is deleted.")] = None


@dataclass(frozen=True, kw_only=True)
class NewKeeperOptions:
    """Make a keeper's key, readable by you alone, and print its card: the lines that go into everybody's keepers.toml.

    Example: fedcgd keeper new keeper.key --name court >> keepers.toml
    """

    key: KeyArgument
    name: Annotated[str, Option(help="What the others call this keeper: letters, digits, dots, dashes.")]
    address: Annotated[str, Option(help="HOST:PORT, if it will run as a service (fedcgd keeper serve).")] = ""
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Answer as a keeper until it is stopped, at the port of its address: a process of its own, without Flower.

    Example: fedcgd keeper serve keeper.key --keepers keepers.toml --certificate tls.crt --private-key tls.key --server server.crt
    """

    key: KeyArgument
    keepers: Annotated[Path, Option(help="The keepers.toml that all parties hold, with this keeper's address.")]
    certificate: Annotated[Path, Option(help="This keeper's certificate for TLS, PEM.")]
    private_key: Annotated[Path, Option(help="The certificate's private key, PEM, readable by you alone.")]
    server: Annotated[Path, Option(help="The certificate of the server that may ask, PEM.")]
    host: Annotated[str, Option(help="The network address to listen at; all of this machine's by default.")] = ""


@dataclass(frozen=True, kw_only=True)
class ShowKeepersOptions:
    """Show who the keepers in a keepers.toml are, or what the keeper of a key has opened.

    Example: fedcgd keeper show keepers.toml
    """

    path: Annotated[Path, Argument(help="A keeper's key file, or the keepers.toml that all parties hold.")]
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class VerifyKeepersOptions:
    """Compare what several keepers opened, with each other and with the run's ledger; exit code 1 if they contradict.

    Example: fedcgd keeper verify court=court.key.record union=union.key.record --ledger run.db
    """

    records: Annotated[
        list[str], Argument(help="NAME=FILE for each keeper: its name and its record (keeper.key.record).")
    ]
    ledger: Annotated[Path | None, Option(help="The ledger of the run, to compare with as well.")] = None
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class SealKeeperOptions:
    """End a keeper's part in a run: delete its key, so that its share of the noise can never be removed, and keep its record.

    Example: fedcgd keeper seal keeper.key
    """

    key: KeyArgument
    json: JsonOption = False


COMMANDS: dict[str, tuple[type, str]] = {
    "plan": (PlanOptions, "fedcgd.cli.plan:plan"),
    "calibrate": (CalibrateOptions, "fedcgd.cli.budget:calibrate"),
    "epsilon": (EpsilonOptions, "fedcgd.cli.budget:epsilon"),
    "delta": (DeltaOptions, "fedcgd.cli.budget:delta"),
    "compare": (CompareOptions, "fedcgd.cli.compare:compare"),
    "select-lambda": (SelectLambdaOptions, "fedcgd.cli.select:select_lambda"),
    "select-bands": (SelectBandsOptions, "fedcgd.cli.select:select_bands"),
    "curve": (CurveOptions, "fedcgd.cli.curve:curve"),
    "theory": (TheoryOptions, "fedcgd.cli.theory:theory"),
    "explain": (ExplainOptions, "fedcgd.cli.explain:explain"),
    "audit": (AuditOptions, "fedcgd.cli.audit:audit"),
    "report": (ReportOptions, "fedcgd.cli.report_page:report"),
}
LEDGER_COMMANDS: dict[str, tuple[type, str]] = {
    "show": (LedgerOptions, "fedcgd.cli.ledger:show"),
    "verify": (VerifyOptions, "fedcgd.cli.ledger:verify"),
    "export": (ExportOptions, "fedcgd.cli.ledger:export"),
    "compose": (ComposeOptions, "fedcgd.cli.ledger:compose"),
    "model": (ModelOptions, "fedcgd.cli.ledger:model"),
    "adopt": (AdoptOptions, "fedcgd.cli.ledger:adopt"),
    "seal": (SealOptions, "fedcgd.cli.ledger:seal"),
}
KEEPER_COMMANDS: dict[str, tuple[type, str]] = {
    "new": (NewKeeperOptions, "fedcgd.cli.keeper:new"),
    "serve": (ServeOptions, "fedcgd.cli.keeper:serve"),
    "show": (ShowKeepersOptions, "fedcgd.cli.keeper:show"),
    "verify": (VerifyKeepersOptions, "fedcgd.cli.keeper:verify"),
    "seal": (SealKeeperOptions, "fedcgd.cli.keeper:seal"),
}
