"""What every store promises, run against each of them: memory, a folder, moto, a real SeaweedFS, and stand-ins.

"hf" is SeaweedFS opened with the settings for Hugging Face; "faulty" is the memory store behind a plan without faults,
"throttled" the same behind a limit, "gateway" the same behind one whose members may do everything.
"""

import importlib
import random
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from composer_prime.errors import ConfigError, KeyMissing, StoreError, StoreUnusable
from composer_prime.gateway.store import KEY_VARIABLE, GatewayStore
from composer_prime.store import Store, open_store, probe_store, race_store
from composer_prime.store.base import MAX_CREATE_BYTES
from composer_prime.store.fsspec import FsspecStore
from composer_prime.sync.metered import throttle
from tests.gateway.guarded import KEYS, allow_everything, guarding, make_run
from tests.patience import PATIENCE_S
from tests.servers import fixtures
from tests.store.faulty_store import FaultPlan, FaultyStore
from tests.store.power_cut import Disk

gs, az, rclone, store_uri = fixtures.gs, fixtures.az, fixtures.rclone, fixtures.store_uri

REPOSITORY = Path(__file__).parents[2]
KINDS = [
    "memory",
    "file",
    pytest.param("moto", marks=pytest.mark.s3),
    pytest.param("seaweed", marks=pytest.mark.s3),
    pytest.param("hf", marks=pytest.mark.s3),
    "gs",
    "az",
    pytest.param("s3fs", marks=pytest.mark.s3),
    "faulty",
    "throttled",
    "gateway memory",
    "gateway file",
    pytest.param("gateway seaweed", marks=pytest.mark.s3),
    pytest.param("tickets seaweed", marks=pytest.mark.s3),
]
ACROSS_PROCESSES = [
    "file",
    pytest.param("seaweed", marks=pytest.mark.s3),
    "gs",
]
WITH_A_ROOT = [
    "file",
    pytest.param("moto", marks=pytest.mark.s3),
    pytest.param("seaweed", marks=pytest.mark.s3),
    "gs",
]
ON_DISK = ["file"]
ILLEGAL_KEYS = ["", "/a", "a/", "a//b", "..", "a/../b", "a/.b", ".a", "-a", "ä", "a b", "a\\b", "a\n", "a" * 513]


def over_s3fs(uri: str) -> FsspecStore:
    """A bucket by the filesystem that a user brings."""
    checksums = dict.fromkeys(("request_checksum_calculation", "response_checksum_validation"), "when_required")
    files = S3FileSystem(use_listings_cache=False, skip_instance_cache=True, config_kwargs=checksums)
    return FsspecStore(files, *uri.removeprefix("s3://").split("/", 1))


@pytest.fixture(params=KINDS)
def store(
    request: pytest.FixtureRequest, store_uri: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    kind = request.param
    by, _, behind = kind.partition(" ")
    if behind:
        allow_everything(monkeypatch)
        KEYS["alice"].save(tmp_path / "alice.key")
        monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "alice.key"))
        with closing(open_store(store_uri("memory"))) as run, closing(open_store(store_uri(behind))) as bucket:
            make_run(run)
            options = {"inline_bytes": 0} if by == "tickets" else {}
            with guarding(bucket, run=run) as gateway, closing(gateway.store("alice", **options)) as opened:
                opened.introduce()
                yield opened
        return
    if kind == "s3fs":
        with closing(over_s3fs(store_uri("seaweed"))) as opened:
            yield opened
        return
    with closing(open_store(store_uri("memory" if kind in ("faulty", "throttled") else kind))) as opened:
        around = {"faulty": lambda: FaultyStore(opened, FaultPlan()), "throttled": lambda: throttle(opened, 8e3, 8e3)}
        yield around[kind]() if kind in around else opened


def test_first_writer_wins_and_its_bytes_stay(store: Store) -> None:
    assert store.create("rounds/commit.json", b"first") is True
    assert store.create("rounds/commit.json", b"second") is False
    assert store.get("rounds/commit.json") == b"first"


def test_create_met_by_its_own_bytes_is_true(store: Store) -> None:
    assert store.create("k", b"mine")
    assert store.create("k", b"mine"), "a retried create must not take its own first try for a rival"


def test_create_after_delete_wins_again(store: Store) -> None:
    store.create("k", b"old")
    store.delete("k")
    assert store.create("k", b"new")
    assert store.get("k") == b"new"


def test_create_sees_what_put_wrote(store: Store) -> None:
    store.put("k", b"put")
    assert not store.create("k", b"created")
    assert store.get("k") == b"put"


def test_of_eight_racing_threads_exactly_one_wins_and_its_bytes_stay(store: Store) -> None:
    turns, writers = 10, 8
    barriers = [threading.Barrier(writers) for _ in range(turns)]

    def write(turn: int, writer: int) -> bool:
        barriers[turn].wait()
        return store.create(f"race/{turn}", f"writer-{writer}".encode())

    # All turns at once: SeaweedFS lets the losers of one key wait for seconds, one after the other.
    with ThreadPoolExecutor(turns * writers) as pool:
        racing = [[pool.submit(write, turn, writer) for writer in range(writers)] for turn in range(turns)]
    for turn, writes in enumerate(racing):
        won = [write.result() for write in writes]
        assert sum(won) == 1, f"winners {won} in turn {turn}"
        assert store.get(f"race/{turn}") == f"writer-{won.index(True)}".encode()


@pytest.mark.parametrize("kind", ACROSS_PROCESSES)
def test_of_two_racing_processes_exactly_one_wins(kind: str, store_uri: Callable[[str], str]) -> None:
    code = """if True:
        import sys
        from composer_prime.store import open_store
        store = open_store(sys.argv[1])
        for line in sys.stdin:
            print(store.create("race/" + line.strip(), sys.argv[2].encode()), flush=True)
        store.close()
    """
    uri = store_uri(kind)
    names = ["a", "b"]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, uri, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=REPOSITORY,
        )
        for name in names
    ]
    try:
        with closing(open_store(uri)) as store:
            for turn in range(30):
                for racer in racers:
                    assert racer.stdin is not None
                    racer.stdin.write(f"{turn}\n")
                won = [racer.stdout.readline().strip() if racer.stdout else "" for racer in racers]
                assert sorted(won) == ["False", "True"], f"turn {turn}"
                assert store.get(f"race/{turn}").decode() == names[won.index("True")]
    finally:
        for racer in racers:
            racer.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize("kind", ["memory", *ACROSS_PROCESSES])
def test_reader_never_sees_a_torn_put(kind: str, store_uri: Callable[[str], str]) -> None:
    size, puts, readers = 128 * 2**10, 40, 3
    done = threading.Event()

    def read_until_done(store: Store) -> int:
        reads = 0
        while not done.is_set() or reads == 0:
            data = store.get("beat")
            assert len(data) == size and len(set(data)) == 1, "bytes of two puts in one read"
            reads += 1
        return reads

    with closing(open_store(store_uri(kind))) as store, ThreadPoolExecutor(readers) as pool:
        store.put("beat", bytes(size))
        reading = [pool.submit(read_until_done, store) for _ in range(readers)]
        try:
            for turn in range(puts):
                store.put("beat", bytes([turn % 256]) * size)
        finally:
            done.set()
        assert all(read.result() > 0 for read in reading)


def test_put_overwrites(store: Store) -> None:
    store.put("k", b"one, longer")
    store.put("k", b"two")
    assert store.get("k") == b"two"


def test_empty_bytes_are_an_object(store: Store) -> None:
    assert store.create("created", b"")
    store.put("put", b"")
    assert store.get("created") == store.get("put") == b""
    assert store.get_range("put", 0, 10) == b""
    assert store.list("") == ["created", "put"]
    assert not store.create("created", b"other")


def test_five_mebibytes_of_noise_come_back(store: Store) -> None:
    noise = random.Random(0).randbytes(5 * 2**20)
    store.put("put", noise)
    assert store.get("put") == noise
    assert store.create("created", noise)
    assert store.get_range("created", 3 * 2**20 + 1, 70_000) == noise[3 * 2**20 + 1 :][:70_000]
    assert store.create("created", noise)
    assert not store.create("created", noise[:-1])


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [
        (0, 4, b"0123"),
        (3, 2, b"34"),
        (8, 10, b"89"),
        (0, 0, b""),
        (4, 0, b""),
        (9, 1, b"9"),
        (10, 1, b""),
        (99, 9, b""),
    ],
)
def test_range_is_a_slice(store: Store, start: int, length: int, expected: bytes) -> None:
    store.put("digits", b"0123456789")
    assert store.get_range("digits", start, length) == expected


def test_negative_range_is_refused(store: Store) -> None:
    store.put("k", b"0123456789")
    for start, length in ((-1, 1), (1, -1)):
        with pytest.raises(StoreError, match="must be 0 or more"):
            store.get_range("k", start, length)


def test_absent_key_is_missing(store: Store) -> None:
    store.put("folder/object", b"")
    for key in ("nothing", "no/such/folder", "folder", "folder/object/below"):
        with pytest.raises(KeyMissing, match=key):
            store.get(key)
        for length in (0, 1):
            with pytest.raises(KeyMissing, match=key):
                store.get_range(key, 0, length)


def test_delete_removes_only_what_it_names_and_may_be_repeated(store: Store) -> None:
    store.put("a/b", b"1")
    store.put("a/bc", b"2")
    for key in ("a/b", "a/b", "a", "nothing/there"):
        store.delete(key)
    assert store.list("") == ["a/bc"]


def test_list_is_sorted_and_complete(store: Store) -> None:
    keys = ["a/b", "a-b", "a.b", "a0", "B", "_", "a/c/d/e", "0"]
    for key in keys:
        store.put(key, b"")
    assert store.list("") == sorted(keys)
    assert store.list("nothing/") == []


def test_prefix_is_a_string_not_a_folder(store: Store) -> None:
    for key in ("rounds/0001/commit.json", "rounds/00010/commit.json", "rounds/0002/commit.json", "rounds.json"):
        store.put(key, b"")
    assert store.list("rounds/0001") == ["rounds/0001/commit.json", "rounds/00010/commit.json"]
    assert store.list("rounds/0001/") == ["rounds/0001/commit.json"]
    assert store.list("rounds/0001/commit.json") == ["rounds/0001/commit.json"]
    assert store.list("rounds/0001/commit.json/") == []
    assert len(store.list("round")) == 4


def test_store_below_a_prefix_is_a_part_of_the_store_above(store: Store) -> None:
    if isinstance(store, GatewayStore):
        pytest.skip("a gateway serves one run")
    with closing(open_store(f"{store.uri}/runs/one")) as below:
        assert below.uri == f"{store.uri}/runs/one"
        store.create("manifest.json", b"above")
        store.put("runs/one-more/manifest.json", b"")
        assert below.create("manifest.json", b"below")
        below.put("beat", b"1")
        assert below.list("") == ["beat", "manifest.json"]
        assert below.get("manifest.json") == below.get_range("manifest.json", 0, 9) == b"below"
        below.delete("beat")
    assert store.list("") == ["manifest.json", "runs/one-more/manifest.json", "runs/one/manifest.json"]
    assert store.get("runs/one/manifest.json") == b"below"


def test_store_opened_twice_is_one_store(store: Store) -> None:
    with closing(open_store(store.uri)) as again:
        assert store.create("k", b"first")
        assert not again.create("k", b"second")
        assert again.get("k") == b"first"


@pytest.mark.parametrize("key", ILLEGAL_KEYS)
def test_illegal_key_is_refused_by_every_method(store: Store, key: str) -> None:
    acts: list[Callable[[], object]] = [
        lambda: store.create(key, b""),
        lambda: store.put(key, b""),
        lambda: store.get(key),
        lambda: store.get_range(key, 0, 1),
        lambda: store.delete(key),
    ]
    for act in acts:
        with pytest.raises(StoreError, match="spell keys with"):
            act()


@pytest.mark.parametrize("prefix", ["/", "/a", "..", "a/../", "a//", ".a", "ä", "a b"])
def test_illegal_prefix_is_refused(store: Store, prefix: str) -> None:
    with pytest.raises(StoreError, match="must be the beginning of a key"):
        store.list(prefix)


def test_create_beyond_the_limit_is_refused_before_anything_is_written(store: Store) -> None:
    with pytest.raises(
        StoreError, match=rf"{MAX_CREATE_BYTES + 1} bytes: at most {MAX_CREATE_BYTES} .*content-addressed"
    ):
        store.create("large", bytes(MAX_CREATE_BYTES + 1))
    assert store.list("") == []


def test_close_may_be_repeated(store: Store) -> None:
    store.put("k", b"")
    store.close()
    store.close()


def test_probe_passes_and_leaves_nothing(store: Store) -> None:
    probe_store(store)
    assert store.list("") == []


def test_races_for_a_new_run_pass_and_leave_nothing(store: Store) -> None:
    race_store(store, writers=4, races=4)
    assert store.list("") == []


@pytest.mark.parametrize("kind", WITH_A_ROOT)
def test_a_store_whose_root_vanished_confirms_nothing(
    kind: str, store_uri: Callable[[str], str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In memory a root is made of nothing but its objects. A prefix of a bucket is no root: the bucket is."""
    scheme, name = store_uri(kind).partition("://")[0], f"vanishing-{secrets.token_hex(8)}"
    vanish: Callable[[], object] = partial((tmp_path / name).rename, tmp_path / "away")
    if kind != "file":
        server = request.getfixturevalue(kind)
        server.make_bucket(name)
        vanish = partial(server.drop_bucket, name)
    uri = f"{scheme}://{tmp_path / name if kind == 'file' else name}/run"
    with closing(open_store(uri)) as store:
        store.put("rounds/first", b"1")
        store.delete("rounds/first")
        vanish()
        for act in (store.put, store.create):
            with pytest.raises((StoreError, StoreUnusable)):
                act("rounds/second", b"2")
        with pytest.raises((StoreError, StoreUnusable)):
            store.list("")
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("kind", ON_DISK)
def test_what_a_write_has_answered_outlasts_a_power_cut(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes, its name, and the names of the folders above it, which it made."""
    disk, root = Disk(monkeypatch), tmp_path / "new" / "bucket"
    with closing(open_store(f"{kind}://{root}")) as store:
        assert store.create("runs/one/commit", b"record")
        store.put("runs/one/payloads/0000", b"first")
        store.put("runs/one/payloads/0000", b"another, longer")
    for key in ("runs/one/commit", "runs/one/payloads/0000"):
        assert disk.has(root / key, below=tmp_path)
    (root / "unsynced").write_bytes(b"x")
    assert not disk.has(root / "unsynced", below=tmp_path)


@pytest.mark.parametrize("act", ["put", "create"])
@pytest.mark.parametrize("kind", ACROSS_PROCESSES)
def test_a_writer_killed_by_sigkill_leaves_whole_objects_and_all_that_were_confirmed(
    kind: str, act: str, store_uri: Callable[[str], str]
) -> None:
    size, confirmed = 2**20, 5
    code = """if True:
        import sys
        from composer_prime.store import open_store
        store = open_store(sys.argv[1])
        for turn in range(100_000):
            getattr(store, sys.argv[2])(f"payload/{turn}", bytes([turn % 256]) * int(sys.argv[3]))
            print(turn, flush=True)
    """
    uri = store_uri(kind)
    command = [sys.executable, "-c", code, uri, act, str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as writer:
        assert writer.stdout is not None
        for turn in range(confirmed):
            assert writer.stdout.readline() == f"{turn}\n"
        writer.kill()  # in the midst of the next one
    with closing(open_store(uri)) as store:
        listed = store.list("payload/")
        assert {f"payload/{turn}" for turn in range(confirmed)} <= set(listed)
        for key in listed:
            assert store.get(key) == bytes([int(key.rpartition("/")[2]) % 256]) * size


@pytest.mark.parametrize("kind", ["fsspec.implementations.memory.MemoryFileSystem", "huggingface_hub.HfFileSystem"])
def test_a_filesystem_that_looks_and_then_writes_is_refused(kind: str) -> None:
    module, _, name = kind.rpartition(".")
    with pytest.raises(StoreUnusable, match=rf"{name} is not known to create a file atomically .*by its URI"):
        FsspecStore(getattr(importlib.import_module(module), name)(), "bucket", "run")


@pytest.mark.parametrize("uri", ["gcs://bucket/run", "abfs://bucket/run", "http://host/x", "s3a://bucket"])
def test_unknown_scheme_is_refused_with_the_known_ones(uri: str) -> None:
    with pytest.raises(ConfigError, match=rf"{uri}.*unknown scheme.*file://.*s3://.*gs://.*hf://.*memory://"):
        open_store(uri)


@pytest.mark.parametrize(
    "uri",
    [
        *("", "file://relative/path", "memory://"),
        *("s3://", "s3://ab", "s3://bucket/a b", "s3://bucket/.."),
        *("gs://", "gs://ab", "gs://bucket/a b", "gs://bucket/..", "az://", "az://bucket/.."),
        *("hf://", "hf://buckets", "hf://buckets/name", "hf://models/name/bucket", "hf://buckets/na me/bucket"),
    ],
)
def test_uri_that_names_no_place_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError):
        open_store(uri)
