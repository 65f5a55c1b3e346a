"""Whether fedcgd is still as fast, next to its peers, as when benchmarks/results/performance.json was written.

python benchmarks/check.py [--write]

Measures again what that file holds, and exits with 1 if a ratio of processor times is 20 % worse, or a peak of memory. With
`--write`, writes the file instead. Takes about five minutes; no part of the test suite.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import accounting
import client_update
import noise
import runtime
import server_round

COMMITTED = Path(__file__).parent / "results" / "performance.json"
WORSE = 1.2


def measure() -> dict[str, float]:
    sizes = argparse.Namespace(nodes=10, parameters=10_000_000, arrays=60, rounds=5)
    strategies = server_round.measure(sizes)
    ours, fedavg = strategies[server_round.OURS], strategies["FedAvg"]
    models = (ours["peak_mib"] - fedavg["peak_mib"]) * server_round.MIB / (4 * sizes.parameters)
    return {
        "server round / Flower DP with fixed clipping": ours["ratio"],
        "server's peak above FedAvg's, in models": models,
        "a later message to a client / the app alone": later_message(),
        "noise of two rounds / normal_": noise.measure(size=25_000_000, threads=2, repeats=9)["ratio"],
        **accounting.speed(),
        **central_steps(),
    }


def later_message() -> float:
    """Processor time of an app with the mod over that of the app without it, in a process that has had a message already."""
    rows = client_update.measure([10_000_000], repeats=3)
    [ratio] = [row["ratio"] for row in rows if (row["form"], row["message"]) == ("machine code", "later")]
    return float(ratio)


def central_steps() -> dict[str, float]:
    """Processor time of steps that replay one round of noise, over that of Opacus."""
    ratios = {}
    for model, batch, mode in (("cnn", 32, "hooks"), ("bert-tiny", 16, "hooks"), ("bert-tiny", 16, "ghost")):
        found = runtime.measure(
            model, batch=batch, physical=batch, turns=7, steps=1, mode=mode, variants=[("replay", 2)]
        )
        ratios[f"step of {model}, {mode} / Opacus"] = found["rows"][1]["ratio"]
    return ratios


def worse(before: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """The figures that are more than 20 % above what they were, or are no number. Raises ValueError if others were measured."""
    if before.keys() != now.keys():
        raise ValueError(
            f"{COMMITTED} holds {sorted(before)}, and {sorted(now)} were measured: write it again with --write"
        )
    return [name for name in before if not now[name] <= WORSE * before[name]]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true", help="write the file instead of comparing with it")
    write = options.parse_args().write
    now = measure()
    if write:
        COMMITTED.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n")
        return
    before = json.loads(COMMITTED.read_text())
    found = worse(before, now)
    for name in before:
        print(f"{name:50} {before[name]:6.2f} → {now[name]:6.2f}{'   WORSE' if name in found else ''}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
