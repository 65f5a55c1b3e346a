"""What a run's record promises, in a form to ship with its model: the privacy statement, as values and as Markdown."""

import platform
import re
from contextlib import suppress
from dataclasses import asdict
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedcgd.accounting import Guarantee, JointGuarantee
from fedcgd.accounting.accountant import Progress, silent
from fedcgd.accounting.attacker import AttackerAccuracy, attacker_accuracy
from fedcgd.accounting.explain import explain
from fedcgd.accounting.guarantee import large_delta, rounded_up
from fedcgd.ledger.client_metrics import NOT_COVERED
from fedcgd.ledger.evaluations import EVALUATION_OF
from fedcgd.ledger.export import records
from fedcgd.ledger.recorded_keepers import keeper_facts
from fedcgd.ledger.verification import NO_REGISTER, Verification, verify
from fedcgd.participation import Participation
from fedcgd.plan import Plan
from fedcgd.support.numbers import plural
from fedcgd.support.untrusted import clean

LIBRARIES = ("fedcgd", "numpy", "scipy", "torch", "cryptography")


def privacy_statement(
    path: Path | str, *, register: Path | str | None = None, progress: Progress = silent
) -> dict[str, Any]:
    """What the run recorded at `path` promises to each of its users, as JSON-able values; ValueError if there is no ledger.

    `attacker` says how often the best attacker is right about one user (None where nothing is promised). `whole_run` is the
    guarantee for all planned rounds, `with_evaluations` for those and all private evaluations of the run (None
    if it has none), `so_far` for the rounds released: it holds under its `condition` only.
    `notes` say what contradicts nothing and has to be known: noised sums that were no release, a δ that is large for the users.
    `sound` says whether the records agree with each other and with the plan, `private` whether that holds and everything that the
    run tells is covered. Nothing in it depends on who the users are or how many took part, so it may be published with the model.
    `register` is as in `verify`. ValueError also for the ledger of a run's evaluations.
    """
    verification = verify(path, register=register)
    return statement_of(path, records(path)["run"], verification, compared=register is not None, progress=progress)


def statement_of(
    path: Path | str,
    run: dict[str, Any],
    verification: Verification,
    *,
    compared: bool,
    progress: Progress = silent,
) -> dict[str, Any]:
    """`privacy_statement` of a ledger that is read and verified already.

    Args:
        path: the ledger, to name it.
        run: its settings, as `export` has them.
        verification: what `verify` says of it.
        compared: whether that compared it with a register.
        progress: called while the best attacker's accuracy is found.

    Raises:
        ValueError: for the ledger of a run's evaluations.
    """
    if EVALUATION_OF in run["configuration"]:
        raise ValueError(
            f"{path} records the evaluations of a run only: a statement is made from the ledger of that run"
        )
    both = verification.with_evaluations
    plan = Plan.from_description(run["plan"])
    whole = verification.whole
    attacker = None  # where nothing is promised
    if not (plan.noiseless or verification.simulated or verification.problems):
        attacker = attacker_accuracy(plan.accountant, noise_multiplier=plan.noise_multiplier, progress=progress)
    large = large_delta(plan.delta, verification.least_users)  # as planned: how many there were is not for the public
    adaptive = run["configuration"].get("adaptive_clipping")
    if plan.noiseless:
        reasoning = [{"title": "no noise", "statement": f"{_WITHOUT_NOISE} There is nothing to derive."}]
    else:
        steps = explain(
            plan.mechanism,
            plan.participation,
            clip_norm=plan.clip_norm if adaptive is None else 1.0,
            delta=plan.delta,
            noise_multiplier=plan.noise_multiplier,
        )
        reasoning = [{"title": step.title, "statement": step.statement} for step in steps]
    if adaptive is not None:
        reasoning.insert(0, {"title": "adaptive clipping", "statement": _ADAPTIVE})
    return {
        "statement": sentence(
            whole, both, attacker=attacker, simulated=verification.simulated, sound=not verification.problems
        )
        + f" {NOT_COVERED}" * verification.forwards_client_metrics
        + (f" {verification.keepers.promise}" if attacker is not None and verification.keepers is not None else ""),
        "private": attacker is not None and not verification.forwards_client_metrics,
        "forwards_client_metrics": verification.forwards_client_metrics,
        "simulated": verification.simulated,
        "noiseless": verification.noiseless,
        "sound": not verification.problems,
        "problems": list(verification.problems),
        "notes": [
            *verification.notes,
            *([] if large is None else [large]),
            *([] if compared else [NO_REGISTER]),
        ],
        "rounds_planned": verification.planned,
        "rounds_released": verification.released,
        "whole_run": whole.to_description(),
        "attacker": None if attacker is None else asdict(attacker),
        "with_evaluations": None if both is None else both.to_description(),
        "so_far": None if verification.guarantee is None else verification.guarantee.to_description(),
        "plan": run["plan"],
        "adaptive_clipping": adaptive,
        "identity": verification.identity,
        "keepers": verification.keepers and verification.keepers.to_description(),
        "joint_budget": verification.budget
        and {name: verification.budget[name] for name in ("epsilon", "delta")}
        | {"earlier_runs": len(verification.budget["after"])},
        "reasoning": reasoning,
        "begun": run["created"],
        "sealed": run["sealed"],
        "configuration_hash": run["configuration_hash"],
        "written_with": _versions(),
    }


def _versions() -> dict[str, str]:
    """Of Python and the libraries that are installed: `torch` is of an extra."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


_WITHOUT_NOISE = (
    "This run has NO NOISE: its noise multiplier is 0, which is for debugging. Updates were clipped and summed, and released as "
    "they are: ε = ∞, and nothing about it is private."
)

_ADAPTIVE = (
    "The norm to which updates are clipped follows a quantile of the users' norms, and is computed from earlier releases alone. "
    "What is summed and noised, and called update below, is a vector of norm at most 1 whatever that norm is: a user's clipped "
    "update divided by it, and whether the update was within the norm (Andrew et al., 2021, arXiv:1905.03871). The division is "
    "undone after the noise. That the vectors depend on earlier releases, as updates always do, costs nothing (Denisov et al., "
    "2022, arXiv:2202.08312)."
)


def sentence(
    whole: Guarantee,
    both: JointGuarantee | None = None,
    *,
    attacker: AttackerAccuracy | None,
    simulated: bool,
    sound: bool,
) -> str:
    """The promise in one or two sentences, or that there is none."""
    if not whole.noise_multiplier:
        return _WITHOUT_NOISE
    if simulated:
        return (
            "This run is a SIMULATION: its noise comes from a seed that anybody can guess. Nothing about it is private, "
            "whatever is said below."
        )
    if not sound:
        return "The records of this run contradict each other or the plan: NO guarantee can be given for it."
    assert attacker is not None  # it is known where something is promised
    of_both = both and (
        " Metrics of the models on users' data are reported too, as noised sums: the models and all such evaluations that are "
        f"planned, together, are ({rounded_up(both.epsilon)}, {rounded_up(both.delta, 6)})-differentially private."
    )
    return (
        f"All models that this run releases, together, are ({rounded_up(whole.epsilon)}, {rounded_up(whole.delta, 6)})-"
        f"differentially private for every user (adjacency: {whole.adjacency}): anyone without the key who sees all of them, and "
        "knows everything about all other users, is right about whether one user's updates were used, or were replaced by zeros, "
        f"{_how_often(attacker)}.{of_both or ''}"
    )


def _how_often(attacker: AttackerAccuracy) -> str:
    mu = "" if attacker.gaussian_mu is None else rounded_up(attacker.gaussian_mu, 4)
    known = mu and f" (all releases together are at most a Gaussian mechanism with μ = {mu})"
    return f"in at most {attacker.percent} % of cases{known}, if both were equally likely beforehand; a coin is right in 50 %"


def statement_markdown(statement: dict[str, Any]) -> str:
    """The statement as a Markdown page."""
    lines = ["# Privacy statement", "", _markdown(statement["statement"]), "", "| what | value |", "|---|---|"]
    for name, value in facts(statement):
        lines.append(f"| {name} | {_markdown(value)} |")
    for problem in statement["problems"]:
        lines += ["", f"**Problem**: {_markdown(problem)}."]
    for text in statement["notes"]:
        lines += ["", f"**Note**: {_markdown(text)}."]
    lines += ["", "## Why, and under which assumptions", ""]
    lines += [
        f"{count}. **{step['title']}**. {_markdown(step['statement'])}"
        for count, step in enumerate(statement["reasoning"], 1)
    ]
    written = ", ".join(f"{name} {number}" for name, number in statement["written_with"].items())
    return "\n".join([*lines, "", f"Derived from the run's ledger alone, with {written}.", ""])


def _markdown(text: str) -> str:
    """A text that may be somebody else's, so that nothing in it is taken for HTML, a link, a picture, code or a cell's end."""
    return re.sub(r"([\\`\[|])", r"\\\1", escape(clean(text, _MOST_SHOWN), quote=False))


_MOST_SHOWN = 10_000  # characters


def facts(statement: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures that belong to the claim, each with its name, in the order in which a reviewer asks for them."""
    whole, so_far, plan = statement["whole_run"], statement["so_far"], statement["plan"]
    both = statement["with_evaluations"]
    rounds = f"{statement['rounds_released']} of {statement['rounds_planned']}"
    found = [
        ("ε of the whole run", f"at most {rounded_up(whole['epsilon'])}"),
        ("δ", f"{rounded_up(whole['delta'], 6)}"),
        *([("ε with its evaluations", f"at most {rounded_up(both['epsilon'])} ({both['method']})")] if both else []),
        ("ε so far", _so_far(whole, so_far)),
        *(
            [("the best attacker is right", _how_often(AttackerAccuracy(**statement["attacker"])))]
            if statement["attacker"]
            else []
        ),
        ("adjacency", whole["adjacency"]),
        ("sampling", whole["sampling"]),
        ("method", f"{whole['method']} ({'exact' if whole['exact'] else 'an upper bound'})"),
        (
            "failure probability of the method",
            f"{whole['failure_probability']:g}, part of δ" if whole["failure_probability"] else "0",
        ),
        ("rounds released", rounds),
        (
            "sealed",
            f"on {statement['sealed']}"
            if statement["sealed"]
            else "no: the key may still exist, and removes the noise",
        ),
        ("participation", str(Participation(**plan["participation"]))),
        *([("who a user is", statement["identity"])] if statement["identity"] else []),
        ("mechanism", _mechanism(plan["mechanism"])),
        ("clip norm ζ", f"{plan['clip_norm']:g}{', then a quantile of norms' * bool(statement['adaptive_clipping'])}"),
        ("noise multiplier σ", rounded_up(plan["noise_multiplier"], 6)),
    ]
    if (budget := statement["joint_budget"]) is not None:
        found.append(
            (
                "joint budget of each user",
                f"ε ≤ {rounded_up(budget['epsilon'])} at δ = {rounded_up(budget['delta'], 6)}, with "
                f"{plural(budget['earlier_runs'], 'earlier run', 'earlier runs')} (whoever had too little left was not asked)",
            )
        )
    if whole["sensitivity"] is not None:
        found.append(("sensitivity of C", f"{whole['sensitivity']:.6g}"))
    return found + keeper_facts(statement["keepers"])


def _so_far(whole: dict[str, Any], so_far: dict[str, Any] | None) -> str:
    if so_far is None:
        return "nothing is released"
    epsilon = f"at most {rounded_up(so_far['epsilon'])}"
    if so_far["condition"] is None or whole["condition"] is not None:
        return epsilon
    return f"{epsilon}, {so_far['condition']}; otherwise ε is that of the whole run"


def _mechanism(mechanism: dict[str, Any]) -> str:
    numbers = [
        f"{name} {value:g}"
        for name, value in mechanism.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return ", ".join([mechanism["name"], *numbers])
