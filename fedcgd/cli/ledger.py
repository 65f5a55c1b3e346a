"""`fedcgd ledger`: what a run's record says, whether it holds together, and the end of the run."""

from rich.markup import escape
from rich.table import Table

from fedcgd import ledger
from fedcgd.accounting.guarantee import rounded_up
from fedcgd.cli.commands import (
    ComposeOptions,
    ModelFileOptions,
    SealOptions,
    ShowOptions,
    VerifyOptions,
)
from fedcgd.cli.printing import (
    MOST_SHOWN,
    console,
    key_value_table,
    note,
    print_json,
    printed,
    status,
)
from fedcgd.cli.usage import Exit, complaints
from fedcgd.ledger.registry import register_beside
from fedcgd.ledger.statement import NO_GUARANTEE, described, facts, records
from fedcgd.ledger.texts import finding
from fedcgd.support.files import check_private
from fedcgd.support.numbers import plural
from fedcgd.support.untrusted import clean


def show(asked: ShowOptions) -> None:
    """Print where a run stands: rounds, attempts, ε so far; with --json all records, without user ids and models."""
    if asked.json:
        print_json(ledger.export(asked.path))
        return
    with status(quiet=False):
        record, verification = records(asked.path), ledger.verify(asked.path)
    run = record["run"]
    rows = [
        ("created", str(run["created"])),
        *facts(described(run, verification)),
        ("key", f"fingerprint {run['key_fingerprint']}"),
        *(("note", text) for text in verification.notes),
        *(("problem", text) for text in verification.problems),
        ("attempts not released", str(sum(a["state"] != "released" for a in record["attempts"]))),
        ("rounds skipped", str(len(record["skips"]))),
    ]
    console.print(key_value_table(str(asked.path), rows))
    table = Table(title="users by number of participations")
    table.add_column("participations", justify="right")
    table.add_column("users", justify="right")
    for participations, users in record["users_by_participations"].items():
        table.add_row(str(participations), str(users))
    console.print(table)


def verify(asked: VerifyOptions) -> int:
    """Derive ε again from the records alone; exit code 1 if they contradict each other, the plan or the register of the key."""
    with status(asked.json):
        register = asked.register or register_beside(asked.path)
        run, verification = records(asked.path)["run"], ledger.verify(asked.path, register=register)
    try:
        check_private(asked.path, "the ledger, which says who took part when,")
    except ValueError as error:  # it may be a copy that was given to a reviewer
        complaints.print(f"[bold yellow]Note:[/bold yellow] {escape(str(error))}", soft_wrap=True, highlight=False)
    if asked.json:
        print_json(verification.to_description())
    else:
        for name, value in facts(described(run, verification)):
            console.print(f"{name}: {escape(clean(value, MOST_SHOWN))}", soft_wrap=True)
        unknown = finding("no-register") if register is None else None
        for told in filter(None, (*verification.notes, verification.delta_note, unknown)):
            note("Note", told, "yellow")
        if register is not None:
            console.print(f"compared with the register {register}", soft_wrap=True, markup=False)
        for problem in verification.problems:
            note("Problem", problem)
        releases = plural(verification.released, "release", "releases")
        sound = f"{releases}, and no contradiction in the records"
        console.print(NO_GUARANTEE if verification.problems else sound, soft_wrap=True)
    return Exit.CONTRADICTED if verification.problems else 0


def compose(asked: ComposeOptions) -> int:
    """Print what several runs cost together each user who was in them; users are the same if their ids are."""
    with status(asked.json):
        found = ledger.joint(asked.paths, delta=asked.delta, user=asked.user, register=asked.register)
    if asked.json:
        print_json(found.to_description())
    else:
        for group in found.groups:
            console.print(
                f"[bold]{plural(group.users, 'user', 'users')}[/bold] in {', '.join(map(escape, group.ledgers))}",
                soft_wrap=True,
            )
            console.print(f"  all rounds that are planned: {group.planned}", soft_wrap=True)
            console.print(f"  released so far: {group.released}", soft_wrap=True)
        worst = found.worst
        console.print(
            f"worst: ε ≤ {rounded_up(worst.planned.epsilon)} at δ = {rounded_up(worst.planned.delta, 6)} for "
            f"{plural(worst.users, 'user', 'users')}; samplings: {', '.join(found.samplings)}"
            + (" — SIMULATION: nothing here is private" * found.simulated),
            soft_wrap=True,
        )
        for text in found.notes:
            note("Note", text, "yellow")
        for problem in found.problems:
            note("Problem", problem)
    return Exit.CONTRADICTED if found.problems else 0


def model(asked: ModelFileOptions) -> None:
    """Write the last released model by name: the arrays that the run trained, and no others."""
    count = ledger.save_model(asked.path, asked.target)
    printed(
        asked.json,
        {"arrays": count, "target": str(asked.target)},
        f"{plural(count, 'trained array is', 'trained arrays are')} in {asked.target}. Arrays that were not trained (counters, "
        "frozen layers, fixed statistics) are not in a ledger: take them from the model that the run began with",
    )


def seal(asked: SealOptions) -> None:
    """End a run for good and delete its key, so that nobody can remove the noise from what was released."""
    ledger.seal(asked.path, asked.key_file)
    printed(
        asked.json,
        {"sealed": str(asked.path), "deleted": asked.key_file and str(asked.key_file)},
        f"{asked.path} is sealed"
        + (f", {asked.key_file} is deleted" if asked.key_file else "; delete its key where you keep it")
        + ". Where a SuperLink was deployed, delete its database and journal too when it has stopped (state.db, state.db-wal, "
        "state.db-shm): they hold what nodes sent, without noise",
    )
