"""Spectra of models from 26,000 to 10 million parameters: products, processor time, memory.

    PYTHONPATH=simulations python benchmarks/spectra.py [MODEL …]

On Fashion-MNIST's validation images, with three equal channels of 32 × 32 pixels for models of photographs, and 64 random word
pieces for a model of texts; 20 epochs of random labels (2 for the large ones), one thread, float32, 10 eigenvalues, 3 probes of
20 steps. Each model in a process of its own.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcgd.curvature.measure import measure_spectrum
from fedcgd.curvature.public import Public, pretrained
from fedcgd_simulations.models.bert import VOCABULARY, bert
from fedcgd_simulations.models.cnn import cnn
from fedcgd_simulations.models.small_cnn import tanh_cnn
from fedcgd_simulations.models.wideresnet import wideresnet
from fedcgd_simulations.tasks import get_task


def mlp(*hidden: int) -> nn.Module:
    """784 → `hidden` … → 10 with tanh."""
    sizes = (784, *hidden, 10)
    layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def images(count: int) -> Tensor:
    """The first validation images."""
    return get_task("fashion-mnist").load().validation.inputs[:count]


def photographs(count: int) -> Tensor:
    """The same with three equal channels of 32 × 32 pixels."""
    return functional.pad(images(count), (2, 2, 2, 2)).expand(-1, 3, -1, -1).contiguous()


def words(count: int) -> Tensor:
    """Random word pieces, 64 in a text: they cost what others do, and their spectrum says nothing of language."""
    return torch.randint(1, VOCABULARY, (count, 64), generator=torch.Generator().manual_seed(0))


# name → (model, how its examples are made, how many, epochs)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], int, int]] = {
    "tanh-cnn": (tanh_cnn, images, 1000, 20),
    "mlp-125": (lambda: mlp(125), images, 1000, 20),
    "cnn": (cnn, photographs, 100, 20),
    "mlp-800-400": (lambda: mlp(800, 400), images, 1000, 20),
    "wideresnet-16-4": (lambda: wideresnet(depth=16), photographs, 16, 2),
    "bert-tiny": (lambda: bert("bert-tiny", None, classes=10), words, 100, 2),
    "wideresnet-40-4": (wideresnet, photographs, 8, 2),
    "mlp-2400-2400-1000": (lambda: mlp(2400, 2400, 1000), images, 300, 2),
}


HEADINGS = (
    "model", "parameters", "examples", "products", "seconds: labels + spectrum", "GiB", "largest", "d_eff",
    "power law's tail", "quadrature's tail",
)  # fmt: skip


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """One number per example."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def measure(name: str) -> None:
    """Print one row of the table, and write the spectrum beside it if $SPECTRA names a folder."""
    torch.set_num_threads(1)
    make, examples, count, epochs = MODELS[name]
    torch.manual_seed(0)
    public = Public(make(), cross_entropy, examples(count), classes=10)
    started = time.process_time()
    trained = pretrained(public, epochs=epochs)
    pretraining = time.process_time() - started
    spectrum = measure_spectrum(
        trained.hessian(), eigenvalues=10, probes=3, steps=20, measured_on={"model": name, "public": "fashion-mnist"},
        report=lambda line: print(f"  {line}", file=sys.stderr, flush=True),
    )  # fmt: skip
    facts, memory = spectrum.measured_on, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if folder := os.environ.get("SPECTRA"):
        spectrum.save(Path(folder) / f"{name}.json")
    tail = facts.get("tail", {}).get("sum", float("nan"))
    quadrature = facts.get("quadrature", {}).get("sum", float("nan"))
    seconds = f"{pretraining:.0f} + {facts['processor_seconds']:.0f}"
    print(
        f"| {name} | {spectrum.dimension:,} | {count} | {facts['products']} | {seconds} "
        f"| {memory / 2**30:.1f} | {spectrum.largest:.3g} | {spectrum.effective_dimension:.0f} "
        f"| {tail:.3g} | {quadrature:.3g} |",
        flush=True,
    )


def main() -> None:
    """One process for each model, so that its memory is its own."""
    names = sys.argv[1:] or list(MODELS)
    if len(names) == 1:
        measure(names[0])
        return
    print(f"| {' | '.join(HEADINGS)} |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in names:
        subprocess.run([sys.executable, __file__, name], check=True)


if __name__ == "__main__":
    main()
