"""Flower: the server strategy, the client mod, and nodes that host many users.

Names are loaded when they are first used: a node, a new process for each message, does not load what the server needs.
"""

from typing import TYPE_CHECKING

from fedcgd.support.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from fedcgd_flower.clipping import AdaptiveClipping
    from fedcgd_flower.evaluation import PrivateEvaluation
    from fedcgd_flower.inner import scheduled
    from fedcgd_flower.mod import ClippedUpdateMod, clipped_update_mod
    from fedcgd_flower.run_loop import IncompleteRunError, ReleaseEvent, RunResult
    from fedcgd_flower.strategy import CorrelatedNoise
    from fedcgd_flower.torch_models import arrays_of, load_arrays, one_gradient_step
    from fedcgd_flower.user_training import (
        LocalEvaluation,
        LocalTask,
        host_users,
        sequential_training,
    )

__all__ = [
    "AdaptiveClipping",
    "ClippedUpdateMod",
    "CorrelatedNoise",
    "IncompleteRunError",
    "LocalEvaluation",
    "LocalTask",
    "PrivateEvaluation",
    "ReleaseEvent",
    "RunResult",
    "arrays_of",
    "clipped_update_mod",
    "host_users",
    "load_arrays",
    "one_gradient_step",
    "scheduled",
    "sequential_training",
]

__getattr__ = lazy_exports(
    __name__,
    dict.fromkeys(__all__, "user_training")  # but for those that follow
    | {
        "AdaptiveClipping": "clipping",
        "ClippedUpdateMod": "mod",
        "CorrelatedNoise": "strategy",
        "IncompleteRunError": "run_loop",
        "PrivateEvaluation": "evaluation",
        "ReleaseEvent": "run_loop",
        "RunResult": "run_loop",
        "arrays_of": "torch_models",
        "clipped_update_mod": "mod",
        "load_arrays": "torch_models",
        "one_gradient_step": "torch_models",
        "scheduled": "inner",
    },
)


def __dir__() -> list[str]:
    return __all__
