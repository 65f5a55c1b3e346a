"""The GPU's kernels make the bits that NumPy makes: run by Triton's interpreter, and read as compiled for NVIDIA's devices."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

INTERPRETED = Path(__file__).with_name("interpreted_kernels.py")


def test_kernels_give_the_answers_of_numpy_in_tritons_interpreter() -> None:
    """In a process of its own, whose tests say what they compare."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def compiled(
    *,
    rounded: bool = True,
    values: bool = False,
    ones: tuple[str, ...] = (),
    capability: int = 90,
) -> dict[str, Any]:
    """What Triton makes of the noise's kernel. Arguments of value 1 are constants to it."""
    from fedcgd.noise import gpu_code

    sums = "*i64" if rounded else "*fp32"
    types = {"total": sums, "values": "*fp32" if values else "constexpr", "keys": "*i32", "numbers": "*fp64"}
    types |= {"terms": "i32", "start": "i32", "stop": "i64", "ROUND": "constexpr"} | dict.fromkeys(ones, "constexpr")
    constants = {"ROUND": rounded} | ({} if values else {"values": None}) | dict.fromkeys(ones, 1)
    return assembled(gpu_code._noise, types, constants, gpu_code.OPTIONS, capability)


def assembled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any], capability: int = 90
) -> dict[str, Any]:
    """What Triton makes of `kernel` for a compute capability (90 is 9.0), down to the binary: needs no device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, types, constants)
    asm: dict[str, Any] = triton.compile(source, GPUTarget("cuda", capability, 32), options).asm
    assert asm["cubin"]
    return asm


def instructions(ptx: str) -> Counter[str]:
    return Counter(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.]*)", ptx, re.MULTILINE))


@pytest.fixture(autouse=True)
def _no_cache_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rounded": False, "ones": ("terms",)},
        {"values": True},
        {"ones": ("terms", "start")},
        *(pytest.param({"capability": version}, marks=pytest.mark.slow) for version in (70, 80, 89, 100)),
    ],
    ids=str,
)
def test_compiled_arithmetic_is_rounded_after_every_operation(options: dict[str, Any]) -> None:
    ptx = compiled(**options)["ptx"]
    floats = Counter({o: n for o, n in instructions(ptx).items() if re.search(r"\.f(32|64)", o)})
    rounding, exact = {"add", "sub", "mul", "div", "sqrt"}, {"cvt", "mov", "selp", "neg", "abs"}
    assert {o.partition(".")[0] for o in floats} <= rounding | exact
    rounds = {o for o in floats if o.partition(".")[0] in rounding}
    kinds = {o.partition(".")[2].replace("x2", "") for o in rounds}  # two at once, from capability 10.0 on
    assert kinds == {"rn.f32", "rn.f64"}  # not .approx, .full, .ftz or another rounding
    assert floats["div.rn.f32"] == 2
    assert floats["sqrt.rn.f32"] == 12
    assert not any("ftz" in o for o in floats)


@pytest.mark.filterwarnings("ignore:AnnAssign:DeprecationWarning")  # Triton's own, from Python 3.13
@pytest.mark.parametrize("size", ["i32", "i64"])
def test_the_other_kernels_compile_and_count_beyond_what_an_int32_holds(size: str) -> None:
    """All their rows and numbers may be 2³¹ and more, also where each of their counts is less."""
    from fedcgd.clipping import gpu_code as clipping
    from fedcgd.noise import gpu_code

    for module, kernel, types, constants in (
        (
            gpu_code, gpu_code._tile_hashes,
            {"out": "*i64", "numbers": "*i64", "coefficients": "*i64", "size": size},
            {"HASHES": 4, "BLOCK": 2048},
        ),
        (
            clipping, clipping._squares,
            {"rows": "*fp32", "out": "*fp64", "columns": size},
            {"STRETCH": 8192, "BLOCK": 512},
        ),
        (
            clipping, clipping._accumulate,
            {"total": "*i64", "rows": "*fp32", "factors": "*fp64", "count": "i32", "columns": size},
            {"GROUP": 64, "ROWS": 8, "BLOCK": 512},
        ),
    ):  # fmt: skip
        types |= dict.fromkeys(constants, "constexpr")
        code = assembled(kernel, types, constants, module.OPTIONS)["ttir"]
        assert set(re.findall(r"arith\.muli .*?\b\d*x?(i\d+)\b", code)) == {"i64"}


def test_kernels_are_launched_where_their_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device: for tensors on another one that would be a fault, or another device's memory."""
    from fedcgd.clipping import gpu_code as clipping
    from fedcgd.noise import gpu_code

    current: list[Tensor | None] = [None]
    launched_on: list[Tensor | None] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    kernel = MagicMock()
    kernel.__getitem__.return_value = lambda *_, **__: launched_on.append(current[-1])
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for name in ("_noise", "_tile_hashes"):
        monkeypatch.setattr(gpu_code, name, kernel)
    for name in ("_squares", "_accumulate"):
        monkeypatch.setattr(clipping, name, kernel)
    total, key, rows = torch.zeros(10, dtype=torch.int64), np.zeros(8, np.uint32), torch.ones(2, 10)
    gpu_code.add_to_grid(total, 0, [key], [1.0], key, 1.0)
    gpu_code.add_values_to_grid(total, 0, total, 1.0, key, 1.0)
    gpu_code.fill_normals(total, 0, key)
    gpu_code.tile_hashes(total, torch.ones(1, 16, dtype=torch.int64))
    clipping.squares(rows)
    clipping.accumulate(rows, torch.ones(2, dtype=torch.float64), torch.zeros(10, dtype=torch.int64))
    assert [id(tensor) for tensor in launched_on] == [id(total)] * 4 + [id(rows)] * 2
