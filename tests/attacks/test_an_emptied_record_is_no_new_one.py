"""What remembers which rounds were opened or released is emptied, made anew, taken from another key, or open to others."""

import grp
import os
import pwd
import sqlite3
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from keeper_openings import agreement_of
from ledgers import release
from plans import make_plan

from fedcgd import DPSGD, NoiseKey, Participation
from fedcgd.keepers import Keeper, KeeperKey, Keepers, NodeParticipations
from fedcgd.ledger import Ledger

PLAN = make_plan(DPSGD(), Participation(rounds=6))


def a_run(folder: Path) -> None:
    """Opens the ledger, with the key and its register, and releases the round that comes next."""
    key = NoiseKey.from_file(folder / "noise.key", create=True)
    with Ledger.open(folder / "run.db", plan=PLAN, configuration={}, key=key) as ledger:
        release(ledger, ledger.resume().round, ["ann"])


def a_new_run(folder: Path) -> None:
    """The same run without its ledger, which the register alone can notice."""
    for path in folder.glob("run.db*"):
        path.unlink()
    a_run(folder)


def a_keeper(folder: Path) -> None:
    key = KeeperKey.from_file(folder / "keeper.key", create=True)
    Keeper.open(folder / "keeper.key", Keepers(cards=(key.card("court"),), colluding=0)).close()


def a_node(folder: Path) -> None:
    with NodeParticipations.open(folder / "participations.db") as turns:
        agreement = agreement_of(Keepers.simulation(7, 3, colluding=1))
        turns.count(agreement, 0, len(list(folder.iterdir())), [])


RECORDS = {"noise.key.runs": a_new_run, "keeper.key.record": a_keeper, "participations.db": a_node, "run.db": a_run}
records = pytest.mark.parametrize(("name", "use"), RECORDS.items())
whole_records = pytest.mark.parametrize(("name", "use"), (RECORDS | {"noise.key.runs": a_run}).items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "own"
    made.mkdir(mode=0o700)
    for use in (a_run, a_keeper, a_node):
        use(made)
    return made


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def without_tables(path: Path) -> None:
    path.unlink()
    path.touch(0o600)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("VACUUM")
    assert path.stat().st_size


def without_its_first_line(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM record")


@records
@pytest.mark.parametrize("change", [emptied, without_tables, without_its_first_line])
def test_an_emptied_record_is_refused(
    folder: Path, name: str, use: Callable[[Path], None], change: Callable[[Path], None]
) -> None:
    change(folder / name)
    for leftover in folder.glob(f"{name}-*"):
        leftover.unlink()
    before = (folder / name).read_bytes()
    with pytest.raises(ValueError, match=f"{name}.* empty"):
        use(folder)
    assert (folder / name).read_bytes() == before


@pytest.mark.parametrize(("name", "use"), [("noise.key.runs", a_new_run), ("keeper.key.record", a_keeper)])
def test_the_record_of_another_key_is_refused(
    folder: Path, tmp_path: Path, name: str, use: Callable[[Path], None]
) -> None:
    """Whole, and never used: as if the key were new."""
    other = tmp_path / "other"
    other.mkdir()
    for make in (a_run, a_keeper):
        make(other)
    (folder / name).write_bytes((other / name).read_bytes())
    with pytest.raises(ValueError, match=f"{name} .*(register|record)"):
        use(folder)


@whole_records
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o644, 0o640])
def test_a_record_that_others_may_read_or_write_is_refused(
    folder: Path, name: str, use: Callable[[Path], None], mode: int
) -> None:
    (folder / name).chmod(mode)
    with pytest.raises(ValueError, match=rf"{name} has mode {mode:04o}.*chmod 600"):
        use(folder)
    assert (folder / name).stat().st_mode & 0o777 == mode
    (folder / name).chmod(0o600)
    use(folder)


@whole_records
@pytest.mark.parametrize("mode", [0o702, 0o757, 0o777, 0o770])
def test_a_record_whose_folder_others_may_write_is_refused(
    folder: Path, name: str, use: Callable[[Path], None], mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedcgd.support.records._is_private_group", lambda _: False)
    folder.chmod(mode)
    with pytest.raises(ValueError, match=f"{mode:04o}.*chmod go-w {folder}"):
        use(folder)
    folder.chmod(0o1777)  # /tmp's: nobody replaces what is another's there
    use(folder)


def test_a_group_of_ones_own_is_nobody_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems make a group for each user, and folders that it may write."""
    folder.chmod(0o770)
    owner = pwd.getpwuid(os.getuid()).pw_name
    for name, members, admitted in (
        (owner, [], True),
        (owner, [owner], True),
        (owner, ["eve"], False),
        ("staff", [], False),
    ):
        group = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr(grp, "getgrgid", lambda _, group=group: group)
        with nullcontext() if admitted else pytest.raises(ValueError, match="mode 0770"):
            a_run(folder)


def test_a_key_is_not_made_beside_an_emptied_record(tmp_path: Path) -> None:
    (tmp_path / "noise.key.runs").touch(0o600)
    with pytest.raises(ValueError, match="used with"):
        NoiseKey.from_file(tmp_path / "noise.key", create=True)
    assert not (tmp_path / "noise.key").exists()


def test_a_key_file_of_raw_bytes_is_not_quoted(tmp_path: Path) -> None:
    """The error used to carry the key: `UnicodeDecodeError.object`."""
    (tmp_path / "noise.key").write_bytes(bytes(range(120, 152)))
    (tmp_path / "noise.key").chmod(0o600)
    with pytest.raises(ValueError, match="64 hexadecimal") as refused:
        NoiseKey.from_file(tmp_path / "noise.key")
    assert not isinstance(refused.value, UnicodeError)
