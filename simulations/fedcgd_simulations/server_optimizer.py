"""What the settings of the server's descent, and of what is evaluated, may be."""

from fedcgd.mechanisms.schedule import SCHEDULES


def check_descent(momentum: float, schedule: str) -> None:
    """Raise ValueError for an unknown schedule, and for momentum that is not in [0, 1)."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")


def check_average(average: float, augmentations: int) -> None:
    """Raise ValueError for a decay of the average of models that is not in [0, 1), and fewer than no copies of an example."""
    if not 0 <= average < 1:
        raise ValueError(f"average must be in [0, 1), got {average}: the decay, for example 0.99; 0 is the last model")
    if augmentations < 0:
        raise ValueError(f"augmentations must be at least 0, got {augmentations}")
