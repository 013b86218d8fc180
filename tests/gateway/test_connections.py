"""Connections that bring nothing, or hardly anything, end; members get in all the while, however many those are."""

import gc
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from composer_prime.gateway.connections import KEEP_ALIVE_S, ConnectionLimits, _network
from composer_prime.gateway.serving import Listening, faces_clients
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.store.gateway import open_gateway
from tests.gateway.guarded import KEYS, PATIENCE_S, RUN, Guarded, guarding, make_run
from tests.gateway.test_floods import head, stalled, status_of, wait_until
from tests.servers.certificate import write_certificate

SHORT = ConnectionLimits(connections=1000, strangers=None, head_s=0.5, rest_s=0.5, keep_alive_s=0.5)
UNSIGNED = b"GET /run/site HTTP/1.1\r\nhost: x\r\n\r\n"
MANIFEST = keys.manifest()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def is_over(connection: socket.socket) -> bool:
    """Read what comes until the other side ends the connection; fails when it doesn't."""
    with suppress(ConnectionError):
        while connection.recv(2**16):
            pass
    return True


def is_open(connection: socket.socket) -> bool:
    """Whether neither an end nor an answer has come."""
    connection.settimeout(0)
    try:
        return not connection.recv(1, socket.MSG_PEEK) and False
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    finally:
        connection.settimeout(PATIENCE_S)


def num_over(connections: list[socket.socket]) -> int:
    """How many the other side has ended; what came on the others is read."""
    over = 0
    for connection in connections:
        connection.settimeout(0)
        try:
            while connection.recv(2**16):
                pass
            over += 1
        except BlockingIOError:
            pass
        except ConnectionError:
            over += 1
    return over


def trickle(connection: socket.socket, begin: bytes) -> None:
    """Send byte after byte until the other side ends the connection."""
    connection.sendall(begin)
    connection.settimeout(0.05)
    with suppress(ConnectionError):
        for _ in range(20 * PATIENCE_S):
            connection.sendall(b"x")
            with suppress(TimeoutError):
                if not connection.recv(2**16):
                    return
        raise AssertionError("it wasn't ended")


@contextmanager
def several(port: int, number: int, say: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that say this and no more."""
    with ExitStack() as stack:
        made = [stack.enter_context(closing(connect(port))) for _ in range(number)]
        for connection in made:
            connection.sendall(say)
        yield made


@pytest.fixture
def short(store: Store) -> Iterator[Guarded]:
    """A gateway that waits briefly."""
    make_run(store)
    with guarding(store, limits=SHORT) as gateway:
        yield gateway


# --- for how long ----------------------------------------------------------------------------------------------------

REFUSED_BODY = b"PUT /run/objects/x?operation=put HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"


@pytest.mark.parametrize(
    "attack",
    [
        lambda connection: is_over(connection),
        lambda connection: trickle(connection, b""),
        lambda connection: trickle(connection, b"GET /run/site HTTP/1.1\r\nhost: "),
        lambda connection: trickle(connection, UNSIGNED + b"GET /run/site HTTP/1.1\r\nhost: "),
        lambda connection: trickle(connection, REFUSED_BODY),
        lambda connection: (connection.sendall(UNSIGNED), is_over(connection)),
        lambda connection: (connection.sendall(REFUSED_BODY + bytes(1_000_000)), is_over(connection)),
    ],
    ids=["silent", "slow-method", "slow-head", "slow-second-head", "slow-body", "idle", "idle-after-a-refused-body"],
)
def test_a_connection_that_brings_hardly_anything_ends_while_a_member_is_answered(
    attack: Callable[[socket.socket], object], short: Guarded
) -> None:
    errors: list[BaseException] = []

    def attacked() -> None:
        try:
            with closing(connect(short.port)) as connection:
                attack(connection)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=attacked)
    with closing(short.store("alice")) as alice:
        thread.start()
        while thread.is_alive():
            assert alice.get(MANIFEST)
        thread.join()
    assert not errors


def test_a_body_that_takes_longer_than_a_head_may_is_taken(short: Guarded) -> None:
    with stalled(short, "alice") as slow, closing(connect(short.port)) as silent:
        assert is_over(silent), "the head's time is over"
        assert is_open(slow)
        slow.sendall(b"x" * 999)
        assert status_of(slow) == 401, "the body isn't the one that was signed"


def test_a_tls_handshake_that_doesn_t_come_ends_in_a_head_s_time(store: Store, tmp_path: Path) -> None:
    make_run(store)
    certificate, key = write_certificate(tmp_path, "127.0.0.1")
    with (
        guarding(store, limits=SHORT, tls=(certificate, key)) as gateway,
        closing(connect(gateway.port)) as silent,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SSL_CERT_FILE", certificate)
        KEYS["alice"].save(tmp_path / "alice.key")
        with closing(open_gateway("https", f"127.0.0.1:{gateway.port}/{RUN}", tmp_path / "alice.key")) as alice:
            assert alice.get(MANIFEST) == store.get(MANIFEST)
        assert is_over(silent)


def test_a_site_s_pauses_end_no_connection() -> None:
    assert ConnectionLimits(1).keep_alive_s == KEEP_ALIVE_S == 75


# --- how many --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", b"GET /run/si", UNSIGNED], ids=["silent", "half", "unsigned"])
def test_strangers_fill_a_gateway_with_themselves_alone(said: bytes, store: Store) -> None:
    make_run(store)
    limits = ConnectionLimits(connections=20, strangers=None)
    with guarding(store, limits=limits) as gateway, closing(gateway.store("alice")) as alice:
        assert alice.get(MANIFEST)
        with several(gateway.port, 60, said) as strangers:
            wait_until(lambda: num_over(strangers) >= 40)
            assert alice.get(MANIFEST), "on the connection that it has"
            with closing(gateway.store("bob")) as bob:
                assert bob.get(MANIFEST), "and on a new one"


def test_a_member_s_idle_connections_keep_nobody_out(store: Store) -> None:
    make_run(store)
    with guarding(store, limits=ConnectionLimits(connections=20, strangers=None)) as gateway, ExitStack() as stack:
        kept = []
        for _ in range(30):
            kept.append(stack.enter_context(closing(connect(gateway.port))))
            kept[-1].sendall(head("alice", "GET", "site"))
        wait_until(lambda: len(gateway.lines()) >= 20)
        with closing(gateway.store("bob")) as bob:
            assert bob.get(MANIFEST)


def test_a_request_that_is_worked_on_is_ended_by_no_crowd(store: Store) -> None:
    make_run(store)
    limits = ConnectionLimits(connections=20, strangers=None)
    with guarding(store, limits=limits) as gateway, stalled(gateway, "alice") as slow:
        wait_until(lambda: any(getattr(each, "cycle", None) for each in list(gateway.server.server_state.connections)))
        with several(gateway.port, 60) as strangers:
            assert all(is_over(connection) for connection in strangers[:40])
            assert is_open(slow)
            slow.sendall(b"x" * 999)
            assert status_of(slow) == 401, "the body isn't the one that was signed"


def test_strangers_of_one_address_are_bounded_and_its_members_aren_t(store: Store) -> None:
    make_run(store)
    with (
        guarding(store, limits=ConnectionLimits(connections=1000, strangers=5)) as gateway,
        closing(gateway.store("alice")) as alice,
    ):
        assert alice.get(MANIFEST)
        with several(gateway.port, 12) as strangers:
            assert all(is_over(connection) for connection in strangers[:7])
            assert all(is_open(connection) for connection in strangers[7:])
            assert alice.get(MANIFEST)
            with closing(gateway.store("bob")) as bob:
                assert bob.get(MANIFEST)


@pytest.mark.parametrize(
    ("at", "faces"),
    [
        (Listening("0.0.0.0", 443, certfile=Path("c"), keyfile=Path("k")), True),
        (Listening("0.0.0.0", 80, behind_tls=True), False),
        (Listening("127.0.0.1", 80), False),
        (Listening("::1", 80), False),
    ],
)
def test_a_proxy_s_address_is_not_taken_for_one_client_s(at: Listening, faces: bool) -> None:
    assert faces_clients(at) is faces


def test_an_ipv6_client_is_its_network() -> None:
    assert _network("2001:db8:1:2::3") == _network("2001:db8:1:2:ffff::4") != _network("2001:db8:1:3::3")
    assert _network("::ffff:192.0.2.7") == "192.0.2.7/32" and _network("192.0.2.7") == "192.0.2.7"
    assert _network("fe80::1%eth0") == "fe80::/64" and _network("") == ""


@pytest.mark.slow
def test_three_hundred_idle_connections_don_t_silence_a_gateway_of_256_descriptors(
    store_uri: Callable[[str], str], tmp_path: Path
) -> None:
    uri = store_uri("file")
    make_run(open_store(uri))
    KEYS["alice"].save(tmp_path / "alice.key")
    command = [sys.executable, "-m", "composer_prime.cli.main", "gateway", uri, "--port", "0", "--audit", "audit"]
    limited = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *command]
    process = subprocess.Popen(limited, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert process.stderr is not None
        root = process.stderr.readline().split()[-1].removeprefix("http://")
        lines = [process.stderr.readline() for _ in range(2)]
        with closing(open_gateway("http", f"{root}/{RUN}", tmp_path / "alice.key")) as alice:
            assert alice.get(MANIFEST)
        process.send_signal(signal.SIGSTOP)  # so that all are there at once
        with several(int(root.rpartition(":")[2]), 300):
            process.send_signal(signal.SIGCONT)
            for _ in range(3):
                with closing(open_gateway("http", f"{root}/{RUN}", tmp_path / "alice.key")) as alice:
                    assert alice.get(MANIFEST)
        lines.append(process.stderr.readline())
        assert lines[-1].startswith("open files are limited to 256: at most 96 connections; start after `ulimit -n")
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        said = process.stderr.read()
        process.stderr.close()
    assert said == "", "it had descriptors for all that it accepted"


# --- how fast --------------------------------------------------------------------------------------------------------


def test_neither_side_holds_back_what_it_sends(gateway: Guarded) -> None:
    with closing(gateway.store("alice")) as alice:
        assert alice.get(MANIFEST)
        ends = [each for each in gc.get_objects() if isinstance(each, socket.socket) and _is_of(each, gateway.port)]
        assert len(ends) >= 2
        assert all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in ends)


def _is_of(found: socket.socket, port: int) -> bool:
    """Whether this is an end of a connection to the port."""
    try:
        return port in (found.getsockname()[1], found.getpeername()[1])
    except (OSError, IndexError):
        return False
