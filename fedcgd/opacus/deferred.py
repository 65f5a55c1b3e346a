"""What is found out on the device, and judged on the host later, so that the host waits once for all of it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Finding(NamedTuple):
    """Numbers that a device is to make, and what they mean."""

    numbers: Tensor
    """Shape (count,), float64."""
    judge: Callable[[list[float]], None]
    """Raises an error for what may not be."""


def judge(findings: Sequence[Finding]) -> None:
    """Have each of `findings` judged, in their order."""
    device = next(
        (found.numbers.device for found in findings if found.numbers.device.type != "cpu"), torch.device("cpu")
    )
    together = torch.cat([found.numbers.to(device) for found in findings]).tolist()
    first = 0
    for found in findings:
        last = first + len(found.numbers)
        found.judge(together[first:last])
        first = last
