"""Machine code is compiled once, and kept only where nobody else can change it."""

import os
import shutil
from ctypes import c_int64
from pathlib import Path

import numpy as np
import pytest

from fedcgd import compiler, passes
from fedcgd.compiler import array, function, library, nobody_else_writes
from fedcgd.noise import compiled

SOURCE = "#include <stdint.h>\nint64_t sum(const float *x, int64_t n) { return TIMES * (x[0] + x[n - 1]); }\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDCGD_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "sum.c"
    path.write_text(SOURCE)
    return path


def value(source: Path, times: int = 2) -> int:
    found: int = function(library(source, {"TIMES": times}), "sum", [array(np.float32), c_int64], c_int64)(
        np.array([1, 7, 4], np.float32), 3
    )
    return found


def kept(source: Path) -> list[Path]:
    return list((source.parent / "cache" / "machine-code").glob("*"))


def test_what_is_compiled_is_kept_and_used_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert value(source) == 10
    [file] = kept(source)
    assert nobody_else_writes(file)
    monkeypatch.setattr(compiler, "_compile", None)
    assert value(source) == 10
    with pytest.raises(TypeError):
        value(source, times=3)  # other machine code
    source.write_text(SOURCE + "// changed")
    with pytest.raises(TypeError):
        value(source)


def test_another_processor_has_other_machine_code(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value(source)
    _, native = compiler._processor()
    monkeypatch.setattr(compiler, "_processor", lambda: ("another model", native))
    value(source)
    assert len(kept(source)) == 2


def plant(file: Path) -> None:
    """Put something else in the place of kept machine code: what loads it fails."""
    file.unlink()
    file.write_text("planted")


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_not_loaded(mode: int, source: Path) -> None:
    value(source)
    [file] = kept(source)
    plant(file)
    with pytest.raises(OSError, match=file.name):
        value(source)  # so it is loaded if it is the user's own
    file.chmod(mode)
    assert value(source) == 10


def test_a_file_of_another_user_is_not_loaded(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value(source)
    [file] = kept(source)
    plant(file)
    if os.geteuid() == 0:
        os.chown(file, 1, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert value(source) == 10


def test_a_link_is_not_followed(source: Path) -> None:
    value(source)
    [file] = kept(source)
    plant(file)
    file.rename(source.parent / "elsewhere")
    file.symlink_to(source.parent / "elsewhere")
    assert value(source) == 10


@pytest.mark.parametrize("which", ["cache/machine-code", "cache"])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_nothing_is_kept_in_a_folder_that_others_can_write(which: str, mode: int, source: Path) -> None:
    """Others could replace what is in it, though no file of it is theirs."""
    value(source)
    [file] = kept(source)
    plant(file)
    (source.parent / which).chmod(mode)
    assert value(source) == 10
    assert file.read_text() == "planted"
    assert kept(source) == [file]


def test_a_folder_of_all_users_in_which_each_keeps_to_his_own_is_fine_above(source: Path) -> None:
    (source.parent / "cache").mkdir()
    (source.parent / "cache").chmod(0o1777)
    assert value(source) == 10
    assert len(kept(source)) == 1
    (source.parent / "cache" / "machine-code").chmod(0o1777)
    assert not nobody_else_writes(source.parent / "cache" / "machine-code")


def test_without_a_folder_it_works_and_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source.parent / "file").touch()
    monkeypatch.setenv("FEDCGD_CACHE", str(source.parent / "file" / "cache"))
    monkeypatch.setattr(compiler.tempfile, "tempdir", str(source.parent))
    assert value(source) == 10
    assert sorted(path.name for path in source.parent.iterdir()) == ["file", "sum.c"]


def test_the_search_path_chooses_no_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = source.parent / "cc"
    planted.write_text("#!/bin/sh\nexit 1\n")
    planted.chmod(0o755)
    monkeypatch.setenv("PATH", str(source.parent))
    assert shutil.which("cc") == str(planted)
    assert value(source) == 10


def test_ziglang_makes_the_same_bits(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler of its own; `_same_bits` is asked by both."""
    monkeypatch.setattr(compiler.shutil, "which", lambda *_, **__: None)
    assert Path(compiler._compiler()[0]).name == "zig"
    assert compiled._same_bits(compiled._load())
    assert passes._same_bits(passes._load())


def test_without_a_compiler_it_says_what_to_do(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(OSError, match="fast"):
        value(source)


def test_code_that_does_not_compile_is_an_error(source: Path) -> None:
    source.write_text("nonsense")
    with pytest.raises(OSError, match="cannot compile"):
        value(source)
    assert kept(source) == []
