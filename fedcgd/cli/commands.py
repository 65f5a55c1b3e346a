"""What can be asked on the command line: the options of each command, and where the work is done.

Apart from that work, so that help loads no accountant.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click

from fedcgd.cli.declare import Argument, Option
from fedcgd.cli.options import (
    BudgetOptions,
    DeltaIfAny,
    EpsilonIfAny,
    FitOptions,
    OutputOptions,
    RunOptions,
    WhenOptions,
    completed_mechanisms,
)
from fedcgd.participation.samplings import SECRET_SAMPLINGS

File = Annotated[Path, Argument()]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What the model is, or its curvature.

    Options:
        spectrum: The spectrum of *public* data like the private ones, as `fedcgd curve` writes it.
        spectrum_is_public: Says that nobody's private data are in --spectrum.
        classes: Outputs of a linear model, such as softmax regression; give --features too.
        features: Inputs of the linear model, the bias not counted; examples are scaled to norm 1.
        uncentred: The part that the inputs' mean has of their square norm: 0 if standardised, 0.7 to 0.9 for raw pixels.
        inputs: In place of the two: inputs of *public* data like the private ones (.npy, a row for each example), to be measured.
        inputs_are_public: Says that nobody's private data are in --inputs.
        hidden_layers: Of a network that is trained whole: its layers besides the last. With two or more, rates are smaller.
    """

    spectrum: Path | None = None
    spectrum_is_public: bool = False
    classes: int | None = None
    features: int | None = None
    uncentred: float = 0.0
    inputs: Path | None = None
    inputs_are_public: bool = False
    hidden_layers: int | None = None


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """Rehearsals on a public task.

    Options:
        proxy: A function that trains a *public* task like the private one: recipes and rates are tried on it, and its scores
            rank them. The module is looked for in this folder too.
        proxy_is_public: Says that nobody's private data are in --proxy.
        record: With --proxy: a JSONL file of what was tried, from which the next command goes on.
        repeats: With --proxy: seeds of each training; more for small proxies.
        processes: With --proxy: how many trainings run at once.
    """

    proxy: Annotated[str | None, Option(metavar="MODULE:FUNCTION")] = None
    proxy_is_public: bool = False
    record: Path | None = None
    repeats: int = 1
    processes: int = 1


@dataclass(frozen=True, kw_only=True)
class PlanOptions(OutputOptions, ProxyOptions, ModelOptions, BudgetOptions):
    """Rank whole recipes for a budget, DP-SGD among them: mechanism, sampling, cohort, rounds, schedule, rate.

    They are ranked by the loss that theory expects of the last model, on a quadratic: 1 is an untrained model, 0 the best.

    Only public numbers go in, so that the answer costs no privacy. Private data in --spectrum, --inputs or --proxy would make ε
    wrong.

    Example: fedcgd plan --users 1260 --epsilon 1 --delta 1e-5 --participations 20 --classes 10 --features 64 --uncentred 0.9

    Options:
        users: Examples, or people where a person is what is protected. A public number.
        secret: A sampling that you can keep secret, in logs too; repeat the option for several. Without it anybody may know who
            takes part when. The last two take a minute or more.
        participations: How often one user takes part at most: epochs, or rounds of a person.
        max_cohort: The most users in a round. Default: all.
        max_rounds: The most rounds. Default: 4000.
        buffers: How many vectors of the model's size there is memory for, to correlate noise.
        clip_norm: L2 norm that each user's update is clipped to; learning rates are printed for it.
    """

    users: int
    secret: Annotated[list[str] | None, Option(type=click.Choice(SECRET_SAMPLINGS))] = None
    participations: int = 20
    max_cohort: int | None = None
    max_rounds: int | None = None
    buffers: int = 32
    clip_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Of ε, δ and σ two, and of which rounds.

    Options:
        epsilon: ε; 0.1 to 10 is usual.
        delta: Failure probability δ; well below 1 / number of users.
        noise_multiplier: σ, noise per unit of clip norm.
        released: For the first rounds only; holds if their number does not depend on what they released.
    """

    epsilon: EpsilonIfAny = None
    delta: DeltaIfAny = None
    noise_multiplier: float | None = None
    released: int | None = None


@dataclass(frozen=True, kw_only=True)
class AccountOptions(OutputOptions, RunOptions, QuestionOptions):
    """Find σ, ε or δ: give two of --noise-multiplier, --epsilon and --delta, and the third is the answer.

    Of ε and δ it is the smallest σ that keeps the whole run within them; of σ and δ an upper bound on ε, and of σ and ε one on δ,
    for the whole run or the rounds released so far. With --explain, why that holds and what each assumption demands.

    Example: fedcgd account --mechanism lambda-cgd:0.9 --rounds 3900 --separation 390 --epsilon 8 --delta 1e-5

    Options:
        rounds: Number of releases n.
        explain: Also print the chain of reasoning behind ε, in words and numbers.
        clip_norm: With --explain: ζ, the L2 bound on a user's update of a round.
    """

    rounds: int
    explain: bool = False
    clip_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class CompareOptions(OutputOptions, FitOptions, BudgetOptions):
    """Compare mechanisms at one budget: σ, sensitivity and errors, best RMSE first; with --curvature, least loss first.

    A mechanism that the sampling does not cover is listed with the reason. Numbers that are left out are chosen for the budget;
    λ suits the last model, so another λ may have less RMSE.

    With --curvature, what can be fitted to it is shown without that too. Loss: what the noise adds after all rounds. Gradient
    norm: what it adds to the mean of the squared norm over all rounds. Both per (clip norm / cohort)².

    Example: fedcgd compare --mechanism dp-sgd --mechanism bisr:16 --rounds 3900 --separation 390 --epsilon 8 --delta 1e-5

    Options:
        rounds: Number of releases n.
        mechanism: NAME, NAME:VALUE, …, all also with :normalized behind it; repeat it. Default: the rows of Table 4, or with
            --curvature one or two of each kind.
        plot: Write a picture of the bars next to the table too: .png, .svg or .pdf.
    """

    rounds: int
    mechanism: Annotated[list[str] | None, Option(shell_complete=completed_mechanisms)] = None
    plot: Path | None = None


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Whose curvature.

    Options:
        source: A function without arguments that returns a fedcgd.curvature.public.Public: your model, its loss and public
            examples. The module is looked for in this folder too.
        task: In place of a function: a task of the repository's simulations.
        spectrum: In place of a function: what an earlier call wrote; nothing is measured.
        model: With --task: one of its models.
        public: With --task: `held-out`, its validation images, or another task's, made to fit.
        examples: With --task: how many public examples.
    """

    source: Annotated[str | None, Argument(metavar="[MODULE:FUNCTION]")] = None
    task: str | None = None
    spectrum: Path | None = None
    model: str | None = None
    public: str = "held-out"
    examples: Annotated[int, Option(min=1)] = 1000


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """How the spectrum is measured.

    Options:
        eigenvalues: How many of the largest to compute; the others are estimated from above.
        pretraining_epochs: Of training on random labels before; 0 for the model as it is.
        pretraining_rate: Learning rate of that training.
        clip_norm: ζ of the private training: examples that will be clipped count less.
        seed: Of the random labels and vectors.
    """

    eigenvalues: Annotated[int, Option(min=2)] = 100
    pretraining_epochs: Annotated[int, Option(min=0)] = 20
    pretraining_rate: float = 0.1
    clip_norm: float | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class CurveOptions(OutputOptions, WhenOptions, MeasuringOptions, SourceOptions):
    """Measure the curvature of a model's loss on public examples, and fit noise to it.

    The labels are random, and the model learns them first: that makes it unsure, and its loss as curved as it will be. Nothing
    private is looked at, so it costs no ε; see to it that the examples are public.

    Example: fedcgd curve --task digits --model tanh-cnn --clip-norm 1 --eigenvalues 20 -o spectrum.json --mechanism noise-curve:8
    --rounds 100 --separation 20 --learning-rate 0.5 --mechanism-file noise.json

    Options:
        output: Write the spectrum to this JSON file.
        mechanism: Then fit this noise to the spectrum: noise-curve:p, lambda-cgd, band-inv-mf:p, blt:d, …
        rounds: With --mechanism: the number of releases n.
        learning_rate: With --mechanism: η, what a mean of clipped updates is multiplied by.
        mechanism_file: With --mechanism: write it to this JSON file, which is then spelled file:PATH.
    """

    output: Annotated[Path | None, Option("--output", "-o")] = None
    mechanism: Annotated[str | None, Option(shell_complete=completed_mechanisms)] = None
    rounds: int | None = None
    learning_rate: float | None = None
    mechanism_file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class AuditOptions(OutputOptions, RunOptions, BudgetOptions):
    """Try to refute (ε, δ): of this installation's noise, or with --scores of a federated run. Exit code 1 if refuted.

    The noise is added by the very code that a run uses, to worst-case users and to none, and their releases are told apart.
    Under a secret sampling the noise is audited against the ε that the same σ gives to an adversary who knows the rounds. Under
    b-min-sep users whose rounds are drawn as a run draws them are told apart too, against ε itself.

    Example: fedcgd audit --mechanism lambda-cgd:0.9 --rounds 100 --separation 20 --epsilon 2 --delta 1e-5

    Options:
        rounds: Number of releases n; leave out with --scores.
        noise_multiplier: σ that is said to give ε. Default: the calibrated one.
        scores: JSON file of a federated run's canaries: {"included": [score, …], "held_out": [score, …]}.
        trials: Simulated canaries; 40000 tell σ from 0.9σ.
        confidence: How sure a refutation is.
        seed: Of the simulated noise and canaries; the result is repeatable.
        path: Whose releases: those of a Flower server, or of the Opacus engine.
    """

    rounds: int | None = None
    noise_multiplier: float | None = None
    scores: Path | None = None
    trials: int = 40_000
    confidence: float = 0.99
    seed: Annotated[int, Option(min=0)] = 0
    path: Literal["server", "opacus"] = "server"


@dataclass(frozen=True, kw_only=True)
class LedgerOptions(OutputOptions):
    """A ledger.

    Options:
        path: The ledger file.
    """

    path: File


@dataclass(frozen=True, kw_only=True)
class RegisterOptions:
    """What a ledger is compared with.

    Options:
        register: The register of the key's runs (noise.key.runs). Default: one next to the ledger that knows the run.
    """

    register: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ReportOptions(LedgerOptions, RegisterOptions):
    """Write what a run promises, and why: a page for a reviewer, or the privacy statement that goes with its model.

    All of it comes from the ledger, which is compared with the register of its key. Exit code 1 if the records contradict each
    other. The HTML page has counts of users and rounds, which are not differentially private; the statement counts nobody.

    Example: fedcgd report run.db -o report.html

    Options:
        output: report.html: the page for a reviewer. statement.md or .json: the privacy statement.
        operator: who runs this; the ledger keeps it, and the report's first page shows it.
        purpose: what the model is for.
        data: which data it is trained on.
        people: how many people these data are of.
    """

    output: Annotated[Path, Option("--output", "-o")]
    operator: str | None = None
    purpose: str | None = None
    data: str | None = None
    people: str | None = None


@dataclass(frozen=True, kw_only=True)
class ShowOptions(LedgerOptions):
    """Print where a run stands: rounds, attempts, ε so far; with --json all records, without user ids and models.

    Cohort sizes are in the records: they are not differentially private.

    Example: fedcgd ledger show run.db
    """


@dataclass(frozen=True, kw_only=True)
class WatchOptions(LedgerOptions):
    """Show where a run stands while it goes on: rounds, ε, the latest rounds and measurements, and the time that is left.

    It only reads the ledger, and ends when the run is over. Sizes of cohorts are left out where who takes part is secret; times
    and other counts are not differentially private. With --json one state is printed.

    Example: fedcgd watch run.db --html progress.html

    Options:
        every: Seconds between two looks.
        once: Print one state, and end.
        html: Also write a page here that a browser loads again by itself.
    """

    every: float = 2.0
    once: bool = False
    html: Path | None = None


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(LedgerOptions, RegisterOptions):
    """Derive ε again from the records alone; exit code 1 if they contradict each other, the plan or the register of the key.

    Without the register an older copy of the ledger looks like a shorter run. What a careful forger can do all the same, the
    page for reviewers says.

    Example: fedcgd ledger verify run.db && echo sound
    """


@dataclass(frozen=True, kw_only=True)
class ComposeOptions(OutputOptions, RegisterOptions):
    """Print what several runs cost together each user who was in them; users are the same if their ids are.

    Anyone who was asked in a run is given that run's whole bound; under a secret sampling everybody is counted as in the run.
    The private evaluations of a run count with it: their ledger is looked for next to the run's.
    An older copy of a ledger changes nothing. Copies of one run that went on in two places are both counted, and reported.
    Every run counts against every joint budget that one of them was begun with, named there or not.
    Exit code 1 if a ledger contradicts itself or the register of its key, or if a joint budget is exceeded.

    Example: fedcgd ledger compose A.db B.db

    Options:
        paths: The ledgers of runs over the same people.
        delta: δ of all runs together. Default: that of their plans.
        user: Only this user.
    """

    paths: Annotated[list[Path], Argument()]
    delta: float | None = None
    user: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelFileOptions(LedgerOptions):
    """Write the last released model, before or after the run is sealed, by name: the arrays that the run trained, and no others.

    Counters, frozen layers and statistics that stayed as they were are in the model that the run began with.

    Example: fedcgd ledger model run.db model.npz

    Options:
        target: Where to: a file .npz.
    """

    target: File


@dataclass(frozen=True, kw_only=True)
class SealOptions(LedgerOptions):
    """End a run for good and delete its key, so that nobody can remove the noise from what was released.

    Example: fedcgd ledger seal run.db --key-file noise.key

    Options:
        key_file: The run's key file, which is deleted.
    """

    key_file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class KeeperOptions(OutputOptions):
    """A keeper.

    Options:
        key: The keeper's key file. Its record lies next to it.
    """

    key: File


@dataclass(frozen=True, kw_only=True)
class NewKeeperOptions(KeeperOptions):
    """Make a keeper's key, readable by you alone, and print its card: the lines that go into everybody's keepers.toml.

    Example: fedcgd keeper new keeper.key --name court >> keepers.toml

    Options:
        name: What the others call this keeper: letters, digits, dots, dashes.
        address: HOST:PORT, if it will run as a service (fedcgd keeper serve).
    """

    name: str
    address: str = ""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Answer as a keeper until it is stopped, at the port of its address: a process of its own, without Flower.

    Example: fedcgd keeper serve keeper.key --keepers keepers.toml --certificate tls.crt --private-key tls.key --server server.crt

    Options:
        key: The keeper's key file. Its record lies next to it.
        keepers: The keepers.toml that all parties hold, with this keeper's address.
        certificate: This keeper's certificate for TLS, PEM.
        private_key: The certificate's private key, PEM, readable by you alone.
        server: The certificate of the server that may ask, PEM.
        host: The network address to listen at; all of this machine's by default.
    """

    key: File
    keepers: Path
    certificate: Path
    private_key: Path
    server: Path
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class ShowKeepersOptions(OutputOptions):
    """Show who the keepers in a keepers.toml are, or what the keeper of a key has opened.

    colluding: the plan's ε holds against so many keepers together with the server. away: so many may be missing in a round.
    nodes: a sum of fewer nodes is not opened. noise factor: the noise over that of a trusted server. epsilon, delta: plans of
    more are refused.

    Example: fedcgd keeper show keepers.toml

    Options:
        path: A keeper's key file, or the keepers.toml that all parties hold.
    """

    path: File


@dataclass(frozen=True, kw_only=True)
class VerifyKeepersOptions(OutputOptions):
    """Compare what several keepers opened, with each other and with the run's ledger; exit code 1 if they contradict.

    Example: fedcgd keeper verify court=court.key.record union=union.key.record --ledger run.db

    Options:
        records: NAME=FILE for each keeper: its name and its record (keeper.key.record).
        ledger: The ledger of the run, to compare with as well.
    """

    records: Annotated[list[str], Argument()]
    ledger: Path | None = None


@dataclass(frozen=True, kw_only=True)
class SealKeeperOptions(KeeperOptions):
    """End a keeper's part in a run: delete its key, so that its share of the noise can never be removed, and keep its record.

    Example: fedcgd keeper seal keeper.key
    """


COMMANDS: dict[str, tuple[type, str]] = {
    "plan": (PlanOptions, "fedcgd.cli.plan:plan"),
    "account": (AccountOptions, "fedcgd.cli.account:account"),
    "compare": (CompareOptions, "fedcgd.cli.compare:compare"),
    "curve": (CurveOptions, "fedcgd.cli.curve:curve"),
    "audit": (AuditOptions, "fedcgd.cli.audit:audit"),
    "watch": (WatchOptions, "fedcgd.cli.watch:watch"),
    "report": (ReportOptions, "fedcgd.cli.report_page:report"),
}
LEDGER_COMMANDS: dict[str, tuple[type, str]] = {
    "show": (ShowOptions, "fedcgd.cli.ledger:show"),
    "verify": (VerifyOptions, "fedcgd.cli.ledger:verify"),
    "compose": (ComposeOptions, "fedcgd.cli.ledger:compose"),
    "model": (ModelFileOptions, "fedcgd.cli.ledger:model"),
    "seal": (SealOptions, "fedcgd.cli.ledger:seal"),
}
KEEPER_COMMANDS: dict[str, tuple[type, str]] = {
    "new": (NewKeeperOptions, "fedcgd.cli.keeper:new"),
    "serve": (ServeOptions, "fedcgd.cli.keeper:serve"),
    "show": (ShowKeepersOptions, "fedcgd.cli.keeper:show"),
    "verify": (VerifyKeepersOptions, "fedcgd.cli.keeper:verify"),
    "seal": (SealKeeperOptions, "fedcgd.cli.keeper:seal"),
}
