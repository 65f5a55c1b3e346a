"""Time of a private training step for each way to make noise, over that of Opacus (Tables 1, 2 of arXiv:2601.22334).

Each variant takes turns with `opacus.PrivacyEngine` in one process, so that whatever slows the machine slows both; ratios are
within a turn, and the median and the quartiles over turns are given. Inputs are random numbers of the task's shape. On a CPU the
time is that of the process, not of the clock; with OMP_NUM_THREADS=1 the two agree on a machine that does nothing else.

    python benchmarks/runtime.py --model cnn --model bert-tiny --turns 21 --output results/runtime.jsonl
"""

import argparse
import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulations"))

from fedcgd_experiments.runtime import MODELS, VARIANTS, measure


def _known(output: Path | None) -> set[tuple[str, str, int]]:
    """(model, mode, batch) of the records of `output`."""
    if output is None or not output.exists():
        return set()
    records = map(json.loads, output.read_text().splitlines())
    return {(record["model"], record["mode"], record["batch"]) for record in records}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--physical", type=int, default=32)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--mode", default="hooks", choices=["hooks", "ghost"])
    parser.add_argument(
        "--variant", action="append", metavar="NOISE:BANDS", help="dp-sgd:1, replay:2, …; all if not given"
    )
    parser.add_argument(
        "--output", type=Path, help="append each record as a line of JSON; models in it are not timed again"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    known = _known(arguments.output)
    variants = [(noise, int(bands)) for noise, _, bands in (word.partition(":") for word in arguments.variant or [])]
    for model in arguments.model or ["cnn"]:
        if (model, arguments.mode, arguments.batch) in known:
            print(f"\n{model}: in {arguments.output} already")
            continue
        record = measure(
            model,
            batch=arguments.batch,
            physical=arguments.physical,
            turns=arguments.turns,
            steps=arguments.steps,
            mode=arguments.mode,
            variants=variants or VARIANTS,
        )
        print(f"\n{model}: {record['parameters']:,} weights on {record['device']}, batch {record['batch']}")
        print(f"{record['threads']} threads, load of the machine {record['load']:.1f}")
        for row in record["rows"]:
            low, high = row["quartiles"]
            name = f"{row['noise']} p={row['bands']}" if row["bands"] > 1 else row["noise"]
            print(f"{name:>16} {row['milliseconds']:9.2f} ms   × {row['ratio']:.3f}  ({low:.3f} … {high:.3f})")
        if arguments.output:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            with arguments.output.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
