"""A server's round against Flower's own strategies: processor time and peak memory.

python benchmarks/server_round.py [--nodes 10] [--parameters 10000000] [--arrays 60] [--rounds 5] [--json FILE]

A round is `configure_train` and `aggregate_train` with replies that are there already, and a ledger on disk. FedAvg, Flower's two
differentially private wrappers around it, and `CorrelatedNoise` around it take turns in one process; each round's processor time
(user and system, all threads) is compared with that of the fixed-clipping wrapper beside it. Peak memory is that of a process
which runs one round of one strategy and nothing else; what it held before (imports, model, replies) stands beside it.

A process that has run for a while has memory at hand that a new one must ask the kernel for. So rounds are also run in new
processes, of the fixed-clipping wrapper and of `CorrelatedNoise` in turns: `fresh` is the ratio of their processor times by
round, from the first on, and `faults` how many pages a round of ours asked for.
Results are in benchmarks/diary.md.
"""

import argparse
import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
)
from flwr.supercore.task_identity import TaskIdentity

from fedcgd import LambdaCGD, NoiseKey, Participation, Plan
from fedcgd_flower import CorrelatedNoise
from fedcgd_flower.clipping import clipped_update
from fedcgd_flower.messages import read_train_message, train_reply

ROUNDS = 1000
PEER = "Flower DP, fixed clipping"
OURS = "fedcgd"
NAMES = ("FedAvg", PEER, "Flower DP, adaptive clipping", OURS)
MIB = 2**20

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # a Message asks for them


def strategy_of(name: str, nodes: int, ledger: Path) -> Strategy:
    inner = FedAvg(min_train_nodes=nodes, min_available_nodes=nodes, fraction_evaluate=0)
    if name == "FedAvg":
        return inner
    if name == PEER:
        return DifferentialPrivacyServerSideFixedClipping(inner, 1.0, 1.0, nodes)
    if name != OURS:
        return DifferentialPrivacyServerSideAdaptiveClipping(inner, 1.0, nodes, clipped_count_stddev=1.0)
    plan = Plan(
        mechanism=LambdaCGD(0.9),
        participation=Participation(rounds=ROUNDS, min_separation=1),
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-5,
    )
    return CorrelatedNoise(inner, plan, key=NoiseKey.generate(), ledger=ledger, identity="authenticated")


class Server:
    """A strategy with a model, and nodes that answer the same each round."""

    def __init__(self, name: str, args: argparse.Namespace, folder: str) -> None:
        logging.getLogger("flwr").setLevel(logging.ERROR)
        self.strategy = strategy_of(name, args.nodes, Path(folder) / "ledger")
        nodes = range(1, args.nodes + 1)
        self.grid = create_autospec(Grid, instance=True)
        self.grid.get_node_ids.return_value = nodes
        self.grid.get_nodes.return_value = [SimpleNamespace(node_id=node, name=f"node {node}") for node in nodes]
        generator = np.random.default_rng(1)
        sizes = [len(part) for part in np.array_split(np.empty(args.parameters, np.bool_), args.arrays)]
        self.model = {f"layer {i}": generator.standard_normal(n, np.float32) for i, n in enumerate(sizes)}
        self.arrays = ArrayRecord({layer: Array(value) for layer, value in self.model.items()})
        self.round = 0
        self.last = False
        """Whether the answers are needed no more, and the memory of what a strategy replaces is to be free."""
        self.answers: dict[int, Any] = {}
        if isinstance(self.strategy, CorrelatedNoise):
            self.strategy.__enter__()
        for message in self.configure():
            self.answers[message.metadata.dst_node_id] = self.answer(message, generator)
        del self.model

    def configure(self) -> list[Message]:
        self.round += 1
        return list(self.strategy.configure_train(self.round, self.arrays, ConfigRecord(), self.grid))

    def answer(self, message: Message, generator: np.random.Generator) -> Any:
        """An update of norm 2, so that it is clipped."""
        scale = np.float32(2 / np.sqrt(sum(value.size for value in self.model.values())))
        if not isinstance(self.strategy, CorrelatedNoise):
            return ArrayRecord(
                {
                    layer: Array(value + scale * generator.standard_normal(value.shape, np.float32))
                    for layer, value in self.model.items()
                }
            )
        flat, _, task = read_train_message(message)
        new = flat + scale * generator.standard_normal(flat.shape, np.float32)
        steps = clipped_update(new, flat, task.clipping)
        assert steps is not None
        return train_reply(message, task, steps, 1).content

    def replies(self, messages: list[Message]) -> list[Message]:
        made = []
        for message in messages:
            answer = (self.answers.pop if self.last else self.answers.get)(message.metadata.dst_node_id)
            if isinstance(self.strategy, CorrelatedNoise):
                task = ConfigRecord(dict(answer["fedcgd"]))
                task["round"], task["attempt"] = (message.content["fedcgd"][key] for key in ("round", "attempt"))
                content = RecordDict({"update": answer["update"], "fedcgd": task})
            else:
                metrics = MetricRecord({"num-examples": 1})
                content = RecordDict({"arrays": ArrayRecord(dict(answer)), "metrics": metrics})
            message.metadata.__dict__["_message_id"] = f"message {message.metadata.dst_node_id}"
            made.append(Message(content, reply_to=message))
        return made

    def run(self) -> tuple[float, float]:
        """Processor time of the two halves of a round."""
        begin = time.process_time()
        messages = self.configure()
        middle = time.process_time()
        replies = self.replies(messages)
        del messages
        replied = time.process_time()
        # As `start` hands them over, one by one, and as Flower's own does.
        handed = iter_of(replies) if isinstance(self.strategy, CorrelatedNoise) else replies
        released, _ = self.strategy.aggregate_train(self.round, handed)
        end = time.process_time()
        assert released is not None
        return middle - begin, end - replied


def iter_of(replies: list[Message]) -> Iterator[Message]:
    """Each of them, which nothing here holds any more."""
    replies.reverse()
    while replies:
        yield replies.pop()


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB


def peak_mib() -> float:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def alone(name: str, args: argparse.Namespace, folder: str) -> dict[str, float]:
    server = Server(name, args, folder)
    held = resident_mib()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making the replies
    server.last = True
    server.run()
    return {"held": held, "peak": peak_mib()}


def fresh(name: str, args: argparse.Namespace, folder: str) -> list[tuple[float, int]]:
    """(processor time, page faults) of each round of a strategy in this process, which has run nothing else."""
    server = Server(name, args, folder)
    rounds = []
    for _ in range(args.rounds):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        seconds = sum(server.run())
        rounds.append((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))
    return rounds


def measure_fresh(args: argparse.Namespace) -> dict[str, Any]:
    """The ratios by round, each the median of so many pairs of new processes; printed too."""
    pairs = [{name: child("--fresh", name, args) for name in (PEER, OURS)} for _ in range(args.pairs)]
    ratios = [median(pair[OURS][i][0] / pair[PEER][i][0] for pair in pairs) for i in range(args.rounds)]
    found = {
        "ratio": ratios,
        "seconds": [median(pair[OURS][i][0] for pair in pairs) for i in range(args.rounds)],
        "faults": [int(median(pair[OURS][i][1] for pair in pairs)) for i in range(args.rounds)],
        "worst_from_the_second_on": max(
            pair[OURS][i][0] / pair[PEER][i][0] for pair in pairs for i in range(1, args.rounds)
        ),
    }
    print(
        f"in new processes, {args.pairs} pairs: ratio by round {', '.join(f'{ratio:.2f}' for ratio in ratios)}; the worst "
        f"round from the second on {found['worst_from_the_second_on']:.2f}; page faults a round {found['faults']}"
    )
    return found


def child(option: str, name: str, args: argparse.Namespace) -> Any:
    """What this file prints when a new process runs it with `option` for one strategy."""
    sizes = [f"--{size}={getattr(args, size)}" for size in ("nodes", "parameters", "arrays", "rounds")]
    done = subprocess.run([sys.executable, __file__, *sizes, option, name], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The table, by strategy; printed too."""
    memories = {name: child("--alone", name, args) for name in NAMES}
    in_new_processes = measure_fresh(args)
    with tempfile.TemporaryDirectory() as folder:
        servers = {name: Server(name, args, folder) for name in NAMES}
        for server in servers.values():
            server.run()
        times = [{name: server.run() for name, server in servers.items()} for _ in range(args.rounds)]
    results: dict[str, dict[str, Any]] = {}
    print(f"{args.nodes} nodes, {args.parameters} parameters in {args.arrays} arrays; {args.rounds} rounds in turn")
    print(f"{'':30} {'configure':>9} {'aggregate':>9} {'processor':>9} {'ratio (spread)':>20} {'peak':>9} {'held':>9}")
    for name in NAMES:
        ratios = sorted(sum(row[name]) / sum(row[PEER]) for row in times)
        configure, aggregate = (median(row[name][half] for row in times) for half in (0, 1))
        results[name] = {
            "configure": configure,
            "aggregate": aggregate,
            "ratio": median(ratios),
            "ratio_spread": [ratios[0], ratios[-1]],
            "peak_mib": memories[name]["peak"],
            "held_mib": memories[name]["held"],
        }
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(
            f"{name:30} {configure:7.3f} s {aggregate:7.3f} s {configure + aggregate:7.3f} s {spread:>20} "
            f"{memories[name]['peak']:5.0f} MiB {memories[name]['held']:5.0f} MiB"
        )
    results[OURS]["fresh"] = in_new_processes
    return results


def options() -> argparse.ArgumentParser:
    """What this file is told, and what it takes where it is not told."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--nodes", type=int, default=10)
    options.add_argument("--parameters", type=int, default=10_000_000)
    options.add_argument("--arrays", type=int, default=60)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--json", type=Path, default=None)
    options.add_argument("--pairs", type=int, default=3, help="pairs of new processes")
    options.add_argument("--alone", choices=NAMES, default=None, help=argparse.SUPPRESS)
    options.add_argument("--fresh", choices=NAMES, default=None, help=argparse.SUPPRESS)
    return options


def main() -> None:
    args = options().parse_args()
    for run, name in ((alone, args.alone), (fresh, args.fresh)):
        if name:
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(run(name, args, folder)))
            return
    results = measure(args)
    if args.json:
        sizes = {name: getattr(args, name) for name in ("nodes", "parameters", "arrays", "rounds")}
        args.json.write_text(json.dumps({"options": sizes, "strategies": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
