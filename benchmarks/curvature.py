"""What the theory of curvature says, held against simulation, and where one number λ is not enough.

python benchmarks/curvature.py                  (all of it, about ten minutes of one core)
python benchmarks/curvature.py simulation       formulas against runs with the library's own noise, with z-scores
python benchmarks/curvature.py regression       the integral against linear regression on a stream of examples
python benchmarks/curvature.py one-number       the best λ against the best noise: small η, wide spectra, many participations
python benchmarks/curvature.py networks         noise-curve against band-mf of as many bands, on the spectra of two networks
python benchmarks/curvature.py barriers         noise-curve with barriers from 0.01 to 3
python benchmarks/curvature.py plots            docs/curvature.svg

The two spectra, benchmarks/results/spectrum-digits.json and curvature/fashion-mnist-6000-spectrum.json beside it, are of
`fedcgd curve --task digits --model tanh-cnn --clip-norm 1 --eigenvalues 50 -o …`,
and of the same with `--task fashion-mnist --examples 500`. The last tables are in benchmarks/results/curvature.txt.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar

from fedcgd import Participation, select_lambda
from fedcgd.curvature.stationary import optimal_error, stationary_error, stationary_loss
from fedcgd.mechanisms import (
    BISR,
    BLT,
    BSR,
    DPSGD,
    BandedToeplitz,
    BandInvMF,
    LambdaCGD,
    Mechanism,
    NuDPFTRL,
    inverse_matrix,
)
from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Lattice
from fedcgd.optimisation import catalogue, fitted
from fedcgd.optimisation.noise_curve import noise_curve
from fedcgd.optimisation.toeplitz import blt
from fedcgd.quadratic import Quadratic, Spectrum
from fedcgd.quadratic.loss import final_loss, gradient_norm
from fedcgd.release.run_noise import LatticeNormals, NoiseSource

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parents[1] / "docs" / "curvature.svg"

KEY = bytes(range(32, 64))  # chosen beforehand, as is the number of runs; each simulation has a stream of its own
RUNS, FINITE, LONG = 100_000, 40, 150
TOY = Quadratic(Spectrum.from_eigenvalues([1.0, 0.5, 0.15]), 0.6)


def optimal_coefficients(quadratic: Quadratic, lags: int) -> Vector:
    """β*_1 … β*_lags, of noise Z_t − Σ β*_τ·Z_{t−τ}: the causal series with |B|² proportional to R^(−1/2), from its cepstrum.

    In one dimension it is (1 − a·x)^(1/2), so that β*_t ~ t^(−3/2)·a^t/(2√π).
    """
    a, values, counts = quadratic.contractions()
    slowest = float(min(np.min(1 - a), np.min(1 + a)))
    size = 2 ** math.ceil(math.log2(max(64 / slowest, 8 * lags, 1024)))
    z = np.exp(2j * np.pi * np.arange(size // 2 + 1) / size)
    response = (counts * values) @ (1 / np.abs(1 - a[:, None] * z) ** 2)
    cepstrum = np.fft.irfft(-0.25 * np.log(response), size)
    causal = np.zeros(size)
    causal[1 : size // 2] = 2 * cepstrum[1 : size // 2]
    return np.asarray(-np.fft.irfft(np.exp(np.fft.rfft(causal)), size)[1 : lags + 1])


def best_lambda(quadratic: Quadratic) -> LambdaCGD:
    """The λ of least `stationary_error`: (1 − √(1 − α²))/α, α the mean of a_i with weights μ_i/(1 − a_i²).

    The error of λ is η²/2·P·(1 − 2αλ + λ²)/(1 − λ²), P = Σ_i μ_i/(1 − a_i²), and so η²/2·P·√(1 − α²) at best: for small η·μ it is
    η^(3/2)/2·√(d·Tr(H)/2), the geometric mean of what independent noise and the bound for all noise scale with. With α ≤ 0
    nothing is to be cancelled.
    """
    a, values, counts = quadratic.contractions()
    weights = counts * values / ((1 - a) * (1 + a))
    alpha, beta = float(weights @ a / weights.sum()), float(weights @ (1 - a) / weights.sum())  # β = 1 − α
    return LambdaCGD((1 - math.sqrt(beta * (1 + alpha))) / alpha if alpha > 0 else 0.0)


def best_nu(quadratic: Quadratic) -> NuDPFTRL:
    """The ν of ν-DP-FTRL of least `stationary_error`, found to about 0.1 % on a logarithmic scale."""
    a, _, _ = quadratic.contractions()
    ends = (math.log(max(float(np.min(1 - a)) / 100, 1e-12)), math.log(1 - 1e-9))
    found = minimize_scalar(
        lambda x: stationary_error(NuDPFTRL(math.exp(x)), quadratic), bounds=ends, method="bounded",
        options={"xatol": 1e-3},
    )  # fmt: skip
    return NuDPFTRL(math.exp(found.x))


def bound_below(quadratic: Quadratic) -> float:
    """η²·‖H‖·d_eff/2, below which no Toeplitz noise gets for η·‖H‖ ≤ 1: each direction alone needs more than η²μ/2."""
    return quadratic.learning_rate**2 * quadratic.spectrum.trace / 2


def simulate(name: str, mechanism: Mechanism, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """(final loss, mean ‖∇L‖²) of `RUNS` runs from the optimum of `TOY`; a coordinate of the noise is a run of its own."""
    grid = Lattice(2.0**-20)
    stream = NoiseStream(KEY).derive(f"{name}, {rounds}")
    source = NoiseSource(mechanism, rounds, LatticeNormals(stream, grid), "buffer")
    curvature = np.repeat(TOY.spectrum.eigenvalues, RUNS)
    w, norms = np.zeros(len(curvature)), np.zeros(RUNS)
    for t in range(rounds):
        total = grid.to_steps(curvature * w)
        source.add(total, [0] * (t + 1), 1.0)
        w = w - TOY.learning_rate * grid.from_steps(total)
        norms += ((curvature * w) ** 2).reshape(-1, RUNS).sum(axis=0) / rounds
    return (curvature * w**2 / 2).reshape(-1, RUNS).sum(axis=0), norms


def simulation() -> None:
    once, bands = Participation(rounds=FINITE, min_separation=FINITE), Participation(rounds=FINITE, min_separation=4)
    series: dict[str, Mechanism] = {
        "dp-sgd": DPSGD(),
        "lambda-cgd:0.7": LambdaCGD(0.7),
        "bisr:4": BISR(4),
        "bsr:6": BSR(6),
        "banded-toeplitz:3": BandedToeplitz((1.0, 0.6, 0.4)),
        "band-inv-mf:3": BandInvMF((1.0, -0.6, 0.1)),
        "blt:2": BLT((0.3, 0.2), (0.9, 0.4)),
        "blt:2, fitted": blt(2, once, quadratic=TOY),
        "nu-dp-ftrl:0.1": NuDPFTRL(0.1),
    }
    made_for_rounds: dict[str, Mechanism] = {
        "noise-curve:4": noise_curve(4, bands, quadratic=TOY),
        "band-mf:4": catalogue.mechanism("band-mf:4", bands),
        "tree": catalogue.mechanism("tree", once),
        "lambda-cgd:0.7:normalized": catalogue.mechanism("lambda-cgd:0.7:normalized", once),
    }
    scores = []

    def row(what: str, name: str, samples: np.ndarray, formula: float) -> None:
        error = samples.std(ddof=1) / math.sqrt(RUNS)
        scores.append((samples.mean() - formula) / error)
        print(f"{what:24} {name:26} {formula:9.5f} {samples.mean():9.5f} ± {error:.5f} {scores[-1]:6.2f}", flush=True)

    print(f"{RUNS} runs of each; η = 0.6, μ = 1, 0.5, 0.15; σ = 1")
    print(f"{'quantity':24} {'mechanism':26} {'formula':>9} {'measured':>9}   {'s.e.':7} {'z':>6}")
    for name, mechanism in (series | made_for_rounds).items():
        losses, norms = simulate(name, mechanism, FINITE)
        row(f"loss after {FINITE}", name, losses, final_loss(mechanism, FINITE, TOY))
        row("mean ‖∇L‖²", name, norms, gradient_norm(mechanism, FINITE, TOY))
    for name, mechanism in series.items():
        row(f"loss after {LONG}, integral", name, simulate(name, mechanism, LONG)[0], stationary_loss(mechanism, TOY))
    z = np.array(scores)
    print(
        f"{len(z)} z-scores: mean square {np.mean(z**2):.2f}, largest {np.abs(z).max():.2f}, {np.sum(np.abs(z) > 2)} beyond 2"
    )
    print("finite tends to stationary: final loss / integral − 1 after n rounds")
    for name, mechanism in series.items():
        gaps = [final_loss(mechanism, n, TOY) / stationary_loss(mechanism, TOY) - 1 for n in (5, 10, 20, 40, 80)]
        print(f"{name:26}" + "".join(f" {gap:10.1e}" for gap in gaps), flush=True)


def regression() -> None:
    """Streaming linear regression, x ~ N(0, H): its steps multiply by 1 − η·x·xᵀ, of which the integral knows the mean alone."""
    values, runs = np.array([1.0, 0.3, 0.1]), 3000
    print(
        f"linear regression on a stream, μ = 1, 0.3, 0.1, {runs} runs: what the noise adds to the loss, over the integral"
    )
    print(f"{'η·Tr(H)':>8} {'mechanism':16} {'integral':>10} {'measured / integral':>20}")
    for rate in (0.01, 0.05, 0.2):
        quadratic = Quadratic(Spectrum.from_eigenvalues(values), rate)
        rounds = round(6 / (rate * 0.1))
        for name, mechanism in {"dp-sgd": DPSGD(), "best λ": best_lambda(quadratic), "bisr:4": BISR(4)}.items():
            rng = np.random.default_rng(11)
            source = NoiseSource(mechanism, rounds, LatticeNormals(NoiseStream(KEY), Lattice(2.0**-20)), "buffer")
            delta, late = np.zeros((runs, 3)), np.zeros(runs)
            for t in range(rounds):
                noise = np.zeros(runs * 3, np.int64)
                source.add(noise, [0] * (t + 1), 1.0)
                x = rng.normal(size=(runs, 3)) * np.sqrt(values)
                gradient = x * (x * delta).sum(axis=1, keepdims=True)
                delta = delta - rate * (gradient + noise.reshape(runs, 3) * 2.0**-20)
                if t >= rounds // 2:
                    late += (delta**2) @ values / 2 / (rounds - rounds // 2)
            formula = stationary_loss(mechanism, quadratic)
            ratio, error = late.mean() / formula, late.std(ddof=1) / math.sqrt(runs) / formula
            print(f"{rate * values.sum():8.3f} {name:16} {formula:10.5f} {ratio:12.3f} ± {error:.3f}", flush=True)


def one_number() -> None:
    print("mean estimation, a run without end: error over the least possible; error of λ times 2ρ")
    print(f"{'η':>8} {'dp-sgd':>9} {'best λ':>9} {'λ':>9} {'error of λ':>11}")
    for eta in (0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-5):
        one = Quadratic(Spectrum.from_eigenvalues([1.0]), eta)
        best, least = best_lambda(one), optimal_error(one)
        errors = [stationary_error(m, one) for m in (DPSGD(), best)]
        print(f"{eta:8g} {errors[0] / least:9.3g} {errors[1] / least:9.3f} {best.lam:9.5f} {2 * errors[1]:11.4g}")
    print("\none eigenvalue of 1 and d − 1 that sum to 1, η = 0.05: error over the least possible")
    print(f"{'d':>8} {'d_eff':>6} {'dp-sgd':>9} {'best λ':>9} {'best ν':>9} {'least':>10} {'bound below':>12}")
    for d in (2, 11, 101, 1001, 10001):
        wide = Quadratic(Spectrum.from_eigenvalues([1.0, 1 / (d - 1)], [1, d - 1]), 0.05)
        least = optimal_error(wide)
        errors = [stationary_error(m, wide) / least for m in (DPSGD(), best_lambda(wide), best_nu(wide))]
        print(
            f"{d:8} {wide.spectrum.effective_dimension:6.2f} {errors[0]:9.3f} {errors[1]:9.3f} {errors[2]:9.3f} {least:10.5f}"
            f" {bound_below(wide):12.5f}"
        )
    digits = Quadratic(Spectrum.load(RESULTS / "spectrum-digits.json"), 0.5)
    print(
        "\n512 rounds, k participations 512/k apart, tanh-cnn on digits, η = 0.5: loss at equal privacy over that of dp-sgd"
    )
    print(
        f"{'k':>4} {'λ':>7} {'best λ':>8} {'excess':>9} {'best ν':>8} {'blt:2':>8} {'noise-curve:8':>13} {'band-mf:8':>9}"
    )
    for k in (1, 2, 4, 8, 16, 32, 64):
        who = Participation(rounds=512, min_separation=512 // k)
        best = fitted.lambda_cgd(who, quadratic=digits)
        made = [
            DPSGD(),
            best,
            excess(who),
            fitted.nu_dp_ftrl(who, quadratic=digits),
            blt(2, who, quadratic=digits),
            catalogue.mechanism("noise-curve:8", who, curvature=digits),
            catalogue.mechanism("band-mf:8", who),
        ]
        found = [final_loss(m, who.rounds, digits, stddev=sensitivity(m, who).value) for m in made]
        of = [loss / found[0] for loss in found[1:]]
        print(
            f"{k:4} {best.lam:7.4f} {of[0]:8.3f} {of[1]:9.3f} {of[2]:8.3f} {of[3]:8.3f} {of[4]:13.3f} {of[5]:9.3f}",
            flush=True,
        )


def excess(who: Participation) -> Mechanism:
    return LambdaCGD(select_lambda(who, objective="excess", epsilon=8, delta=1e-5).lam)


def networks() -> None:
    who = Participation(rounds=400, min_separation=40)
    print("400 rounds, 10 participations 40 apart: over dp-sgd, at equal privacy (sens = √10 for all)")
    print("noise-curve with a barrier of 0.01, and of 1, the default")
    print(f"{'':27} {'loss':>29}      {'mean ‖∇L‖²':>20}")
    heads = "".join(f"{head:>10}" for head in ("band-mf", "0.01", "1"))
    print(f"{'spectrum':16} {'η·‖H‖':>6} {'p':>3}{heads}     {heads}")
    for name in ("digits", "fashion-mnist"):
        spectrum = Spectrum.load(RESULTS / f"spectrum-{name}.json")
        for steep in (1.0, 0.1):
            quadratic = Quadratic(spectrum, steep / spectrum.largest)
            for p in (2, 4, 8, 16, 32):
                made = [catalogue.mechanism(f"band-mf:{p}", who)]
                made += [noise_curve(p, who, quadratic=quadratic, barrier=barrier) for barrier in (0.01, 1.0)]
                found = [
                    "".join(f"{measure(m, 400, quadratic) / measure(DPSGD(), 400, quadratic):10.4f}" for m in made)
                    for measure in (final_loss, gradient_norm)
                ]
                print(f"{name:16} {steep:6g} {p:3}{found[0]}     {found[1]}", flush=True)


def barriers() -> None:
    """What the barrier of noise-curve buys, and what it costs."""
    quadratic = Quadratic(Spectrum.load(RESULTS / "spectrum-digits.json"), 0.5)
    who, n = Participation(rounds=400, min_separation=40), 400
    base = [measure(DPSGD(), n, quadratic) for measure in (final_loss, gradient_norm)]
    print(
        "digits, η = 0.5, 400 rounds, 10 participations, 16 bands: over dp-sgd, at equal privacy; the noise of a round"
    )
    print(f"{'':20} {'loss':>7} {'mean ‖∇L‖²':>11} {'noise of a round: rms':>22} {'largest':>8}")
    made: dict[str, Mechanism] = {"band-mf:16": catalogue.mechanism("band-mf:16", who)}
    for barrier in (0.01, 0.1, 0.3, 1.0, 3.0):
        made[f"noise-curve:16, {barrier:g}"] = noise_curve(16, who, quadratic=quadratic, barrier=barrier)
    for name, mechanism in made.items():
        noise = np.sqrt((inverse_matrix(mechanism, n) ** 2).sum(axis=1))
        print(
            f"{name:20} {final_loss(mechanism, n, quadratic) / base[0]:7.4f} "
            f"{gradient_norm(mechanism, n, quadratic) / base[1]:11.3f} {np.sqrt((noise**2).mean()):22.2f} {noise.max():8.2f}",
            flush=True,
        )


def plots() -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "fedcgd"  # the same file for the same numbers
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    kinds: dict[str, Callable[[Quadratic], float]] = {
        "independent noise (DP-SGD)": lambda q: stationary_error(DPSGD(), q),
        "best λ (DP-λCGD)": lambda q: stationary_error(best_lambda(q), q),
        "best ν (ν-DP-FTRL)": lambda q: stationary_error(best_nu(q), q),
        "best noise": optimal_error,
    }
    styles = dict(zip(kinds, ("C1.-", "C0.-", "C2.-", "k--"), strict=True))
    dimensions = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    wide = [Quadratic(Spectrum.from_eigenvalues([1.0, 1 / (d - 1)], [1, d - 1]), 0.05) for d in dimensions]
    rates = np.geomspace(1e-4, 0.8, 25)
    narrow = [Quadratic(Spectrum.from_eigenvalues([1.0]), float(rate)) for rate in rates]
    for name, error in kinds.items():
        left.loglog(dimensions, [error(q) for q in wide], styles[name], label=name)
        middle.loglog(rates, [error(q) for q in narrow], styles[name], label=name)
    left.loglog(dimensions, [bound_below(q) for q in wide], "k:", label="bound: η²·‖H‖·d_eff/2")
    left.set(xlabel="dimension d, at d_eff = 2 and η = 0.05", ylabel="stationary loss · 2ρ", title="d or d_eff")
    middle.set(xlabel="η·μ, in one dimension", ylabel="stationary loss · 2ρ", title="learning rate")
    lags = np.arange(1, 201)
    for rate, colour in ((0.5, "C3"), (0.1, "C0"), (0.01, "C2")):
        one = Quadratic(Spectrum.from_eigenvalues([1.0]), rate)
        right.loglog(lags, optimal_coefficients(one, 200), colour, label=f"β*, one dimension, η·μ = {rate}")
    spread = Quadratic(Spectrum.from_eigenvalues(np.geomspace(1e-3, 1, 200)), 0.5)
    right.loglog(lags, optimal_coefficients(spread, 200), "C4", label="β*, μ from 10⁻³ to 1, η = 0.5")
    right.loglog(lags, lags**-1.5 / (2 * math.sqrt(math.pi)), "k:", label="t^(−3/2)/(2√π)")
    right.set(
        xlabel="lag t",
        ylabel="β*_t: part of the noise of t rounds ago",
        ylim=(1e-7, 1),
        title="optimal β",
    )
    for axes in (left, middle, right):
        axes.legend(fontsize=8)
    figure.savefig(PICTURE, metadata={"Date": None})
    print(f"drawn: {PICTURE}")


PARTS = {
    "simulation": simulation,
    "regression": regression,
    "one-number": one_number,
    "networks": networks,
    "barriers": barriers,
    "plots": plots,
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("part", nargs="*", choices=[*PARTS, []], help="default: all")
    for part in options.parse_args().part or PARTS:
        print(f"\n== {part}", flush=True)
        PARTS[part]()


if __name__ == "__main__":
    main()
