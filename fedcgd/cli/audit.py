"""`fedcgd audit`: try to refute an ε."""

import json as jsonlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcgd.accounting import calibrate
from fedcgd.accounting.guarantee import ADJACENCY, check_noise_multiplier
from fedcgd.audit.audit import AuditResult, Release, audit_canaries, audit_plan
from fedcgd.audit.coins import has_coins
from fedcgd.audit.paths import audit_key, server_release
from fedcgd.cli.commands import AuditOptions
from fedcgd.cli.printing import (
    console,
    key_value_table,
    number,
    print_json,
    status,
    when,
)
from fedcgd.cli.usage import Exit, complaints
from fedcgd.mechanisms.mechanism import Matrix
from fedcgd.optimisation.catalogue import spelling_of
from fedcgd.plan import Plan

_SCORES = 'it must be a JSON file {"included": [numbers], "held_out": [numbers]}'


def audit(asked: AuditOptions) -> int:
    """Try to refute (ε, δ): of this installation's noise, or with --scores of a federated run. Exit code 1 if refuted."""
    if (asked.scores is None) == (asked.rounds is None):
        raise ValueError("give --rounds and a mechanism, or --scores of a run: one of the two")
    if asked.scores is not None:
        promise = {"adjacency": ADJACENCY, "sampling": "that of the run", "claim": "that of the run"}
        figures: dict[str, Any] = {}
        coins = None
        included, held_out = read_scores(asked.scores)
        result = audit_canaries(
            included, held_out, epsilon=asked.epsilon, delta=asked.delta, confidence=asked.confidence
        )
    elif asked.rounds is not None:
        participation = asked.run(asked.rounds)
        chosen = asked.chosen(participation, epsilon=asked.epsilon, delta=asked.delta, curvature=asked.quadratic())
        sigma = asked.noise_multiplier
        if sigma is None:
            sigma = calibrate(chosen, participation, epsilon=asked.epsilon, delta=asked.delta).noise_multiplier
        check_noise_multiplier(sigma)
        plan = Plan(
            mechanism=chosen, participation=participation, clip_norm=1.0, noise_multiplier=sigma, delta=asked.delta
        )
        run_plan, claim, assumed = plan, asked.epsilon, str(participation.sampling)
        if participation.is_secret:
            known = replace(participation, sampling="none", sampling_rate=None, warm_start=True)
            plan = replace(plan, participation=known)
            claim = plan.guarantee().epsilon
            assumed = (
                f"none: the σ for ε = {asked.epsilon:g} under {assumed}, against an adversary who knows the rounds"
            )
        promise = {
            "adjacency": ADJACENCY,
            "sampling": assumed,
            "claim": f"σ = {sigma:.6g}, {plan.guarantee().proof.method}",
            "mechanism": spelling_of(chosen),
            "participation": str(participation),
        }
        figures = when(plan.participation) | {"sampling": assumed, "noise_multiplier": sigma}
        with status(asked.json, "simulating"):
            both = [(plan, claim)] + [(run_plan, asked.epsilon)] * has_coins(participation)
            result, *others = [
                audit_plan(
                    each,
                    RELEASES[asked.path](each, asked.seed),
                    epsilon=said,
                    seed=asked.seed,
                    trials=asked.trials,
                    confidence=asked.confidence,
                )
                for each, said in both
            ]
            coins = next(iter(others), None)
    if asked.json:
        print_json(asdict(result) | figures | promise | ({"with_coins": asdict(coins)} if coins else {}))
    else:
        show(result, promise)
        if coins:
            show(coins, promise | {"sampling": f"{participation.sampling}: with the coins of a run"})
    return Exit.CONTRADICTED if not result.passed or (coins and not coins.passed) else 0


def opacus_release(plan: Plan, seed: int) -> Release:
    """What central training, by the pure step or the Opacus engine, releases on a CPU, round by round."""
    import torch

    from fedcgd.central.releases import Releases

    def release(sums: Matrix, repetition: int) -> Matrix:
        releases = Releases(
            plan, audit_key(seed, repetition), sums.shape[1], record=None, configuration={}, device=torch.device("cpu"),
        )  # fmt: skip
        noised = np.empty_like(sums)
        for t, row in enumerate(sums):
            steps = torch.from_numpy(row / releases.step).round_().to(torch.int64)
            noised[t] = releases.release(steps, t, np.arange(0)).numpy() * releases.step  # type: ignore[union-attr]
        return noised

    return release


RELEASES = {"server": server_release, "opacus": opacus_release}


def read_scores(path: Path) -> tuple[list[float], list[float]]:
    """The two lists of a scores file. Raises ValueError if it is not one."""
    text = path.read_text(encoding="utf-8")
    try:
        found: Any = jsonlib.loads(text)
        return [float(x) for x in found["included"]], [float(x) for x in found["held_out"]]
    except KeyError as error:
        raise ValueError(f"{path} has no {error}: {_SCORES}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read as scores ({error}): {_SCORES}") from None


def show(result: AuditResult, promise: dict[str, str]) -> None:
    """The verdict, and what it rests on; `promise` says what the claim assumes and where it comes from."""
    verdict = "not refuted" if result.passed else "REFUTED"
    rows = [
        ("claim", f"ε ≤ {number(result.claimed_epsilon)} at δ = {number(result.delta)}: {verdict}"),
        *((f"  {name if name != 'claim' else 'method'}", value) for name, value in promise.items()),
        ("lower bound", f"ε ≥ {number(result.epsilon_lower)} ({result.method})"),
        ("confidence", number(result.confidence)),
        ("trials", str(result.trials)),
        *((f"  {name}", f"ε ≥ {number(value)}") for name, value in result.bounds.items()),
    ]
    console.print(key_value_table("audit", rows))
    if not result.passed:
        complaints.print("The claim does not hold for what ran. Do not release under it.", highlight=False)
