"""One pass gives the same bits as machine code and with NumPy, and its sums are those of their definition."""

import numpy as np
import pytest

from fedcgd.native import vector_kernels as module
from fedcgd.native.vector_kernels import CHUNK, LANES, NUMPY, aligned, compiled, squared_distance, sum_of_lanes

FORMS = {"numpy": NUMPY, "machine code": compiled()}
LENGTHS = [0, 1, LANES - 1, LANES, LANES + 1, 5 * LANES + 3, CHUNK - 1, CHUNK, 2 * CHUNK + 3 * LANES + 5]
EXTREMES = np.array([0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0, np.inf, -np.inf, np.nan], np.float32)


def vectors(length: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(length)
    x, y = generator.normal(size=(2, length)).astype(np.float32) * np.float32(2.0) ** generator.integers(
        -60, 60, length
    )
    return aligned(x.astype(np.float32)), aligned(y.astype(np.float32))


def test_a_compiler_is_there_for_these_tests() -> None:
    assert FORMS["machine code"] is not None


@pytest.mark.parametrize("length", LENGTHS)
def test_both_forms_give_the_same_bits(length: int) -> None:
    x, y = vectors(length)
    integers = []
    for kind in (np.int32, np.int64):
        limits = np.iinfo(kind)
        integers.append(np.random.default_rng(2).integers(limits.min, limits.max, length, kind))
    found = {}
    for name, form in FORMS.items():
        lanes = np.full(LANES, np.nan)
        form.difference(x, y, lanes)
        bits = [lanes.tobytes()]
        for kind in (np.int32, np.int64):
            out = np.empty(length, kind)
            checksum = form.steps(x, y, 2.0**-62 / 3, 2.0**20, out)
            assert checksum == int(out.sum(dtype=np.int64))
            bits.append(out.tobytes())
        for scale in (2.0**20, 2.0**70):
            total, sums = np.arange(length), np.full(3, 2.0**-70)
            form.squares(np.stack([x, y, x]), sums)
            form.accumulate(np.stack([x, np.full_like(x, np.nan), y]), np.array([1e-20 / 3, 0.0, 1e-21]), scale, total)
            bits.append(sums.tobytes() + total.tobytes())
        total = np.random.default_rng(3).integers(-(2**62), 2**62, length)
        form.mean(y, total, 2.0**-61, 0.3, 7.0, total.view(np.float32)[:length])
        bits.append(total.tobytes())
        for values in integers:
            total = np.arange(length)
            checksum = form.add(aligned(values), total, lanes)
            assert checksum == int(values.sum(dtype=np.int64))
            bits += [total.tobytes(), lanes.tobytes()]
        found[name] = bits
    assert found["numpy"] == found["machine code"]


@pytest.mark.parametrize("form", FORMS)
def test_lanes_add_up_to_the_squares(form: str) -> None:
    x, y = vectors(3 * LANES + 5)
    lanes = np.empty(LANES)
    FORMS[form].difference(x, y, lanes)
    terms = (x.astype(np.float64) - y) ** 2
    assert lanes[7] == ((terms[7] + terms[7 + LANES]) + terms[7 + 2 * LANES])
    assert lanes[3] == ((terms[3] + terms[3 + LANES]) + terms[3 + 2 * LANES]) + terms[3 + 3 * LANES]
    sums = np.zeros(2)
    for _ in range(2):
        FORMS[form].squares(np.stack([y, x]), sums)
    squares = [np.float64(number) ** 2 for number in x]
    halved = [sum(squares[j::LANES]) for j in range(LANES)]
    while len(halved) > 1:
        halved = [halved[j] + halved[j + len(halved) // 2] for j in range(len(halved) // 2)]
    assert sums[1] == 2 * halved[0]
    total = np.zeros(len(x), np.int64)
    values = np.arange(len(x)) - 100
    FORMS[form].add(aligned(values), total, lanes)
    assert sum_of_lanes(lanes) == (values**2).sum()
    np.testing.assert_array_equal(total, values)


def test_rounding_is_towards_zero() -> None:
    x = aligned(np.array([1.75, -1.75, 0.99, -0.99], np.float32))
    for form in FORMS.values():
        out = np.empty(4, np.int32)
        assert form.steps(x, aligned(np.zeros(4, np.float32)), 1.0, 2.0, out) == 0
        np.testing.assert_array_equal(out, [3, -3, 1, -1])
        total = np.array([1, 1, 1, -1])
        form.accumulate(x[None], np.ones(1), 2.0, total)
        np.testing.assert_array_equal(total, [4, -2, 2, -2])


@pytest.mark.parametrize("form", FORMS)
def test_the_mean_is_written_over_the_sum(form: str) -> None:
    size = CHUNK + LANES + 3
    model, total = vectors(size)[0], np.random.default_rng(4).integers(-(10**9), 10**9, size)
    expected = (model + total.copy() * 2.0**-20 * 0.7 / 12).astype(np.float32)
    FORMS[form].mean(model, total, 2.0**-20, 0.7, 12, total.view(np.float32)[:size])
    np.testing.assert_array_equal(total.view(np.float32)[:size], expected)


@pytest.mark.parametrize("extra", [0, 1, 777])
def test_squared_distance_of_more_than_a_stretch(extra: int) -> None:
    x, y = vectors(2 * CHUNK + extra)
    exact = ((x.astype(np.longdouble) - y.astype(np.longdouble)) ** 2).sum()
    assert squared_distance(x, y) == pytest.approx(float(exact), rel=1e-14)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_never_has_a_finite_distance(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernels", lambda: FORMS[form])
    one, two = (each.ravel() for each in np.meshgrid(EXTREMES, EXTREMES))
    for x, y in zip(one, two, strict=True):
        for place in (0, CHUNK + 9):
            a, b = np.ones((2, CHUNK + 10), np.float32)
            a[place], b[place] = x, y
            assert np.isfinite(squared_distance(a, b)) == (np.isfinite(x) and np.isfinite(y)), (x, y)
