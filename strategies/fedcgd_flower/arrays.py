"""Flower's arrays, each a NumPy file in a message: read, made and written with as few copies as can be."""

import ctypes
import math
import mmap
import time
from functools import cached_property
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array
from numpy.typing import NDArray

_LARGE = 2**22  # bytes: NumPy asks for large pages from here on
_LARGE_PAGE = mmap.PAGESIZE**2 // 8  # bytes: what one table of 8-byte entries maps
_SMALL_PAGES_TAKE = 4e-6 * _LARGE_PAGE / mmap.PAGESIZE  # seconds, at most
_STYPE = "numpy.ndarray"  # Flower's name for bytes that numpy.save wrote


def view(array: Array) -> NDArray[Any]:
    """`array.numpy()`, read-only, without a copy of its bytes if Flower wrote them. Raises whatever NumPy does on other bytes."""
    file = BytesIO(array.data)  # shares the bytes
    if array.stype == _STYPE and np.lib.format.read_magic(file) == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        if not fortran and not dtype.hasobject:
            return np.frombuffer(array.data, dtype, math.prod(shape), file.tell()).reshape(shape)
    return array.numpy()


class Outgoing:
    """An array of `shape`, not empty, in the memory of the message that will carry it. It is written to, and then `sent`."""

    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic] | np.dtype[Any]) -> None:
        header, size = _header(shape, np.dtype(dtype)), math.prod(shape) * np.dtype(dtype).itemsize
        self._file = BytesIO(bytes(len(header) + size))  # zeros that are not in memory yet, and no copy
        buffer = self._file.getbuffer()
        if size >= _LARGE:
            _ask_for_large_pages(np.frombuffer(buffer, np.uint8))
        buffer[: len(header)] = header
        self.array: NDArray[Any] = np.frombuffer(buffer, dtype, offset=len(header)).reshape(shape)

    @staticmethod
    def of(value: NDArray[Any]) -> "Outgoing":
        """A copy of `value`."""
        copy = Outgoing(value.shape, value.dtype)
        copy.array[...] = value
        return copy

    def sent(self) -> Array:
        """The array as it is now. Whoever holds on to `array` makes this copy it."""
        dtype, shape = str(self.array.dtype), self.array.shape
        del self.array
        return Array(dtype, shape, _STYPE, self._file.getvalue())


def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """What `numpy.save` writes before the numbers."""
    file = BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()


def _ask_for_large_pages(memory: NDArray[np.uint8]) -> None:
    """Ask Linux for large pages: most of the time that writing to new memory takes is spent on getting small ones.

    A large page saves time only if the kernel has one ready: putting it together first takes five times as long as small pages.
    So each page is touched now, and after the first that took longer than small ones would, the rest is of small ones.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    start = memory.ctypes.data
    end = start + len(memory)
    _advise(start, end, mmap.MADV_HUGEPAGE)
    for page in range(-(-start // _LARGE_PAGE) * _LARGE_PAGE, end - _LARGE_PAGE + 1, _LARGE_PAGE):
        begin = time.thread_time()
        memory[page - start] = 0
        if time.thread_time() - begin > _SMALL_PAGES_TAKE:
            _advise(page + _LARGE_PAGE, end, mmap.MADV_NOHUGEPAGE)
            return


def _advise(start: int, end: int, advice: int) -> None:
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if start < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


def array_of(value: NDArray[Any]) -> Array:
    """`Array(value)`, in one copy instead of three where `value` is contiguous."""
    if not value.flags.c_contiguous or not value.size:
        return Array(value)
    return Outgoing.of(value).sent()


class LazyArray(Array):
    """`Array(value)`, whose bytes are made when somebody asks for them; most ask for `numpy()`, a copy. `value` stays so."""

    def __init__(self, value: NDArray[Any]) -> None:
        self.dtype, self.shape, self.stype = str(value.dtype), value.shape, _STYPE
        self._value = value

    @cached_property
    def data(self) -> bytes:  # type: ignore[override]
        """What Flower sends."""
        return array_of(self._value).data

    def numpy(self) -> NDArray[Any]:
        """A copy, which may be written to."""
        return self._value.copy()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and Array(self.dtype, self.shape, self.stype, self.data) == Array(
            other.dtype, other.shape, other.stype, other.data
        )

    __hash__ = None  # type: ignore[assignment]  # as of every Array

    def __reduce__(self) -> tuple[Any, ...]:
        return Array, (self.dtype, self.shape, self.stype, self.data)


def is_float32(array: Array) -> bool:
    """Whether it is, in its bytes too."""
    return (array.dtype, array.stype) == ("float32", _STYPE) and view(array).dtype == np.float32
