"""What a run's record holds and promises: as values for programs, and in words for the statement, the report and the commands."""

import re
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedcgd.accounting import Guarantee
from fedcgd.accounting.accountant import Progress, silent
from fedcgd.accounting.attacker import AttackerAccuracy, attacker_accuracy
from fedcgd.accounting.explain import explain
from fedcgd.accounting.guarantee import NO_NOISE, large_delta, rounded_up
from fedcgd.ledger.store import BUDGET, EVALUATION_OF, reader, stored_run, unpack_ids
from fedcgd.ledger.texts import finding, refuse
from fedcgd.ledger.verification import RecordedKeepers, Verification, verify
from fedcgd.participation import Participation
from fedcgd.plan import Plan
from fedcgd.support.numbers import plural
from fedcgd.support.untrusted import clean, parse_json


def export(path: Path | str) -> dict[str, Any]:
    """The records of a run without user ids and models. Cohort sizes, and metrics of nodes, are not differentially private.

    Args:
        path: the ledger.

    Returns:
        JSON-able values: under `run` its settings, under `verification` what `verify` says, under `attempts` every attempt with
        the size of its cohort, in order, under `train_metrics` what was told with each model, under `measured` what was measured
        of it afterwards, of which `kind`, under `skips` why rounds were not released, and under `users_by_participations` how
        many users took part how often.

    Raises:
        ValueError: if there is no ledger.
    """
    found = records(path)
    return {"run": found.pop("run"), "verification": verify(path).to_description(), **found}


def records(path: Path | str) -> dict[str, Any]:
    """As `export`, but for `verification`. ValueError if there is no ledger."""
    with reader(path) as connection:
        stored = stored_run(connection)
        run = {**vars(stored.defined), **vars(stored)}
        del run["defined"]
        (users,) = connection.execute("SELECT count(*) FROM users").fetchone()
        run |= {"plan": stored.planned, "configuration": stored.settings, "simulated": bool(stored.defined.simulated)}
        columns = "round, attempt, state, users, planned, aggregated, ended"
        attempts = [
            {**row, "users": len(unpack_ids(row["users"], users))}
            for row in _rows(connection, f"SELECT {columns} FROM attempts ORDER BY id")  # noqa: S608
        ]
        skips = _rows(connection, "SELECT round, at, reason FROM skips ORDER BY id")
        histogram = connection.execute("SELECT participations, count(*) FROM users GROUP BY participations ORDER BY 1")
        metrics = connection.execute("SELECT kind, release, data FROM metrics ORDER BY kind, release")
        told = [
            (clean(kind), {"release": release} | parse_json(data, dict, "a metric on record"))
            for kind, release, data in metrics
        ]
        return {
            "run": run,
            "attempts": attempts,
            "train_metrics": [values for kind, values in told if kind == "train"],
            "measured": [{"kind": kind} | values for kind, values in told if kind != "train"],
            "skips": skips,
            "users_by_participations": dict(histogram),
        }


def _rows(connection: sqlite3.Connection, query: str) -> list[dict[str, Any]]:
    """What `query` finds, by the names of its columns; texts may be anybody's."""
    found = connection.execute(query)
    names = [column[0] for column in found.description]
    return [
        {name: clean(value) if isinstance(value, str) else value for name, value in zip(names, row, strict=True)}
        for row in found
    ]


def privacy_statement(
    path: Path | str, *, register: Path | str | None = None, progress: Progress = silent
) -> dict[str, Any]:
    """What the run recorded at `path` promises to each of its users, as JSON-able values; ValueError if there is no ledger.

    `attacker` says how often the best attacker is right about one user (None where nothing is promised). `whole_run` is the
    guarantee for all planned rounds, `with_evaluations` for those and all private evaluations of the run (None
    if it has none), `so_far` for the rounds released: it holds under its `condition` only.
    `notes` say what contradicts nothing and has to be known: noised sums that were no release, a δ that is large for the users.
    `sound` says whether the records agree with each other and with the plan, `private` whether that holds and the noise has a
    secret key. Nothing in it depends on who the users are or how many took part, so it may be published with the model.
    `register` is as in `verify`. ValueError also for the ledger of a run's evaluations.
    """
    verification, run = verify(path, register=register), records(path)["run"]
    if EVALUATION_OF in run["configuration"]:
        raise refuse("evaluations-only", path=path)
    found, plan = described(run, verification), Plan.from_description(run["plan"])
    attacker = None  # where nothing is promised
    if not (plan.noiseless or verification.run.simulated or verification.problems):
        attacker = attacker_accuracy(plan.accountant, noise_multiplier=plan.noise_multiplier, progress=progress)
    # As planned: how many users there were is not for the public.
    large = large_delta(plan.delta, verification.run.least_users)
    promise = sentence(verification, attacker)
    if attacker is not None and verification.keepers is not None:
        promise += f" {_promise_of_keepers(verification.keepers)}"
    verdict = [promise] if attacker is None else _verdict(attacker, verification, run["sealed"], plan)
    return found | {
        "statement": in_unit(promise, found["unit"]),
        "private": attacker is not None,
        "notes": [*verification.notes, *filter(None, [large]), *[finding("no-register")] * (register is None)],
        "attacker": attacker and asdict(attacker) | {"percent": attacker.percent},
        "reasoning": _reasoning(plan, found["adaptive_clipping"], found["unit"]),
        "verdict": [in_unit(text, found["unit"]) for text in verdict],
        "size": size_of((verification.with_evaluations or verification.whole).epsilon),
        "begun": run["created"],
        "configuration_hash": run["configuration_hash"],
        "written_with": version("fedcgd"),
    }


def described(run: Mapping[str, Any], verification: Verification) -> dict[str, Any]:
    """What `facts` says of a ledger's `run`, as `export` has it, and of what `verify` says of it."""
    told = verification.to_description()
    return {
        **outlined(run, verification.whole, verification.guarantee, verification.released),
        **{name: told[name] for name in ("keepers", "with_evaluations", "problems")},
        "sound": not verification.problems,
    }


def outlined(run: Mapping[str, Any], whole: Guarantee, so_far: Guarantee | None, released: int) -> dict[str, Any]:
    """What `facts` says of a run without verifying its records."""
    settings = run["configuration"]
    budget = settings.get(BUDGET)
    return {
        "unit": "example" if settings.get("kind") == "central" else "user",
        "simulated": run["simulated"],
        "noiseless": not whole.noise_multiplier,
        "rounds_planned": whole.rounds,
        "rounds_released": released,
        "whole_run": whole.to_description(),
        "so_far": so_far and so_far.to_description(),
        "plan": run["plan"],
        "adaptive_clipping": settings.get("adaptive_clipping"),
        "identity": IDENTITIES.get(str(settings.get("identity"))),
        "joint_budget": budget
        and {"epsilon": budget["epsilon"], "delta": budget["delta"], "earlier_runs": len(budget["after"])},
        "sealed": run["sealed"],
    }


def in_unit(text: str, unit: str) -> str:
    """A sentence about users as one about what a user is in this run: in central training an "example"."""
    if unit == "user":
        return text
    return re.sub(r"\buser(s?)\b", rf"{unit}\1", re.sub(r"\b([Aa]) user\b", rf"\1n {unit}", text))


def _reasoning(plan: Plan, adaptive: object, unit: str) -> list[dict[str, str]]:
    if plan.noiseless:
        return [{"title": "no noise", "statement": f"{_WITHOUT_NOISE} There is nothing to derive."}]
    steps = explain(
        plan.mechanism,
        plan.participation,
        clip_norm=plan.clip_norm if adaptive is None else 1.0,
        delta=plan.delta,
        noise_multiplier=plan.noise_multiplier,
    )
    found = [("adaptive clipping", _ADAPTIVE)] * (adaptive is not None)
    found += [(step.title, step.statement) for step in steps]
    return [{"title": in_unit(title, unit), "statement": in_unit(text, unit)} for title, text in found]


IDENTITIES = {
    "declared": 'the names that nodes declare (identity "declared"). A registered node keeps the users that it named first; '
    "other nodes and pools of many users are believed. A person with two names counts as two users, each with this ε",
    "authenticated": 'a node that is registered at the SuperLink (identity "authenticated"), by its name there. A person who '
    "registers two keys counts as two users, each with this ε",
}
"""What tells one user of a run from another, by what its configuration says."""

_WITHOUT_NOISE = (
    "This run has NO NOISE: its noise multiplier is 0, which is for debugging. Updates were clipped and summed, and released as "
    "they are: ε = ∞, and nothing about it is private."
)

_ADAPTIVE = (
    "The norm to which updates are clipped follows a quantile of the users' norms, and is computed from earlier releases alone, "
    "which costs nothing more (Denisov et al., 2022, arXiv:2202.08312). What is summed and noised, and called update below, is a "
    "vector of norm at most 1: a user's clipped update divided by that norm, and whether it was within the norm (Andrew et al., "
    "2021, arXiv:1905.03871). The division is undone after the noise."
)


NO_GUARANTEE = "The records of this run contradict each other or the plan: NO guarantee can be given for it."


def sentence(verification: Verification, attacker: AttackerAccuracy | None) -> str:
    """The promise in one or two sentences, or that there is none: then there is no attacker's accuracy either."""
    whole, both = verification.whole, verification.with_evaluations
    if verification.noiseless:
        return _WITHOUT_NOISE
    if verification.run.simulated:
        return (
            "This run is a SIMULATION: its noise comes from a seed that anybody can guess. Nothing about it is private, "
            "whatever is said below."
        )
    if attacker is None:
        return NO_GUARANTEE
    of_both = both and (
        " Metrics of the models on users' data are reported too, as noised sums: the models and all such evaluations that are "
        f"planned, together, are ({rounded_up(both.epsilon)}, {rounded_up(both.delta, 6)})-differentially private."
    )
    return (
        f"All models that this run releases, together, are ({rounded_up(whole.epsilon)}, {rounded_up(whole.delta, 6)})-"
        f"differentially private for every user (adjacency: {whole.adjacency}): anyone without the key who sees all of them, and "
        "knows everything about all other users, is right about whether one user's updates were used, or were replaced by zeros, "
        f"{_how_often(attacker.percent, attacker.gaussian_mu)}.{of_both or ''}"
    )


def _verdict(attacker: AttackerAccuracy, verification: Verification, sealed: object, plan: Plan) -> list[str]:
    """What somebody who sees the models can learn, what that rests on, and what it does not cover."""
    held = "a key that is deleted" if sealed else "a key that nobody else has"
    noise = held if verification.keepers is None else "keepers that follow their protocol"
    secret = f", and on secrecy of who took part when ({plan.participation.sampling} sampling)"
    return [
        "Anyone who sees every released model, and knows all other users' data, can tell whether one user's data were used in at "
        f"most {attacker.percent} % of cases; guessing is right half the time.",
        f"This rests on clipping and noise as recorded, on {noise}{secret * plan.participation.is_secret}.",
        "It does not cover metrics without noise, logs, what nodes send before noise is added, or other runs on the same users.",
    ]


DEPLOYMENTS = (
    ("Google's keyboard, language models in many languages", "about 4 to 14 (ρ-zCDP with ρ from 0.2 to 2)", "10⁻¹⁰", "one person",
     "Xu et al., 2023, arXiv:2305.18465"),
    ("US Census 2020, redistricting data", "19.61", "10⁻¹⁰", "one person", "US Census Bureau, June 2021"),
    ("Apple, emoji suggestions, noise on each device", "4 a day", "0", "one person's day", "Apple, DP Overview"),
)  # fmt: skip
"""What, ε, δ, what is protected, and where it was published."""


def size_of(epsilon: float) -> str:
    """Whether an ε is small, usual or large compared with what is published.

    By the tiers of Ponomareva et al., "How to DP-fy ML", 2023, arXiv:2303.00654.
    """
    if epsilon <= 1:
        return "small (ε ≤ 1: a strong formal guarantee)"
    if epsilon <= 10:
        return "usual (1 < ε ≤ 10: a reasonable guarantee, common in practice)"
    return "large (ε > 10: ε alone promises little; the attacker's chance above is the better figure)"


def _how_often(percent: str, gaussian_mu: float | None) -> str:
    """In words, from an `AttackerAccuracy`."""
    mu = gaussian_mu and rounded_up(gaussian_mu, 4)
    known = f" (all releases together are at most a Gaussian mechanism with μ = {mu})" if mu else ""
    return f"in at most {percent} % of cases{known}, if both were equally likely beforehand; guessing is right half the time"


def statement_markdown(statement: dict[str, Any]) -> str:
    """The statement as a Markdown page."""
    lines = ["# Privacy statement", "", _markdown(statement["statement"]), "", "| what | value |", "|---|---|"]
    lines += [f"| {name} | {_markdown(value)} |" for name, value in facts(statement)]
    for word, said in (("Problem", statement["problems"]), ("Note", statement["notes"])):
        lines += [f"\n**{word}**: {_markdown(text)}." for text in said]
    lines += ["", "## Why, and under which assumptions", ""]
    lines += [
        f"{count}. **{step['title']}**. {_markdown(step['statement'])}"
        for count, step in enumerate(statement["reasoning"], 1)
    ]
    return "\n".join([*lines, "", f"Derived from the run's ledger alone, with fedcgd {statement['written_with']}.", ""])


def _markdown(text: str) -> str:
    """A text that may be somebody else's, so that nothing in it is taken for HTML, a link, a picture, code or a cell's end."""
    return re.sub(r"([\\`\[|])", r"\\\1", escape(clean(text, 10_000), quote=False))


def facts(statement: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures that belong to the claim, each with its name, in the order in which a reviewer asks for them.

    Args:
        statement: a `privacy_statement`, or what `described` or `outlined` returns.
    """
    whole, plan, both = statement["whole_run"], statement["plan"], statement.get("with_evaluations")
    budget, attacker = statement["joint_budget"], statement.get("attacker")
    sealed = "no: the key may still exist, and removes the noise"
    clipped = ", then a quantile of norms" * bool(statement["adaptive_clipping"])
    risk = f"{whole['failure_probability']:g}, part of δ" if whole["failure_probability"] else "0"
    warning = f"; {NO_NOISE}" * statement["noiseless"] or (
        "; SIMULATION: the key comes from a seed, and nothing here is private" * statement["simulated"]
    )
    numbers = (f", {name} {value:g}" for name, value in plan["mechanism"].items() if type(value) in (int, float))
    found = {
        "ε of the whole run": _bound(whole["epsilon"]) + warning,
        "δ": rounded_up(whole["delta"], 6),
        "ε with its evaluations": both and f"{_bound(both['epsilon'])} ({both['method']})",
        "ε so far": _so_far(whole, statement["so_far"]),
        "the best attacker is right": attacker and _how_often(attacker["percent"], attacker["gaussian_mu"]),
        "adjacency": whole["adjacency"],
        "sampling": whole["sampling"],
        "method": f"{whole['method']} ({'exact' if whole['exact'] else 'an upper bound'})",
        "failure probability of the method": risk,
        "rounds released": f"{statement['rounds_released']} of {statement['rounds_planned']}",
        "sealed": f"on {statement['sealed']}" if statement["sealed"] else sealed,
        "participation": str(Participation(**plan["participation"])),
        "who a user is": statement["identity"],
        "mechanism": "".join([plan["mechanism"]["name"], *numbers]),
        "clip norm ζ": f"{plan['clip_norm']:g}{clipped}",
        "noise multiplier σ": rounded_up(plan["noise_multiplier"], 6),
        "joint budget of each user": budget
        and f"ε ≤ {rounded_up(budget['epsilon'])} at δ = {rounded_up(budget['delta'], 6)}, with "
        f"{plural(budget['earlier_runs'], 'earlier run', 'earlier runs')} (users with too little left were not asked)",
        "sensitivity of C": None if whole["sensitivity"] is None else f"{whole['sensitivity']:.6g}",
        **_keeper_facts(statement.get("keepers")),
    }
    unit = statement["unit"]
    return [(in_unit(name, unit), in_unit(value, unit)) for name, value in found.items() if value is not None]


def _bound(epsilon: float | None) -> str:
    return "∞" if epsilon is None or epsilon == float("inf") else f"at most {rounded_up(epsilon)}"


def _so_far(whole: Mapping[str, Any], so_far: Mapping[str, Any] | None) -> str:
    if so_far is None:
        return "nothing is released"
    epsilon = _bound(so_far["epsilon"])
    if so_far["condition"] is None or whole["condition"] is not None:
        return epsilon
    return f"{epsilon}, {so_far['condition']}; otherwise ε is that of the whole run"


def _promise_of_keepers(keepers: RecordedKeepers) -> str:
    """Against whom the same holds where keepers made the noise."""
    epsilons = keepers.with_evaluations or tuple(found.epsilon for found in keepers.planned)
    beyond = range(keepers.colluding + 1, len(keepers.names))
    what = "ε of models and evaluations together" if keepers.with_evaluations else "ε"
    more = "".join(f"with {number} of them {what} is at most {rounded_up(epsilons[number])}, " for number in beyond)
    return (
        f"The noise was made by {len(keepers.names)} keepers ({', '.join(keepers.names)}), and the server saw noised sums only: "
        f"the same holds against the server's operator, together with any {keepers.colluding} of the keepers and all nodes but "
        f"the user's own, as far as they follow the protocol; {more}with all of them nothing is promised. It does not hold "
        "against an operator who changed the code that nodes or keepers ran."
    )


def _keeper_facts(keepers: Mapping[str, Any] | None) -> dict[str, str]:
    """Name and value of each figure of a run's keepers; none for a run without."""
    if keepers is None:
        return {}
    found = {"keepers": f"{', '.join(keepers['names'])} (keepers.toml {keepers['digest'][:16]})"}
    planned = [one["epsilon"] for one in keepers["planned"]]
    for what, epsilons in (("ε", planned), ("ε with its evaluations", keepers["with_evaluations"])):
        for number, epsilon in enumerate(epsilons):
            found[f"{what} against the server with {plural(number, 'keeper', 'keepers')}"] = _bound(epsilon)
    if keepers["spent"]:
        found["rounds consumed without a model"] = str(keepers["spent"])
    return found
