"""The GPU's kernels make the bits that NumPy makes: run by Triton's interpreter, and read as compiled for NVIDIA's devices."""

import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedcgd.mechanisms import BSR, LambdaCGD
from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Lattice
from fedcgd.noise.stream import NUMPY, words_of
from fedcgd.noise.tensors import TensorNormals
from fedcgd.release.run_noise import NoiseSource

STREAM = NoiseStream(bytes(range(32)))
KEYS = [STREAM.key_of(round, 2**64 + 7) for round in range(4)]
CARRY = 2**32 * 12  # the coordinate at which the number of a block needs its upper 32 bits
WIDTH = 3e-4

PARTS = [(5, 1600), (CARRY - 700, 1000), (2**40 - 3, 3)]
TERMS = [(1, [1.0]), (4, [0.3, -(2.0**40), 1e-9, 7.0])]
RUNS = [(LambdaCGD(0.8), "replay"), (BSR(3), "cpu-buffer")]
ROW = np.random.default_rng(0).normal(size=333).astype(np.float32)

RANDOM = np.random.default_rng(1)
COEFFICIENTS = RANDOM.integers(-(2**63), 2**63 - 1, (3, 256), dtype=np.int64)
HASHED = [np.rint(RANDOM.normal(size=n) * 2.0**50) for n in (1, 256, 700)]
HASHED.append(HASHED[-1].astype(np.int64) * 2**11)
STEPS = np.rint(RANDOM.normal(size=5000) * 2.0**40)
OTHER = np.eye(1, 5000, 4999)[0]
FACTORS = RANDOM.random(3)
ROWS = [RANDOM.normal(size=(3, 1500)).astype(kind) for kind in (np.float32, np.float16)]
MANY_ROWS = RANDOM.normal(size=(70, 1500)).astype(np.float32)  # more than the kernel takes at a time
MANY_ROWS[7, 1] = np.nan

QUESTIONS: list[tuple[Any, ...]] = [
    *(("normal", KEYS[0], start, size) for start, size in PARTS[1:]),
    *(("noise", start, size, KEYS[:2], [1.3e6, -0.9e6], KEYS[3], WIDTH) for start, size in PARTS),
    *(("noise", 100, 301, KEYS[:n], weights, KEYS[3], WIDTH) for n, weights in TERMS),
    ("values", 77, ROW, 1.7e6, KEYS[3], WIDTH),
    ("same_bits",),
    ("normal", KEYS[0], 7, 0),
    ("normal", KEYS[0], 1535, 1),
    ("normal", KEYS[0], 2**31 - 5, 10),  # past what an int32 holds, in the middle of a tile
    *(("hashes", numbers, COEFFICIENTS) for numbers in HASHED),
    ("sum_digest", STEPS, bytes(32)),
    ("sum_digest", STEPS + OTHER, bytes(32)),
    ("sum_digest", STEPS, bytes(31) + b"1"),
    *(("clipped", rows, 1e6 * FACTORS) for rows in ROWS),
    ("clipped", MANY_ROWS, 1e6 * RANDOM.random(70) * (np.arange(70) != 7)),
    ("clipped", RANDOM.normal(size=(2, 9000)).astype(np.float32), np.ones(2)),  # longer than a program's stretch
    ("clipped", ROWS[0][:0], FACTORS[:0]),
    *(("apart", what) for what in ("noise", "hashes")),
    *(("rounds", mechanism, mode, 3.0, 401) for mechanism, mode in RUNS),
]


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    """Of the worker, to QUESTIONS: Triton reads TRITON_INTERPRET when it is imported, so that it takes a process of its own."""
    worker = Path(__file__).parents[1] / "helpers" / "gpu_worker.py"
    done = subprocess.run(
        [sys.executable, worker],
        input=pickle.dumps(QUESTIONS),
        capture_output=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    found: list[Any] = pickle.loads(done.stdout)
    return found


def of(answers: list[Any], name: str) -> list[tuple[tuple[Any, ...], Any]]:
    return [(tuple(arguments), a) for (asked, *arguments), a in zip(QUESTIONS, answers, strict=True) if asked == name]


def test_numbers_have_the_bits_of_numpy(answers) -> None:
    for (_, start, size), z in of(answers, "normal"):
        expected = STREAM.normal(0, 2**64 + 7, start, start + size)
        np.testing.assert_array_equal(z.view(np.int32), expected.view(np.int32))


def test_sums_have_the_whole_numbers_of_numpy(answers) -> None:
    for (start, size, keys, weights, smoothing, width), total in of(answers, "noise"):
        expected = np.arange(size)
        words = [np.frombuffer(key, "<u4").astype(np.uint32) for key in (*keys, smoothing)]
        NUMPY.add_to_grid(expected, start, words[:-1], weights, words[-1], width)
        np.testing.assert_array_equal(total, expected)
        assert np.abs(expected - np.arange(size)).max() >= 1


def test_noise_made_elsewhere_is_smoothed_and_rounded_as_by_numpy(answers) -> None:
    (((start, row, scale, smoothing, width), total),) = of(answers, "values")
    words = words_of(smoothing, 0, 1)[start : start + len(row)]
    expected = np.arange(len(row)) + np.rint(np.float64(row) * scale + words * width)
    np.testing.assert_array_equal(total, expected)


def test_the_check_before_use_passes(answers) -> None:
    assert of(answers, "same_bits") == [((), True)]


def test_hashes_are_those_of_numpy(answers) -> None:
    for (numbers, coefficients), found in of(answers, "hashes"):
        tiles = np.pad(numbers.astype(np.int64), (0, -len(numbers) % 256)).reshape(-1, 1, 256)
        np.testing.assert_array_equal(found, (tiles * coefficients).sum(-1).reshape(-1))


def test_the_digest_of_a_sum_depends_on_every_number_and_on_the_key(answers) -> None:
    one, changed, keyed = (found for _, found in of(answers, "sum_digest"))
    assert one.shape == (12,)
    differ = one != changed
    assert differ.tolist() == [False] * 8 + [True] * 4  # the last number is of the third tile
    assert (one != keyed).all()


def test_norms_and_sums_of_clipped_rows_are_those_of_numpy(answers) -> None:
    for (rows, factors), (squares, total) in of(answers, "clipped"):
        counted = factors > 0
        np.testing.assert_allclose(squares[counted], np.square(rows[counted], dtype=np.float64).sum(1), rtol=1e-13)
        terms = np.trunc(rows[counted].astype(np.float64) * factors[counted, None])
        np.testing.assert_array_equal(total, np.arange(rows.shape[1]) + terms.sum(0))


def test_numbers_that_are_apart_in_memory_are_refused(answers) -> None:
    assert all("contiguous" in found for _, found in of(answers, "apart"))


def test_a_run_can_move_between_devices(answers) -> None:
    for (mechanism, mode, stddev, size), totals in of(answers, "rounds"):
        source = NoiseSource(mechanism, 3, TensorNormals(STREAM, Lattice(2.0**-18)), mode)
        for t, found in enumerate(totals):
            total = torch.arange(size)
            source.add(total, [5, 0, 7][: t + 1], stddev)
            # What is combined in buffers is combined by torch there and by NumPy here: ends of float32 may differ.
            np.testing.assert_allclose(found, total.numpy(), rtol=0, atol=0 if mode == "replay" else 2)


def compiled(
    *,
    rounded: bool = True,
    values: bool = False,
    fused: bool = False,
    ones: tuple[str, ...] = (),
    capability: int = 90,
) -> dict[str, Any]:
    """What Triton makes of the noise's kernel. Arguments of value 1 are constants to it."""
    from fedcgd.noise import gpu_code

    sums = "*i64" if rounded else "*fp32"
    types = {
        "total": sums,
        "values": "*fp32" if values else "constexpr",
        "keys": "*i32",
        "numbers": "*fp64",
        "terms": "i32",
    }
    types |= {"start": "i32", "stop": "i64", "ROUND": "constexpr"}
    types |= dict.fromkeys(ones, "constexpr")
    constants = {"ROUND": rounded} | ({} if values else {"values": None}) | dict.fromkeys(ones, 1)
    options = gpu_code.OPTIONS | ({"enable_fp_fusion": True} if fused else {})
    return assembled(gpu_code._noise, types, constants, options, capability)


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
    assert {o.partition(".")[0] for o in floats} <= {
        "add",
        "sub",
        "mul",
        "div",
        "sqrt",
        "cvt",
        "mov",
        "selp",
        "neg",
        "abs",
    }
    rounds = {o for o in floats if o.partition(".")[0] in ("add", "sub", "mul", "div", "sqrt")}
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

    types = {"out": "*i64", "numbers": "*i64", "coefficients": "*i64", "size": size}
    constants = {"HASHES": 4, "BLOCK": 2048}
    hashes = assembled(
        gpu_code._tile_hashes, types | dict.fromkeys(constants, "constexpr"), constants, gpu_code.OPTIONS
    )["ttir"]
    types, constants = {"rows": "*fp32", "out": "*fp64", "columns": size}, {"STRETCH": 8192, "BLOCK": 512}
    squares = assembled(clipping._squares, types | dict.fromkeys(constants, "constexpr"), constants, clipping.OPTIONS)[
        "ttir"
    ]
    types = {"total": "*i64", "rows": "*fp32", "factors": "*fp64", "count": "i32", "columns": size}
    constants = {"GROUP": 64, "ROWS": 8, "BLOCK": 512}
    clipped = assembled(
        clipping._accumulate, types | dict.fromkeys(constants, "constexpr"), constants, clipping.OPTIONS
    )["ttir"]
    for code in (hashes, squares, clipped):
        assert set(re.findall(r"arith\.muli .*?\b\d*x?(i\d+)\b", code)) == {"i64"}
