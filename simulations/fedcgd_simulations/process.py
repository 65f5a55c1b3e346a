"""Settings of a process that trains simulated users, one after the other, on a core of its own."""

import ctypes

import torch


def settle() -> None:
    """One thread, and freed memory is kept for the next layer.

    By default the C library hands the memory of each activation back to the kernel, which fills it with zeros, page by page, when
    the next layer asks for it again: a seventh of the time of a small network.
    """
    torch.set_num_threads(1)  # one process per core: more threads would fight for it
    trim, mmap = -1, -3  # thresholds, as <malloc.h> of the GNU C library numbers them
    try:
        library = ctypes.CDLL(None)
        if library.mallopt(mmap, 2**25):  # the most it takes; the other alone would fix this one at its lowest
            library.mallopt(trim, 2**28)
    except (AttributeError, OSError, TypeError):  # another C library
        return
