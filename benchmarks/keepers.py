"""What keepers cost: milliseconds of a node, a keeper and the server in one round, and the bytes that travel.

python benchmarks/keepers.py [--parameters 1000000,10000000] [--nodes 10,100,1000] [--keepers 3] [--json FILE]

Processor milliseconds of one thread, the least of several. The node masks its integers and seals one seed for each keeper. The
keeper opens the nodes' seeds (hybrid HPKE), takes their masks off and makes its share of the noise, of two vectors; the record's
two synchronisations with the disk are beside it, by the clock. The server adds what nodes and keepers send. Beside them,
Flower's SecAgg+ as its functions are: a node's masks for as many neighbours as there are other nodes, at most 100, by its own
generator; without its key shares, and without its three further exchanges.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

from fedcgd import LambdaCGD, Participation, Plan
from fedcgd.keepers import Keeper, Keepers, Masked, Opening, add, agree, lifted, mask
from fedcgd.keepers.identities import SEALED_BYTES, KeeperKey
from fedcgd.keepers.keeper import share_terms
from fedcgd.keepers.masks import TICKET_BYTES, residues_of, subtract_masks
from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Lattice, add_noise

PLAN = Plan(
    mechanism=LambdaCGD(0.9),
    participation=Participation(rounds=210, min_separation=21),
    clip_norm=1.0,
    noise_multiplier=4.8,
    delta=1e-5,
)
NEIGHBOURS = 100


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one round; milliseconds of processor time, and bytes."""

    parameters: int
    nodes: int
    keepers: int
    node_ms: float
    keeper_seeds_ms: float
    keeper_masks_ms: float
    keeper_share_ms: float
    record_clock_ms: float
    server_ms: float
    node_up_bytes: int
    keeper_down_bytes: int
    keeper_up_bytes: int
    secaggplus_node_ms: float


def milliseconds(work: Callable[[], object], repeats: int = 3, clock: Callable[[], float] = time.process_time) -> float:
    """The least of some times."""
    found = []
    for _ in range(repeats):
        began = clock()
        work()
        found.append(1e3 * (clock() - began))
    return min(found)


def measure(parameters: int, nodes: int, count: int) -> Cost:
    keepers = Keepers.simulation(7, count, colluding=count // 2)
    agreement = agree(PLAN, size=parameters, keepers=keepers, run="", users=nodes)
    values = np.random.default_rng(0).integers(-(2**16), 2**16, parameters).astype(np.int32)

    def masked() -> Masked:
        return mask(values, agreement, round=1, attempt=0, present=keepers.names)

    one = masked()
    key, card = KeeperKey.simulation(7, 0), keepers.cards[0]
    info = agreement.info(1, 0, keepers.names) + one.ticket
    sealed = [card.seal(bytes([i % 256]) * 32, info) for i in range(min(nodes, 100))]
    seeds = [i.to_bytes(32) for i in range(min(nodes, 100))]
    more = nodes / len(seeds)  # of 1000 nodes a tenth is measured
    share = np.zeros(parameters, np.int64)
    terms = share_terms(PLAN.mechanism, 210, 1, 0, [(0, 0)])
    stream = NoiseStream(key.noise.noise_of(""))

    def make_share() -> None:
        add_noise(share, stream, terms, agreement.share_stddev, Lattice(agreement.step), threads=1)

    total = residues_of(np.zeros(parameters, np.int64), agreement.bits)
    others = [pseudo_seed.to_bytes(32) for pseudo_seed in range(min(nodes - 1, NEIGHBOURS, 5))]
    neighbours = min(nodes - 1, NEIGHBOURS)
    secagg = milliseconds(lambda: [pseudo_rand_gen(seed, 2**32, [(parameters,)]) for seed in others], 2)
    return Cost(
        parameters=parameters,
        nodes=nodes,
        keepers=count,
        node_ms=milliseconds(masked, 7),
        keeper_seeds_ms=more * milliseconds(lambda: [key.open(seed, info) for seed in sealed]),
        keeper_masks_ms=more * milliseconds(lambda: subtract_masks(total, seeds)),
        keeper_share_ms=milliseconds(make_share),
        record_clock_ms=record_milliseconds(keepers),
        server_ms=(nodes + count) * milliseconds(lambda: add(total, one.residues), 7)
        + milliseconds(lambda: lifted(total)),
        node_up_bytes=one.residues.nbytes + TICKET_BYTES + SEALED_BYTES * count,
        keeper_down_bytes=nodes * (TICKET_BYTES + SEALED_BYTES),
        keeper_up_bytes=total.nbytes,
        secaggplus_node_ms=secagg / len(others) * neighbours,
    )


def record_milliseconds(keepers: Keepers) -> float:
    """The difference by the clock between an answer with a record on the disk and one in memory."""
    small = agree(PLAN, size=10, keepers=keepers, run="", users=10)
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        for where in (None, Path(folder) / "record"):
            with Keeper.simulation(keepers, 0, where) as keeper:
                found = []
                for round in range(10):
                    sent = mask(np.zeros(10, np.int64), small, round=round, attempt=0, present=keepers.names)
                    opening = Opening(
                        round=round,
                        attempt=0,
                        present=keepers.names,
                        tickets=(sent.ticket,),
                        sealed=(sent.sealed[keepers.names[0]],),
                        after=round - 1 if round else None,
                    )
                    began = time.perf_counter()
                    keeper.answer(small, opening)
                    found.append(1e3 * (time.perf_counter() - began))
                times[where is None] = float(np.median(found))
    return times[False] - times[True]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", default="1000000,10000000")
    parser.add_argument("--nodes", default="10,100,1000")
    parser.add_argument("--keepers", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    costs = []
    print(
        "parameters  nodes  node ms  keeper ms (seeds + masks + share + record)  server ms  node up  keeper down  SecAgg+ node ms"
    )
    for parameters in map(int, options.parameters.split(",")):
        for nodes in map(int, options.nodes.split(",")):
            cost = measure(parameters, nodes, options.keepers)
            costs.append(asdict(cost))
            keeper = cost.keeper_seeds_ms + cost.keeper_masks_ms + cost.keeper_share_ms + cost.record_clock_ms
            print(
                f"{parameters:10d}  {nodes:5d}  {cost.node_ms:7.1f}  {keeper:9.1f} ({cost.keeper_seeds_ms:.1f} + "
                f"{cost.keeper_masks_ms:.1f} + {cost.keeper_share_ms:.1f} + {cost.record_clock_ms:.1f})  "
                f"{cost.server_ms:9.1f}  {cost.node_up_bytes / 1e6:.3f} MB  {cost.keeper_down_bytes / 1e3:.0f} kB  "
                f"{cost.secaggplus_node_ms:.1f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(costs, indent=1) + "\n")


if __name__ == "__main__":
    main()
