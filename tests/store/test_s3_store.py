"""The S3 store's own promises: failures that pass are outlived, those that don't are named in time, with a remedy.

A small server of ours fails on cue; SeaweedFS is asked what only a real one can show.
"""

import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from composer_prime.errors import KeyMissing, StoreError, StoreUnusable
from composer_prime.store import Store, open_store, probe_store, remote
from composer_prime.store.obstore import PART_BYTES, READ_BYTES
from tests.patience import PATIENCE_S
from tests.servers import S3Server, weed
from tests.servers.faulty_s3 import FaultyServer

REPOSITORY = Path(__file__).parents[2]


def send_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the AWS variables at `endpoint`."""
    for name, value in S3Server("test", endpoint, "key", "secret").environment().items():
        monkeypatch.setenv(name, value)


def test_client_is_imported_only_when_a_bucket_is_opened() -> None:
    code = """if True:
        import sys
        from composer_prime.store import open_store
        open_store("/folder")
        assert not {"obstore", "boto3", "botocore", "fsspec", "torch"} & set(sys.modules)
        open_store("s3://bucket/x")
        assert "obstore" in sys.modules and not {"boto3", "botocore", "fsspec", "torch"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    "fault",
    [
        (500, "InternalError", False),
        (503, "SlowDown", False),
        (409, "OperationAborted", False),
        (429, "TooManyRequests", False),
        (408, "RequestTimeout", False),
        (409, "ConditionalRequestConflict", False),
    ],
)
@pytest.mark.parametrize("act", ["put", "create"])
def test_failures_that_pass_are_outlived(
    fault: tuple[int, str, bool], act: str, faulty: FaultyServer, faulty_store: Store
) -> None:
    faulty.faults = [fault] * 3
    assert getattr(faulty_store, act)("k", b"bytes") in (None, True)
    assert faulty.objects == {"/bucket/k": b"bytes"}
    assert faulty.puts == 4


def test_create_whose_answer_was_lost_is_true_when_its_bytes_stand(faulty: FaultyServer, faulty_store: Store) -> None:
    faulty.faults = [(500, "InternalError", True)]
    assert faulty_store.create("k", b"mine") is True
    assert faulty.puts == 2, "the second try should have met the first one's bytes"


def test_conflict_with_bytes_that_stand_is_a_loss(faulty: FaultyServer, faulty_store: Store) -> None:
    faulty.objects["/bucket/k"] = b"theirs"
    faulty.faults = [(409, "ConditionalRequestConflict", False)] * 1000
    assert faulty_store.create("k", b"mine") is False
    assert faulty.puts == 1


def test_winner_gone_at_the_read_back_is_tried_again(faulty: FaultyServer, faulty_store: Store) -> None:
    faulty.faults = [(412, "PreconditionFailed", False)]
    assert faulty_store.create("k", b"mine") is True


def test_failure_that_lasts_is_a_store_error_after_the_deadline(
    faulty: FaultyServer, faulty_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 0.3)
    faulty.faults = [(503, "SlowDown", False)] * 1000
    with pytest.raises(StoreError, match=r"put of k in s3://bucket failed: on cue \(SlowDown\)") as raised:
        faulty_store.put("k", b"")
    assert not isinstance(raised.value, StoreUnusable), "the store has answered before: a retry may succeed"
    assert faulty.puts > 1


def test_failure_that_is_no_accident_is_not_tried_again(faulty: FaultyServer, faulty_store: Store) -> None:
    faulty.faults = [(400, "InvalidRequest", False)]
    with pytest.raises(StoreError, match="InvalidRequest"):
        faulty_store.put("k", b"")
    assert faulty.puts == 1


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "InvalidObjectState", "The operation is not valid for the object's storage class"),
        (400, "InvalidRequest", "The object was stored using a form of Server Side Encryption. The correct parameters"),
    ],
)
def test_an_object_that_its_writer_hid_is_as_good_as_none(
    status: int, code: str, words: str, faulty: FaultyServer, faulty_store: Store
) -> None:
    faulty.get_faults = [(status, code, words)]
    with pytest.raises(KeyMissing, match=code):
        faulty_store.get_range("rounds/0000/00000000/payload/a-0", 0, 10)


def test_wrong_region_is_named_with_its_remedy(faulty: FaultyServer, faulty_store: Store) -> None:
    faulty.faults = [(400, "AuthorizationHeaderMalformed", False)] * 2
    with pytest.raises(StoreUnusable, match="AWS_DEFAULT_REGION"):
        faulty_store.put("k", b"")


@pytest.mark.parametrize("refusal", [(403, "InvalidAccessKeyId"), (400, "ExpiredToken"), (401, "Unauthorized")])
def test_credentials_that_expire_are_a_store_error_and_new_ones_heal_it(
    refusal: tuple[int, str], faulty: FaultyServer, faulty_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty_store.put("k", b"old")
    faulty.known_key, faulty.refusal = "renewed", refusal
    for act in (lambda: faulty_store.put("k", b"new"), lambda: faulty_store.get("k"), lambda: faulty_store.list("")):
        with pytest.raises(StoreError, match=rf"{refusal[1]}.*: renew the credentials.*read again") as raised:
            act()
        assert not isinstance(raised.value, StoreUnusable), "a run must outlive credentials that expire"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
    faulty_store.put("k", b"new")
    assert faulty_store.get("k") == b"new"


def test_credentials_renewed_in_a_profile_are_picked_up_by_the_failing_call_itself(
    faulty: FaultyServer, faulty_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile = tmp_path / "credentials"
    profile.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    faulty.known_key = "old"
    faulty_store.put("k", b"old")
    profile.write_text(profile.read_text().replace("old", "renewed"))
    faulty.known_key = "renewed"
    faulty_store.put("k", b"new")
    assert faulty.puts == 3, "old, refused, renewed"


def test_credentials_refused_at_first_contact_are_unusable(faulty: FaultyServer, faulty_store: Store) -> None:
    faulty.known_key = "another"
    with pytest.raises(StoreUnusable, match=r"InvalidAccessKeyId\): set AWS_ACCESS_KEY_ID"):
        faulty_store.put("k", b"")


def test_operation_without_an_answer_ends_with_the_first_silence_after_the_deadline(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "READ_TIMEOUT_S", 1.0)
    with closing(open_store("s3://bucket")) as store:
        store.put("k", b"")
        monkeypatch.setattr(remote, "OPERATION_S", 0.5)
        faulty.is_stuck.set()
        with pytest.raises(StoreError, match=r"no sound answer.*(?:Timeout|TimedOut)"):
            store.put("k", b"")


def test_what_trickles_is_given_up_at_the_deadline(
    faulty: FaultyServer, faulty_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty_store.put("k", bytes(4 * READ_BYTES))
    monkeypatch.setattr(remote, "UNKNOWN_SIZE_S", 0.0)
    faulty.visit = partial(time.sleep, 0.1)
    with pytest.raises(StoreError, match="slower than the slowest"):
        faulty_store.get("k")


@pytest.mark.parametrize("status", [403, 404])
def test_a_refusal_without_a_code_is_no_word_on_the_object_or_the_keys(
    status: int, faulty: FaultyServer, faulty_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy says so, or the edge to which a service redirects: not the service."""
    monkeypatch.setattr(remote, "RETRY_S", 0.3)
    faulty_store.put("k", b"kept")
    faulty.get_faults = [(status, "", "go away")] * 1000
    with pytest.raises(StoreError, match=rf"no sound answer from .*\({status}") as raised:
        faulty_store.get("k")
    assert not isinstance(raised.value, KeyMissing | StoreUnusable)
    faulty.get_faults = [(status, "", "go away")]
    assert faulty_store.get("k") == b"kept"


def refused(uri: str) -> str:
    """The message of the StoreUnusable that probing `uri` raises."""
    with closing(open_store(uri)) as store, pytest.raises(StoreUnusable, match=uri) as raised:
        probe_store(store)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_endpoint_where_nothing_listens_is_unusable_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unheard:  # bound, so that nobody else takes the port, but not listening
        unheard.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        send_to(endpoint, monkeypatch)
        message = refused("s3://bucket/run")
    assert f"no sound answer from {endpoint}" in message and "check the network and the endpoint" in message


def test_endpoint_that_never_answers_is_unusable_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "READ_TIMEOUT_S", 1)
    monkeypatch.setattr(remote, "FIRST_CONTACT_S", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        send_to(f"http://127.0.0.1:{silent.getsockname()[1]}", monkeypatch)
        assert "no sound answer" in refused("s3://bucket/run")


def test_missing_credentials_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    send_to("http://127.0.0.1:9", monkeypatch)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    assert "set AWS_ACCESS_KEY_ID" in refused("s3://bucket/run")


@pytest.mark.s3
def test_wrong_secret_and_missing_bucket_are_named_by_a_real_server(
    seaweed: S3Server, store_uri: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = store_uri("seaweed")
    assert "there is no such bucket: make it" in refused("s3://absent-bucket/run")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    message = refused(uri)
    assert "SignatureDoesNotMatch" in message and "set AWS_ACCESS_KEY_ID" in message


@pytest.mark.s3
@pytest.mark.parametrize("kind", ["seaweed", "hf"])
def test_put_in_parts_comes_back_whole(kind: str, store_uri: Callable[[str], str]) -> None:
    data = bytes(range(251)) * (2 * PART_BYTES // 251 + 1000)
    with closing(open_store(store_uri(kind))) as store:
        store.put("large", data)
        assert store.get("large") == data
        assert store.get_range("large", PART_BYTES - 5, 10) == data[PART_BYTES - 5 : PART_BYTES + 5]


@pytest.mark.s3
def test_listing_of_more_than_a_page_is_complete(store_uri: Callable[[str], str]) -> None:
    keys = [f"tape/a/{number:08d}.jsonl" for number in range(1_005)]
    with closing(open_store(store_uri("seaweed"))) as store, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
        assert store.list("tape/") == keys


@pytest.mark.s3
def test_write_outlives_a_restart_of_the_server_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with weed.seaweed(tmp_path) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        store = open_store(f"s3://{weed.BUCKET}/run")
        assert store.create("before", b"1")
    with closing(store), ThreadPoolExecutor(1) as pool:
        creating = pool.submit(store.create, "during", b"2")
        with weed.seaweed(tmp_path, port=int(server.endpoint.rpartition(":")[2])):
            assert creating.result(timeout=PATIENCE_S) is True
            assert store.get("before") == b"1" and store.get("during") == b"2"
            assert not store.create("before", b"other")


@pytest.mark.s3
@pytest.mark.skipif(sys.platform != "linux", reason="fork is sound on Linux only")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_is_told_that_its_parents_bucket_is_none_of_its_own(store_uri: Callable[[str], str]) -> None:
    """obstore's threads stay behind, and the child would wait for them for ever."""

    def use(store: Store) -> None:
        for act in (lambda: store.get("k"), lambda: open_store(store.uri).get("k")):
            with pytest.raises(
                (StoreError, StoreUnusable), match=r"was forked from one that uses a bucket.*start it by spawn"
            ):
                act()

    with closing(open_store(store_uri("seaweed"))) as store:
        store.put("k", b"parent")
        child = multiprocessing.get_context("fork").Process(target=use, args=(store,))
        child.start()
        child.join(PATIENCE_S)
        assert child.exitcode == 0
        assert store.get("k") == b"parent"
