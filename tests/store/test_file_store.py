"""The folder store's own promises: no torn or half-made object after a crash, and errors that say what to do."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from composer_prime.errors import ConfigError, KeyMissing, StoreError, StoreUnusable
from composer_prime.store import keys, open_store, probe_store
from composer_prime.store.file import FileStore

REPOSITORY = Path(__file__).parents[2]


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_opening_touches_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "new")
    assert store.list("") == []
    assert not (tmp_path / "new").exists()


def test_only_the_folder_that_a_store_began_with_takes_writes_or_one_that_holds_a_runs_manifest(tmp_path: Path) -> None:
    root, away = tmp_path / "share" / "run", tmp_path / "away"
    root.mkdir(parents=True)
    store = FileStore(root)
    assert store.create(keys.manifest(), b"the run")
    root.parent.rename(away)
    acts: list[Callable[[], object]] = [
        lambda: store.put("rounds/payload", b"lost"),
        lambda: store.create("rounds/record", b"lost"),
        lambda: store.get(keys.manifest()),
        lambda: store.get_range(keys.manifest(), 0, 1),
        lambda: store.list(""),
    ]
    for is_empty_mount_point in (False, True):
        if is_empty_mount_point:
            root.mkdir(parents=True)
        for act in acts:
            with pytest.raises(
                StoreError, match=f"{root} is not there any more, or is another folder.*mount it"
            ) as told:
                act()
            assert not isinstance(told.value, KeyMissing)
        assert list(tmp_path.rglob("run")) == ([root, away / "run"] if is_empty_mount_point else [away / "run"])
    assert files_in(root) == []
    root.rmdir()
    shutil.copytree(away / "run", root)  # a backup, or a share that has other numbers once it is mounted anew
    store.put("rounds/payload", b"kept")
    shutil.rmtree(root.parent)
    away.rename(root.parent)
    with pytest.raises(KeyMissing):
        store.get("rounds/payload")
    assert store.create("rounds/record", b"kept") and store.list("") == [keys.manifest(), "rounds/record"]


@pytest.mark.parametrize("act", ["put", "create"])
def test_a_write_during_which_the_folder_is_replaced_is_not_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    root, aside = tmp_path / "run", tmp_path / "aside"
    store = FileStore(root)
    store.put("rounds/first", b"1")
    fsync = os.fsync

    def replace_the_folder(descriptor: int) -> None:
        fsync(descriptor)
        if not aside.exists():
            root.rename(aside)
            shutil.copytree(aside, root)

    monkeypatch.setattr(os, "fsync", replace_the_folder)
    with pytest.raises(StoreError, match="is another folder"):
        getattr(store, act)("rounds/second", b"2")


def test_plain_paths_and_uris_name_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    uri = f"file://{tmp_path}/a bucket"
    for spelled in (uri, f"{tmp_path}/a bucket/", "a bucket", "./a bucket", "~/a bucket"):
        assert open_store(spelled).uri == uri


def test_relative_root_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be absolute"):
        FileStore("relative")


def test_objects_are_plain_files_and_nothing_else_stays(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.create("a/one", b"1")
    store.create("a/one", b"2")
    store.put("a/two", b"3")
    store.put("a/two", b"4")
    assert files_in(tmp_path) == ["a/one", "a/two"]
    assert (tmp_path / "a/two").read_bytes() == b"4"


@pytest.mark.parametrize(("act", "at"), [("create", "link"), ("create", "fsync"), ("put", "replace")])
def test_process_that_dies_in_a_write_leaves_no_object(tmp_path: Path, act: str, at: str) -> None:
    code = f"""if True:
        import os, sys
        from composer_prime.store.file import FileStore
        os.mkdir(sys.argv[1] + "/a")
        os.{at} = lambda *_: os._exit(9)
        FileStore(sys.argv[1]).{act}("a/k", b"half")
    """
    assert subprocess.run([sys.executable, "-c", code, tmp_path], cwd=REPOSITORY).returncode == 9
    store = FileStore(tmp_path)
    assert len(files_in(tmp_path)) == 1, "the crash should have left its temporary file"
    assert store.list("") == store.list("a/") == []
    with pytest.raises(KeyMissing):
        store.get("a/k")
    assert store.create("a/k", b"whole") and store.get("a/k") == b"whole"


@pytest.mark.parametrize(
    ("number", "said"), [(errno.EFBIG, "File too large: .*ulimit"), (errno.ENOSPC, "No space left .*: free some space")]
)
@pytest.mark.parametrize("act", ["put", "create"])
def test_failed_write_leaves_the_old_bytes_and_no_temporary_file_and_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, number: int, said: str
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    store = FileStore(tmp_path)
    store.put("k", b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match=f"^{act} of k in file://{tmp_path} failed: {said}"):
        getattr(store, act)("k", bytes(5000))
    assert files_in(tmp_path) == ["k"] and store.get("k") == b"old"


def test_file_in_place_of_the_folder_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = FileStore(tmp_path / "file")
    with pytest.raises(StoreError, match=r"put of a/b in file://.*failed: Not a directory: choose another folder"):
        store.put("a/b", b"")
    with pytest.raises(StoreUnusable, match=r"file://.*can't be used: .*Not a directory"):
        probe_store(store)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody may write, such as /proc")
def test_folder_that_cannot_be_written_is_unusable() -> None:
    with pytest.raises(StoreUnusable, match=r"store file:///proc/bucket can't be used: create of probe/"):
        probe_store(FileStore("/proc/bucket"))


def test_file_system_without_hard_links_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted", source, None, target)

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StoreUnusable, match=r"can't make hard links\): choose a folder on another file system"):
        probe_store(FileStore(tmp_path))
    assert files_in(tmp_path) == []


def test_foreign_files_are_not_listed(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a/k", b"")
    for foreign in (".DS_Store", "a/.hidden", "a/with space", "a/ümlaut"):
        (tmp_path / foreign).write_text("")
    assert store.list("") == ["a/k"]


def test_where_folders_cannot_be_synced_the_store_writes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store = FileStore(tmp_path)
    assert store.create("a/one", b"1") and store.get("a/one") == b"1"
