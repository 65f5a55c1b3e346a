"""Spectra of models from 26,000 to 10 million parameters: products, processor time, memory.

    PYTHONPATH=simulations python benchmarks/spectra.py [MODEL …]

On Fashion-MNIST's validation images, with three equal channels of 32 × 32 pixels for models of photographs, 20 epochs of random
labels (2 for the large ones), one thread, float32, 10 eigenvalues, 3 probes of 20 steps. Each model in a process of its own.
"""

import os
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
from fedcgd_simulations.models.cnn import cnn
from fedcgd_simulations.models.small_cnn import tanh_cnn
from fedcgd_simulations.models.wideresnet import wideresnet
from fedcgd_simulations.tasks import get_task


def mlp() -> nn.Module:
    """784 → 2400 → 2400 → 1000 → 10 with tanh: 10.1 M weights."""
    sizes = (784, 2400, 2400, 1000, 10)
    layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


# name → (model, public images, channels of 32 × 32 pixels or None for 28 × 28, epochs)
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int | None, int]] = {
    "tanh-cnn": (tanh_cnn, 1000, None, 20),
    "cnn": (cnn, 100, 3, 20),
    "wideresnet-16-4": (lambda: wideresnet(depth=16), 16, 3, 2),
    "wideresnet-40-4": (wideresnet, 8, 3, 2),
    "mlp": (mlp, 300, None, 2),
}


HEADINGS = (
    "model", "parameters", "images", "products", "seconds: labels + spectrum", "GiB", "largest", "d_eff",
    "power law's tail", "quadrature's tail",
)  # fmt: skip


def images(count: int, channels: int | None) -> Tensor:
    """The first validation images."""
    found = get_task("fashion-mnist").load().validation.inputs[:count]
    return found if channels is None else functional.pad(found, (2, 2, 2, 2)).expand(-1, channels, -1, -1).contiguous()


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """One number per example."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def measure(name: str) -> None:
    """Print one row of the table, and write the spectrum beside it if $SPECTRA names a folder."""
    torch.set_num_threads(1)
    make, count, channels, epochs = MODELS[name]
    torch.manual_seed(0)
    public = Public(make(), cross_entropy, images(count, channels), classes=10)
    started = time.process_time()
    trained = pretrained(public, epochs=epochs)
    pretraining = time.process_time() - started
    measured = measure_spectrum(
        trained.hessian(), eigenvalues=10, probes=3, steps=20, measured_on={"model": name, "public": "fashion-mnist"},
        report=lambda effort: print(f"  {effort}", file=sys.stderr, flush=True),
    )  # fmt: skip
    spectrum, facts = measured.spectrum, measured.spectrum.measured_on
    if folder := os.environ.get("SPECTRA"):
        spectrum.save(Path(folder) / f"{name}.json")
    tail = facts.get("tail", {}).get("sum", float("nan"))
    quadrature = facts.get("quadrature", {}).get("sum", float("nan"))
    seconds = f"{pretraining:.0f} + {facts['processor_seconds']:.0f}"
    print(
        f"| {name} | {spectrum.dimension:,} | {count} | {facts['products']} | {seconds} "
        f"| {facts['memory_bytes'] / 2**30:.1f} | {spectrum.largest:.3g} | {spectrum.effective_dimension:.0f} "
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
