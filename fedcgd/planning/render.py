"""A planned recipe as what runs it: Python, and the command and configuration of the simulation app."""

from fedcgd.optimisation.catalogue import spelling_of
from fedcgd.planning.planner import PlannedRecipe
from fedcgd.planning.problem import PlanningProblem
from fedcgd.planning.recipe import Recipe


def as_python(planned: PlannedRecipe, problem: PlanningProblem, *, clip_norm: float = 1.0) -> str:
    """A program that makes the `Plan`, which strategy and engine take, and prints its ε; its last lines say how to descend.

    Args:
        planned: one of what `plan_recipes` returned.
        problem: what it was asked.
        clip_norm: ζ, in units of the update.
    """
    recipe = planned.recipe
    rate = planned.outcome.learning_rate / clip_norm
    workload = f'scheduled_workload("{recipe.schedule}", {recipe.rounds}, momentum={recipe.momentum:g})'
    lines = [
        "from fedcgd import Participation, Plan",
        *(["from fedcgd.mechanisms.schedule import scheduled_workload"] if planned.correlated else []),
        "",
        "plan = Plan.calibrated(",
        f'    "{_spelling(planned)}",',
        f"    {recipe.participation.as_python()},",
        f"    clip_norm={clip_norm:g}, epsilon={problem.epsilon:g}, delta={problem.delta:g},",
        *([f"    workload={workload},"] if planned.correlated else []),
        ")",
        "print(plan.guarantee())",
        f"# {_cohort(recipe)}{_loader(recipe)}. "
        f"SGD, momentum {recipe.momentum:g}, learning rate {rate:.3g}{_falls(recipe)}.",
        "# In Opacus: CorrelatedPrivacyEngine(key=key).make_private(..., plan=plan)",
        f"# In Flower: CorrelatedNoise(inner, plan, key=key), inner = {_flower(recipe, rate)}",
    ]
    return "\n".join(lines)


def as_run_config(planned: PlannedRecipe, problem: PlanningProblem, *, clip_norm: float = 1.0) -> str:
    """What `flwr run simulations --run-config` takes, as one text.

    Args:
        planned: one of what `plan_recipes` returned.
        problem: what it was asked.
        clip_norm: ζ, in units of the update.
    """
    values = run_configuration(planned, problem, clip_norm=clip_norm)
    return " ".join(
        f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in values.items()
    )


def as_command(planned: PlannedRecipe, problem: PlanningProblem, *, clip_norm: float = 1.0) -> str:
    """The command that runs it in the simulation app.

    Args:
        planned: one of what `plan_recipes` returned.
        problem: what it was asked.
        clip_norm: ζ, in units of the update.
    """
    return f"flwr run simulations --stream --run-config '{as_run_config(planned, problem, clip_norm=clip_norm)}'"


def run_configuration(
    planned: PlannedRecipe, problem: PlanningProblem, *, clip_norm: float = 1.0
) -> dict[str, str | int | float]:
    """The settings of the simulation app, by their keys."""
    recipe = planned.recipe
    return {
        "mechanism": _spelling(planned),
        "sampling": recipe.sampling,
        "epsilon": problem.epsilon,
        "delta": problem.delta,
        "clip-norm": clip_norm,
        "cohort": recipe.cohort,
        "participations": recipe.participations,
        "learning-rate": float(f"{planned.outcome.learning_rate / clip_norm:.3g}"),
        "momentum": recipe.momentum,
        "schedule": recipe.schedule,
    }


def _spelling(planned: PlannedRecipe) -> str:
    """How it is asked for: what is optimised is found again for the same workload."""
    return planned.recipe.mechanism if planned.recipe.mechanism != "dp-sgd" else spelling_of(planned.mechanism)


def _flower(recipe: Recipe, rate: float) -> str:
    """The inner strategy that descends so; `scheduled` is of `fedcgd_flower`."""
    falls = recipe.schedule != "constant"
    strategy = f'scheduled(FedAvgM, "{recipe.schedule}", rounds={recipe.rounds})' if falls else "FedAvgM"
    return f"{strategy}(min_train_nodes={recipe.cohort}, server_learning_rate={rate:.3g}, server_momentum={recipe.momentum:g})"


def _cohort(recipe: Recipe) -> str:
    return f"{recipe.cohort} users in each round{', on average' if recipe.participation.is_secret else ''}"


def _loader(recipe: Recipe) -> str:
    """How a DataLoader makes as many batches as the plan has rounds in an epoch, where the users don't divide evenly."""
    return f" (a DataLoader: batch_size={recipe.cohort}, drop_last=True)" if recipe.users % recipe.steps else ""


def _falls(recipe: Recipe) -> str:
    return (
        ""
        if recipe.schedule == "constant"
        else f", which falls to 0 over the {recipe.rounds} rounds ({recipe.schedule})"
    )
