"""Ledgers that tests make, and what they ask of one: the reason why it refuses, and the reasons of what it finds."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcgd import Ledger, NoiseKey, Plan
from fedcgd.ledger import Finding, LedgerError, seal

KEY = NoiseKey(bytes(range(32)))


def refused(reason: str) -> Any:
    """As `pytest.raises`, for what the ledger refuses for this reason."""
    return pytest.raises(LedgerError, check=lambda error: error.reason == reason)


def reasons(found: Iterable[Finding]) -> list[str]:
    return [one.reason for one in found]


def release(
    ledger: Ledger,
    round: int,
    users: list[str],
    model: bytes = b"model",
    state: bytes = b"",
    layout: str = "",
    **more: Any,
) -> int:
    """The round is planned, summed and released at once; its nonce."""
    attempt = ledger.plan_round(round, users)
    nonce = KEY.nonce_of(ledger.stream_id, np.zeros(3), earlier=ledger.resume().nonces, attempt=attempt)
    ledger.record_aggregated(round, attempt, nonce)
    ledger.record_released(round, attempt, model, state, layout, **more)
    return nonce


def recorded(
    path: Path,
    users: list[str],
    plan: Plan,
    key: NoiseKey = KEY,
    *,
    configuration: Any = None,
    over: bool = True,
    **more: Any,
) -> Path:
    """The ledger of a run that has released a round, for which it asked `users`, with what `release` takes; sealed if `over`."""
    with Ledger.open(path, plan=plan, configuration=configuration or {"run": path.stem}, key=key) as ledger:
        release(ledger, 0, users, **more)
    if over:
        seal(path, None)
    return path


MODEL = {"model": np.ones(3, np.float32).tobytes(), "layout": '[["weight"], [[3]], ["float32"]]'}
"""What `recorded` takes for a model of three numbers."""
