"""The best recipe at an ε: who takes part when, with which noise, and how the model is moved. It looks at public numbers only."""

from fedcgd.planning.input_mean import PrivateMean, private_mean
from fedcgd.planning.landscape import LinearModel
from fedcgd.planning.planner import (
    PlannedRecipe,
    expectation,
    is_hopeless,
    plan_recipes,
    recommended,
    verdict,
)
from fedcgd.planning.problem import PlanningProblem
from fedcgd.planning.proxy import ArrayProxy
from fedcgd.planning.recipe import Recipe
from fedcgd.planning.rehearsal import Rehearsal, RehearsedRecipe, rehearse
from fedcgd.planning.render import as_command, as_python, as_run_config
from fedcgd.planning.theory import Outcome

__all__ = [
    "ArrayProxy",
    "LinearModel",
    "Outcome",
    "PlannedRecipe",
    "PlanningProblem",
    "PrivateMean",
    "Recipe",
    "Rehearsal",
    "RehearsedRecipe",
    "as_command",
    "as_python",
    "as_run_config",
    "expectation",
    "is_hopeless",
    "plan_recipes",
    "private_mean",
    "recommended",
    "rehearse",
    "verdict",
]
