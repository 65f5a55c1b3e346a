"""Machine code is built with the wheel, for levels of processors, and used only where it gives NumPy's answers."""

import shutil
from pathlib import Path

import pytest

import hatch_build
from fedcgd.accounting.b_min_sep import drawing, recursion
from fedcgd.accounting.random_participation import overlaps
from fedcgd.native import library as machine_code
from fedcgd.native import vector_kernels
from fedcgd.noise import stream as noise_kernels

ROOT = Path(__file__).resolve().parents[2]
LOADERS = {
    "noise/normals.c": noise_kernels,
    "native/vector_kernels.c": vector_kernels,
    "accounting/b_min_sep/recursion.c": recursion,
    "accounting/b_min_sep/drawing.c": drawing,
    "accounting/random_participation/overlaps.c": overlaps,
}


@pytest.fixture(scope="module")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("built")
    for name in hatch_build.SOURCES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    assert hatch_build.build(root), "these tests need a C compiler"
    return root


@pytest.fixture
def built(built_once: Path, tmp_path: Path) -> Path:
    """A copy of the sources, built."""
    return shutil.copytree(built_once, tmp_path / "built")


def test_the_hook_builds_every_c_file() -> None:
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "fedcgd").rglob("*.c")} == set(hatch_build.SOURCES)
    assert {f"fedcgd/{name}" for name in LOADERS} == set(hatch_build.SOURCES)


@pytest.mark.parametrize("name", LOADERS)
def test_each_level_that_this_processor_can_run_gives_the_answer_of_numpy(
    name: str, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = LOADERS[name]
    levels = machine_code._levels()
    assert levels
    for level in levels:
        monkeypatch.setattr(machine_code, "_levels", lambda level=level: (level,))
        monkeypatch.setattr(loader, "library", lambda source: machine_code.library(built / "fedcgd" / name))
        assert machine_code.checked(loader._load, loader._answer, loader._ANSWER) is not None


def test_the_answers_asked_of_clipping_and_noise_are_numpys() -> None:
    for form in (vector_kernels, noise_kernels):
        assert machine_code.checked(lambda: form.NUMPY, form._answer, form._ANSWER) is form.NUMPY  # noqa: B023


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("noise/normals.c", "#define SINE_1 -", "#define SINE_1 -1e-7f + -"),
        ("noise/normals.c", "#define TWO 0x1.0000000000000p+1f", "#define TWO 0x1.000002p+1f"),
        ("native/vector_kernels.c", "lanes[j] += value * value;", "lanes[j] += (float)(value * value);"),
        ("native/vector_kernels.c", "lanes[j] = 0;", ";"),
        ("accounting/b_min_sep/recursion.c", "*rows.next * rest", "*rows.next * (float)rest"),
        ("accounting/b_min_sep/recursion.c", "kinds[t] * points * 2", "kinds[0] * points * 2"),
        ("accounting/b_min_sep/drawing.c", "now = t[i] + rounds", "now = t[i] + rounds + (t[i] == 9)"),
        ("accounting/b_min_sep/drawing.c", "> limit)", ">= 1.01 * limit)"),
        ("accounting/random_participation/overlaps.c", "rounds + t];", "rounds + t - lag];"),
        ("accounting/random_participation/overlaps.c", "left[a] *= powers", "left[a] *= (float)powers"),
    ],
)
def test_machine_code_that_differs_from_numpy_is_not_used(
    name: str, before: str, after: str, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a compiler is wrong."""
    loader, source = LOADERS[name], built / "fedcgd" / name
    assert before in source.read_text()
    source.write_text(source.read_text().replace(before, after))
    monkeypatch.setattr(hatch_build, "SOURCES", [f"fedcgd/{name}"])
    assert hatch_build.build(built)
    monkeypatch.setattr(loader, "library", lambda _: machine_code.library(source))
    assert machine_code.checked(loader._load, loader._answer, loader._ANSWER) is None


def test_without_a_build_it_says_so_and_is_numpy(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = built / "fedcgd" / "native" / "vector_kernels.c"
    for path in source.parent.glob("*.shared"):
        path.unlink()
    with pytest.raises(OSError, match="C compiler"):
        machine_code.library(source)
    for module in (vector_kernels, noise_kernels):
        monkeypatch.setattr(module, "library", lambda _: machine_code.library(source))
    assert noise_kernels.kernels.__wrapped__() is noise_kernels.NUMPY
    monkeypatch.setattr(vector_kernels, "compiled", vector_kernels.compiled.__wrapped__)
    assert vector_kernels.kernels() is vector_kernels.NUMPY


def test_what_only_machine_code_does_is_refused_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise OSError

    with pytest.raises(RuntimeError, match="C compiler"):
        machine_code.needed(load, lambda _: b"", "")


def test_what_cannot_be_compiled_is_left_out_and_nothing_older_stays(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = built / "fedcgd" / "native" / "vector_kernels.c"
    source.write_text("nonsense")
    monkeypatch.setattr(hatch_build, "SOURCES", ["fedcgd/native/vector_kernels.c", "fedcgd/noise/normals.c"])
    names = {path.name for path in hatch_build.build(built)}
    assert names
    assert not any(name.startswith("vector_kernels") for name in names)
    assert not list(source.parent.glob("vector_kernels*.shared"))


def test_the_best_level_of_the_processor_is_taken(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code.platform, "machine", lambda: "x86_64")
    v3 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
    v4 = v3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    for flags, best in ((v4, "x86-64-v4"), (v3, "x86-64-v3"), (v4 - {"avx512vl"}, "x86-64-v3"), (set(), "x86_64")):
        monkeypatch.setattr(machine_code, "_flags", lambda flags=flags: flags)
        assert machine_code._levels.__wrapped__()[0] == best
