"""A process that trains simulated users keeps the memory that a layer has freed."""

import platform
import resource

import pytest
import torch

from fedcgd_simulations.process import settle

pytestmark = pytest.mark.usefixtures("threads_as_they_were")


def faults() -> int:
    """Pages that the kernel had to fill for four tensors of 16 MiB, which are made and freed ten times."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        _ = [torch.ones(2**22) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of the GNU C library")
def test_freed_memory_is_kept() -> None:
    settle()
    faults()
    assert faults() < 2**12  # the pages of one tensor
    assert torch.get_num_threads() == 1


def test_another_c_library_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    settle()
    assert torch.get_num_threads() == 1
