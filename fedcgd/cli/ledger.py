"""`fedcgd ledger`: what a run's record says, whether it holds together, and the end of the run."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedcgd import ledger
from fedcgd.accounting.guarantee import NO_NOISE, rounded_up
from fedcgd.cli.options import JsonOption
from fedcgd.cli.printing import (
    EXIT_PROBLEMS,
    MOST_SHOWN,
    console,
    key_value_table,
    note,
    print_json,
    status,
)
from fedcgd.cli.usage import CarefulCommand, CarefulGroup, complaints
from fedcgd.files import check_private
from fedcgd.ledger.client_metrics import NOT_COVERED
from fedcgd.ledger.export import records
from fedcgd.ledger.registry import register_beside
from fedcgd.ledger.verification import NO_REGISTER
from fedcgd.noise.keys import NoiseKey
from fedcgd.numeric import so_many
from fedcgd.untrusted import clean

app = typer.Typer(
    cls=CarefulGroup,
    help="Look at the durable record of a run, check it, and end it.",
    no_args_is_help=True,
    add_completion=False,
)
command = partial(app.command, cls=CarefulCommand)

LedgerArgument = Annotated[Path, typer.Argument(help="The ledger file.")]
RegisterOption = Annotated[
    Path | None,
    typer.Option(
        help="The register of the key's runs (noise.key.runs). Default: one beside the ledger that knows the run."
    ),
]


@command()
def show(path: LedgerArgument, json: JsonOption = False) -> None:
    """Say where a run stands: rounds, attempts, ε so far.

    Example: fedcgd ledger show run.db
    """
    with status(json):
        record, verification = records(path), ledger.verify(path)
    if json:
        print_json({"run": record["run"], "verification": verification.to_description()})
        return
    run = record["run"]
    rows = [
        ("created", str(run["created"])),
        ("released", f"{verification.released} of {so_many(verification.planned, 'round', 'rounds')}"),
        *_promised(verification),
        ("mechanism", str(run["plan"]["mechanism"]["name"])),
        *([("not covered by ε", NOT_COVERED)] if verification.forwards_client_metrics else []),
        ("key", f"fingerprint {run['key_fingerprint']}"),
        ("sealed", str(run["sealed"] or "no")),
        *(("adopted", text) for text in verification.adopted),
        ("attempts not released", str(sum(a["state"] != "released" for a in record["attempts"]))),
        ("rounds skipped", str(len(record["skips"]))),
    ]
    console.print(key_value_table(str(path), rows))
    table = Table(title="users by number of participations")
    table.add_column("participations", justify="right")
    table.add_column("users", justify="right")
    for participations, users in record["users_by_participations"].items():
        table.add_row(str(participations), str(users))
    console.print(table)


@command()
def verify(
    path: LedgerArgument,
    register: RegisterOption = None,
    json: JsonOption = False,
) -> None:
    """Derive ε again from the records alone; exit code 1 if they contradict each other, the plan or the register of the key.

    Without the register an older copy of the ledger looks like a shorter run. What a careful forger can do all the same, the
    page for reviewers says.

    Example: fedcgd ledger verify run.db && echo sound
    """
    with status(json):
        register = register or register_beside(path)
        verification = ledger.verify(path, register=register)
    try:
        check_private(path, "the ledger, which says who took part when,")
    except ValueError as error:  # it may be a copy that was given to a reviewer
        complaints.print(f"[bold yellow]Note:[/bold yellow] {escape(str(error))}", soft_wrap=True, highlight=False)
    if json:
        print_json(verification.to_description())
    else:
        for name, value in _promised(verification):
            console.print(f"{name}: {escape(clean(value, MOST_SHOWN))}", soft_wrap=True)
        if verification.forwards_client_metrics:
            note("Not private", NOT_COVERED)
        for text in verification.adopted:
            note("Adopted", text, "yellow")
        for text in (*verification.notes, *filter(None, [verification.delta_note])):
            note("Note", text, "yellow")
        if register is None:
            note("Note", NO_REGISTER, "yellow")
        else:
            console.print(f"compared with the register {register}", soft_wrap=True, markup=False)
        for problem in verification.problems:
            note("Problem", problem)
        if not verification.problems:
            releases = so_many(verification.released, "release", "releases")
            console.print(f"{releases}, and no contradiction in the records")
    if verification.problems:
        raise typer.Exit(EXIT_PROBLEMS)


@command()
def export(path: LedgerArgument) -> None:
    """Print all records as JSON, without user ids and models. Cohort sizes are in it: they are not differentially private.

    Example: fedcgd ledger export run.db > run.json
    """
    print_json(ledger.export(path))


@command()
def compose(
    paths: Annotated[list[Path], typer.Argument(help="The ledgers of runs over the same people.")],
    delta: Annotated[float | None, typer.Option(help="δ of all runs together. Default: that of their plans.")] = None,
    user: Annotated[str | None, typer.Option(help="Only this user.")] = None,
    register: RegisterOption = None,
    json: JsonOption = False,
) -> None:
    """Say what several runs cost together each user who was in them; users are the same if their ids are.

    Whoever was asked in a run is given that run's whole bound; under a secret sampling everybody is counted as in the run.
    The private evaluations of a run count with it: their ledger is looked for beside the run's.
    An older copy of a ledger changes nothing. Copies of one run that went on in two places are both counted, and said.
    Every run counts against every joint budget that one of them was begun with, named there or not.
    Exit code 1 if a ledger contradicts itself or the register of its key, or if a joint budget is exceeded.

    Example: fedcgd ledger compose A.db B.db
    """
    with status(json):
        found = ledger.joint(paths, delta=delta, user=user, register=register)
    if json:
        print_json(found.to_description())
    else:
        for group in found.groups:
            console.print(
                f"[bold]{so_many(group.users, 'user', 'users')}[/bold] in {', '.join(map(escape, group.ledgers))}",
                soft_wrap=True,
            )
            console.print(f"  all rounds that are planned: {group.planned}", soft_wrap=True)
            console.print(f"  released so far: {group.released}", soft_wrap=True)
        worst = found.worst
        console.print(
            f"worst: ε ≤ {rounded_up(worst.planned.epsilon)} at δ = {rounded_up(worst.planned.delta, 6)} for "
            f"{so_many(worst.users, 'user', 'users')}; samplings: {', '.join(found.samplings)}"
            + (" — SIMULATION: nothing here is private" * found.simulated),
            soft_wrap=True,
        )
        for copy in found.copies:
            note("Copied", copy, "yellow")
        for text in found.notes:
            note("Note", text, "yellow")
        for problem in found.problems:
            note("Problem", problem)
    if found.problems:
        raise typer.Exit(EXIT_PROBLEMS)


@command()
def model(
    path: LedgerArgument,
    target: Annotated[Path, typer.Argument(help="Where to: .npz or .safetensors.")],
    carried: Annotated[
        Path | None, typer.Option(help="The model that the run began with, for its arrays that were not trained.")
    ] = None,
) -> None:
    """Write the last released model, before or after the run is sealed, by name: the arrays that the run trained, and no others.

    Counters, frozen layers and statistics that stayed as they were are not in the ledger. With --carried they come from the file
    (.npz or .safetensors) of the model that the run began with, and the whole model is written.

    Example: fedcgd ledger model run.db model.npz --carried initial.npz
    """
    count = ledger.save_model(path, target, carried=carried)
    console.print(
        f"{so_many(count, 'array is', 'arrays are')} in {target}, those that were not trained as they are in {carried}"
        if carried
        else f"{so_many(count, 'trained array is', 'trained arrays are')} in {target}. Arrays that were not trained (counters, "
        "frozen layers, fixed statistics) are not in a ledger; --carried takes them from the model that the run began with",
        soft_wrap=True,
    )


@command()
def adopt(
    path: LedgerArgument,
    key_file: Annotated[Path, typer.Option(help="The run's key file; its register lies beside it.")],
    runs: Annotated[Path | None, typer.Option(help="The register, if it is not beside the key file.")] = None,
) -> None:
    """Declare a ledger the latest of its run, where the register of its key's runs (noise.key.runs) is lost.

    Nothing else can tell whether another copy of the run went on: if one did, ε was spent twice. The declaration is recorded in
    the ledger, and verify and the report say so. If the register is only elsewhere, put it back instead.

    Example: fedcgd ledger adopt run.db --key-file noise.key
    """
    released = ledger.adopt(path, NoiseKey.from_file(key_file, runs=runs))
    console.print(
        f"{path} is adopted after {so_many(released, 'released round', 'released rounds')}, and goes on with {key_file}",
        soft_wrap=True,
    )


@command()
def seal(
    path: LedgerArgument,
    key_file: Annotated[Path | None, typer.Option(help="The run's key file, which is deleted.")] = None,
) -> None:
    """End a run for good and delete its key, so that nobody can remove the noise from what was released.

    Example: fedcgd ledger seal run.db --key-file noise.key
    """
    ledger.seal(path, key_file)
    console.print(
        f"{path} is sealed"
        + (f", {key_file} is deleted" if key_file else "; delete its key where you keep it")
        + ". Where a SuperLink was deployed, delete its database and journal too when it has stopped (state.db, state.db-wal, "
        "state.db-shm): they hold what nodes sent, without noise",
        soft_wrap=True,
    )


def _promised(verification: ledger.Verification) -> list[tuple[str, str]]:
    """What the record promises: name and value of each part."""
    whole, budget = str(verification.whole), verification.budget
    if verification.noiseless:
        whole += f" — {NO_NOISE}"
    if verification.simulated:
        whole += " — SIMULATION: the key comes from a seed, and nothing here is private"
    found = [
        ("whole run, as planned", whole),
        ("with its evaluations on users' data", verification.with_evaluations),
        ("released so far", verification.guarantee or "nothing is released"),
        ("keepers", verification.keepers),
        ("who a user is", verification.identity),
    ]
    if budget is not None:
        streams = f" (streams {', '.join(budget['after'])})" if budget["after"] else ""
        earlier = f"{so_many(len(budget['after']), 'earlier run', 'earlier runs')}{streams}"
        said = f"ε ≤ {budget['epsilon']:g} at δ = {budget['delta']:g} for each user, together with {earlier}"
        found.append(("joint budget", f"{said}; fedcgd ledger compose with their ledgers checks it"))
    return [(name, str(value)) for name, value in found if value is not None]
