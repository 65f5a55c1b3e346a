"""One model trained by one mechanism: a study with one arm, whose candidates are its learning rates."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from torch import nn

from fedcgd.planning.landscape import Landscape, LinearModel
from fedcgd.planning.recipe import Recipe
from fedcgd.planning.theory import expected_outcome
from fedcgd_experiments.central import CentralTrainer, check_steps, claim, mechanism_of
from fedcgd_experiments.comparison import tuned
from fedcgd_experiments.point import TEST_SEEDS, CentralPoint
from fedcgd_experiments.results import Row, claims, known
from fedcgd_experiments.study import Study, Values, best
from fedcgd_experiments.tables import spread
from fedcgd_simulations.local_softmax import is_softmax
from fedcgd_simulations.tasks import get_task


def training(point: CentralPoint, rates: Mapping[float, Sequence[float]], seeds: int) -> Study:
    """`point` at each ε of `rates` with each of its rates, as many at each; one seed to tune by, and `seeds` to test."""
    fixed = {name: value for name, value in asdict(point).items() if name not in ("epsilon", "learning_rate")}
    count = len(next(iter(rates.values())))

    def made(values: Values) -> CentralPoint:
        given = {**fixed, **values}
        rate = rates[given["epsilon"]][given.pop("rate")]
        return CentralPoint(**given, learning_rate=rate)

    return Study(
        name=f"{point.task}-{point.model}",
        title=f"{point.model}, {point.mechanism}, sampling {point.sampling}, {point.epochs} epochs of {point.steps} rounds",
        make=made,
        settings=tuple({"epsilon": epsilon, "epochs": point.epochs} for epsilon in rates),
        axes={"rate": range(count)},
        arms={point.mechanism: {"sampling": (point.sampling,)}},
        candidates=count,
        finalists=1,
        tuning=(0,),
        tests=tuple(range(TEST_SEEDS, TEST_SEEDS + seeds)),
        baselines={},
        work="epochs",
        unit="epochs",
    )


def planned_rates(point: CentralPoint, trainer: CentralTrainer) -> list[float]:
    """Half, once and twice the rate that theory expects to be best, of what is public: sizes, budget and how the model moves."""
    task, train = get_task(point.task, model=point.model or None, data_dir=trainer.data_dir), trainer.load(point).train
    check_steps(len(train), point.steps)
    model = task.model(0)
    landscape = Landscape.typical()
    if is_softmax(model, task.loss):
        linear = next(layer for layer in model.modules() if isinstance(layer, nn.Linear))
        landscape = Landscape.linear(LinearModel(classes=linear.out_features, features=linear.in_features))
    recipe = Recipe(
        mechanism=point.mechanism, sampling=point.sampling, users=len(train), steps=point.steps, participations=point.epochs,
        schedule=point.schedule, momentum=point.momentum,
    )  # fmt: skip
    sigma = claim(point.setup)["noise_multiplier"]
    best = expected_outcome(recipe, mechanism_of(point.setup), sigma, landscape).learning_rate / point.clip_norm
    return [float(f"{factor * best:.3g}") for factor in (0.5, 1, 2)]


def widened(study: Study, rates: Mapping[float, Sequence[float]], rows: Sequence[Row]) -> dict[float, Sequence[float]]:
    """`rates`, and one more at an end at which validation found the best of some ε; as they are where none lies at an end."""
    accuracies, [arm] = known(rows, CentralPoint), study.arms
    ends = {-1: False, 1: False}
    for setting in study.settings:
        chosen = best(study, arm, setting, accuracies)
        mine = rates[setting["epsilon"]]
        if chosen and len(mine) < 10:
            rate = chosen[0].learning_rate  # type: ignore[attr-defined]
            ends[-1] |= rate == min(mine)
            ends[1] |= rate == max(mine)
    return {
        epsilon: [*([min(mine) / 2] if ends[-1] else []), *mine, *([2 * max(mine)] if ends[1] else [])]
        for epsilon, mine in rates.items()
    }


def outcome(study: Study, rows: Sequence[Row]) -> str:
    """The test accuracy of what validation chose, and what its ε means; empty while some of it is missing."""
    lines = []
    for one in tuned(study, rows, CentralPoint):
        [*tests] = one.tests.values()
        percent = spread(one.accuracies.values()) or f"{100 * tests[0]['accuracy']:.1f}"
        lines.append(
            f"{study.title}: {percent} % of test examples ({len(tests)} seeds) at ε = {one.setting['epsilon']:g}, "
            f"learning rate {one.point.learning_rate:g}\n{claims(tests)}\n"
        )
    return "".join(lines)
