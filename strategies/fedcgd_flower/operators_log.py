"""Lines for the operator, in Flower's own log."""

from logging import ERROR, INFO, WARNING

from fedcgd_flower.flower_private import log


def log_info(text: str) -> None:
    """Log what the operator may want to know."""
    log(INFO, "fedcgd: %s", text)


def log_warning(text: str) -> None:
    """Log what the operator should look at."""
    log(WARNING, "fedcgd: %s", text)


def log_error(text: str) -> None:
    """Log what has failed on this node."""
    log(ERROR, "fedcgd: %s", text)
