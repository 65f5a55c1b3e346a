"""CIFAR-10 and IMDB as in arXiv:2601.22334, for those who have the data and a GPU: `simulations/paper.sh` runs these studies.

Figures 5 and 6 need no training: `python -m fedcgd_experiments.paper_figures`.
"""

from functools import partial
from typing import Any

from fedcgd.participation import scheme_of
from fedcgd_experiments.point import TEST_SEEDS, CentralPoint
from fedcgd_experiments.study import Log, Study, Values

_LAMBDAS = tuple(f"lambda-cgd:{lam:g}" for lam in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.975))
_OTHERS = ("bisr:2", "bisr:4", "bisr:16", "band-inv-mf:2", "band-inv-mf:4", "band-inv-mf:16", "blt:3", "blt:4")
_RATES = {"cifar10": Log(0.02, 0.5), "imdb": Log(0.05, 1.0)}
EXAMPLES = {"cifar10": 45_000, "imdb": 22_500}
"""That are trained on; a tenth of the training examples is for validation."""


def paper_study(
    name: str,
    title: str,
    *,
    task: str,
    model: str,
    batch: int,
    epochs: int = 10,
    sampling: str = "none",
    mechanisms: tuple[str, ...] = (*_LAMBDAS, *_OTHERS),
    epsilons: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    candidates: int = 20,
    apart: bool = False,
) -> Study:
    """Each mechanism at each ε, all with as many candidates: of number and rate together, or if `apart` of each number's rate."""
    arms: dict[str, list[str]] = {}
    for spelling in mechanisms:
        arms.setdefault(spelling if apart else spelling.split(":")[0], []).append(spelling)
    return Study(
        name=name,
        title=title,
        make=partial(_point, task=task, model=model, steps=-(-EXAMPLES[task] // batch), clip_norm=8.0),
        settings=tuple({"epsilon": epsilon, "epochs": epochs} for epsilon in epsilons),
        axes={"learning_rate": _RATES[task]},
        arms={arm: {"mechanism": tuple(some), "sampling": (sampling,)} for arm, some in arms.items()},
        candidates=candidates,
        finalists=min(3, candidates // 2),
        tuning=(0, 1, 2),
        tests=tuple(range(TEST_SEEDS, TEST_SEEDS + 3)),
        baselines={
            "sampling" if scheme_of(sampling).hidden else "nothing": tuple(arm for arm in arms if arm == "dp-sgd")
        },
        work="epochs",
        unit="epochs",
    )


def _point(values: Values, **fixed: Any) -> CentralPoint:
    made: dict[str, Any] = {**fixed, **values, "learning_rate": float(f"{values['learning_rate']:.3g}")}
    return CentralPoint(**made)


def _lambdas(name: str, title: str, task: str, batch: int, *, epochs: int = 10, sampling: str = "none") -> Study:
    """A sweep over λ, with four rates for each: of the CNN on CIFAR-10, of BERT-tiny on IMDB."""
    return paper_study(
        name, title, task=task, model="cnn" if task == "cifar10" else "bert-tiny", batch=batch, epochs=epochs,
        sampling=sampling, mechanisms=("dp-sgd", *_LAMBDAS), epsilons=(1.0, 4.0, 8.0), candidates=4, apart=True,
    )  # fmt: skip


_TABLE_3: dict[str, tuple[tuple[str, float], ...]] = {
    "dp-sgd": tuple(("dp-sgd", rate) for rate in (0.05, 0.08, 0.2, 0.2, 0.2, 0.2)),
    "lambda-cgd": tuple(
        (f"lambda-cgd:{lam}", rate)
        for lam, rate in ((0.8, 0.05), (0.9, 0.08), (0.9, 0.2), (0.9, 0.2), (0.95, 0.5), (0.95, 0.5))
    ),
    "band-inv-mf:2": tuple(("lambda-cgd:0.977", rate) for rate in (0.02, 0.05, 0.08, 0.2, 0.2, 0.5)),
    "band-inv-mf:16": tuple(("band-inv-mf:16", rate) for rate in (0.02, 0.08, 0.08, 0.2, 0.5, 0.5)),
    "bisr:2": tuple(("bisr:2", rate) for rate in (0.05, 0.08, 0.1, 0.1, 0.2, 0.2)),
    "bisr:16": tuple(("bisr:16", rate) for rate in (0.05, 0.1, 0.2, 0.2, 0.5, 0.5)),
    "blt": tuple(("blt:4", rate) for rate in (0.05, 0.1, 0.2, 0.5, 0.5, 0.5)),
}
"""By method and then ε: the mechanism and the rate. Of two bands C⁻¹ is that of λ-CGD with the λ of the table."""


def _table_3() -> Study:
    """Figure 4 at the paper's own hyper-parameters: 126 trainings, and nothing to tune."""
    epsilons = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)

    def made(values: Values) -> CentralPoint:
        given = dict(values)
        mechanism, rate = _TABLE_3[given.pop("method")][epsilons.index(given["epsilon"])]
        return _point(
            given | {"learning_rate": rate}, task="cifar10", model="cnn", steps=-(-EXAMPLES["cifar10"] // 128), clip_norm=8.0,
            mechanism=mechanism,
        )  # fmt: skip

    return Study(
        name="table-3",
        title="Figure 4 at the values of Table 3",
        make=made,
        settings=tuple({"epsilon": epsilon, "epochs": 10} for epsilon in epsilons),
        axes={},
        arms={
            method: {"method": (method,), "sampling": ("poisson" if method == "dp-sgd" else "balls-in-bins",)}
            for method in _TABLE_3
        },
        candidates=1,
        finalists=1,
        tuning=(0,),
        tests=tuple(range(TEST_SEEDS, TEST_SEEDS + 3)),
        baselines={"sampling": ("dp-sgd",)},
        work="epochs",
        unit="epochs",
    )


PAPER_STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        *(_lambdas(f"figure-2-cifar10-{b}", "Figure 2 a–c", "cifar10", b) for b in (128, 256, 1024)),
        *(_lambdas(f"figure-2-imdb-{b}", "Figure 2 d–f", "imdb", b) for b in (64, 128, 512)),
        _lambdas("figure-3-cifar10", "Figure 3", "cifar10", 128, sampling="balls-in-bins"),
        _lambdas("figure-3-imdb", "Figure 3", "imdb", 64, sampling="balls-in-bins"),
        paper_study(
            "figure-4-poisson", "Figure 4, Table 3", task="cifar10", model="cnn", batch=128, sampling="poisson",
            mechanisms=("dp-sgd",),
        ),
        paper_study("figure-4", "Figure 4, Table 3", task="cifar10", model="cnn", batch=128, sampling="balls-in-bins"),
        _table_3(),
        *(_lambdas(f"figure-7-imdb-{k}", "Figure 7 a–c", "imdb", 512, epochs=k) for k in (20, 40, 80)),
        *(_lambdas(f"figure-7-cifar10-{k}", "Figure 7 d–f", "cifar10", 1024, epochs=k) for k in (20, 40, 80)),
        paper_study(
            "figure-8-poisson", "Figure 8", task="imdb", model="bert-base", batch=512, sampling="poisson",
            mechanisms=("dp-sgd",),
        ),
        paper_study("figure-8", "Figure 8", task="imdb", model="bert-base", batch=512, sampling="balls-in-bins"),
    )
}  # fmt: skip
