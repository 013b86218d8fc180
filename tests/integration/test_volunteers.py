"""A volunteer in a real run over a real S3 server: invited, asleep, killed, paused, and back each time until the end.

The owner's site waits for it (quorum 2), so every round that closes is one that the volunteer was in. And without the
owner's site it gets no further than the open round: so that site is stopped wherever the test needs time to act.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from composer_prime.config import load_recipe
from composer_prime.config.paths import RunPaths
from composer_prime.config.toml import to_toml
from composer_prime.store import Store, keys, open_store
from composer_prime.sync.records import Beat
from composer_prime.sync.signatures import SigningKey
from tests.integration.local_runs import (
    QUICK,
    REPOSITORY,
    Touched,
    look,
    role_processes,
    started,
    trained,
    wait_until,
)
from tests.patience import PATIENCE_S
from tests.volunteers.owned_run import CONSENT

pytestmark = [pytest.mark.slow, pytest.mark.s3, pytest.mark.timeout(1500)]
LIVENESS_S = 3.0
NUM_STEPS = 32
EXECUTABLE = str(Path(sys.executable).with_name("composer-prime"))
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def write_recipe(folder: Path, uri: str, owner: SigningKey, **changes: object) -> Path:
    """The owner's recipe: the demo's, made quick, with an owner and one site a with a key, but for `changes`."""
    SigningKey.generate().save(folder / "a.key")
    owned = {"outer.store": uri, "outer.owner": owner.public, "output_dir": str(folder / "owner")}
    values = {**QUICK, **owned, "sites.count": 1, "site.key_file": str(folder / "a.key"), **changes}
    overrides = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    path = folder / "recipe.toml"
    path.write_text(to_toml(load_recipe(REPOSITORY / "recipes/local/two_sites.toml", overrides).to_data()))
    return path


def newest_state(store: Store) -> str:
    """What the volunteer's newest beat says."""
    beats = [key for key in store.list(keys.site_prefix("alice")) if keys.is_beat(key)]
    return Beat.from_bytes(store.get(beats[-1]), beats[-1]).state if beats else "none"


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def test_a_volunteer_that_sleeps_is_killed_and_pauses_ends_with_the_owners_masters(
    tmp_path: Path, store_uri: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = store_uri("seaweed")
    owner, invitation = SigningKey.generate(), tmp_path / "alice.invitation"
    owner.save(tmp_path / "owner.key")
    waiting = {"max_steps": NUM_STEPS, "outer.quorum": 2, "outer.liveness_s": LIVENESS_S}
    recipe = write_recipe(tmp_path, uri, owner, **waiting)
    ours, theirs = RunPaths(tmp_path / "owner" / "two-sites"), RunPaths(tmp_path / "alice" / "two-sites")
    logs = [tmp_path / f"{name}.log" for name in ("a", "join", "again")]
    store = open_store(f"{uri}/two-sites")
    join = [EXECUTABLE, "join", str(invitation), "--folder", str(tmp_path / "alice"), "--max-mbit-up", "100"]
    join += CONSENT
    with started([EXECUTABLE, "site", str(recipe), "--site", "a"], logs[0]) as host:
        wait_until(lambda: bool(store.list(keys.manifest())), host, logs[0])
        invite = [EXECUTABLE, "invite", f"{uri}/two-sites", "--name", "alice", "--recipe", str(recipe)]
        invite += ["--key", str(tmp_path / "owner.key"), "--out", str(invitation)]
        # The server knows one key, which may do all: so alice is a member, and may close rounds, too.
        given = ["--member", "--credentials-env", ",".join(SECRETS)]
        invited = subprocess.run([*invite, *given], check=True, stderr=subprocess.PIPE, text=True)
        assert "warning: the credentials that travel may write admissions/" in invited.stderr
        for name in SECRETS:  # the volunteer has only what the invitation holds
            monkeypatch.delenv(name)
        stopped = suspended(host)
        with started(join, logs[1]) as volunteer:
            wait_until(lambda: trained(theirs.site("alice")) >= 2, volunteer, logs[1])
            check_that_nothing_is_open(volunteer)
            asleep = suspended(volunteer)
            before = trained(theirs.site("alice"))
            resume(stopped)
            time.sleep(2 * LIVENESS_S)  # longer than the others wait
            resume(asleep)
            wait_until(lambda: trained(theirs.site("alice")) > before, volunteer, logs[1])
            stopped = suspended(host)
            members = family(volunteer)
            os.kill(volunteer.pid, signal.SIGKILL)
            psutil.wait_procs(members, PATIENCE_S)
        assert not [member for member in members if member.is_running()], "a killed volunteer leaves nothing running"
        before = trained(theirs.site("alice"))
        resume(stopped)
        with started(join, logs[2]) as volunteer:
            wait_until(lambda: trained(theirs.site("alice")) > before, volunteer, logs[2])
            stopped = suspended(host)
            subprocess.run([*join[:5], "--pause"], check=True)
            wait_until(lambda: "paused: nothing runs" in logs[2].read_text(), volunteer, logs[2])
            assert newest_state(store) == "leaving" and len(family(volunteer)) == 1
            resume(stopped)
            subprocess.run([*join[:5], "--resume"], check=True)
            assert volunteer.wait(PATIENCE_S) == 0, logs[2].read_text()[-3000:]
        assert host.wait(PATIENCE_S) == 0, logs[0].read_text()[-3000:]
    check_end(ours, theirs)
    assert "AWS_SECRET" not in "".join(log.read_text() for log in logs)
    store.close()


def check_that_nothing_is_open(volunteer: subprocess.Popen[bytes]) -> None:
    """What `join` started listens on loopback, and tells a stranger that it is healthy and no more."""
    seen: dict[int, Touched] = {}
    look(role_processes(volunteer), seen)
    others = [member for member in family(volunteer) if member.pid not in seen]
    assert not [each for member in others for each in member.net_connections() if each.status == psutil.CONN_LISTEN]
    found = {touched.role: touched for touched in seen.values()}
    assert found["inference"].listens and found["orchestrator"].listens and not found["trainer"].listens
    assert set().union(*(touched.answers for touched in seen.values())) == {"GET /health"}


def suspended(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Close the laptop."""
    members = family(process)
    for member in members:
        member.suspend()
    return members


def resume(members: list[psutil.Process]) -> None:
    """Open it again."""
    for member in reversed(members):
        member.resume()


def check_end(ours: RunPaths, theirs: RunPaths) -> None:
    """Both sites hold the same final masters, and both have merged work in them."""
    results = [json.loads(paths.site(name).result.read_text()) for paths, name in ((ours, "a"), (theirs, "alice"))]
    assert results[0]["master_sha256"] == results[1]["master_sha256"]
    assert {master["version"] for master in results[0]["master_sha256"].values()} == {NUM_STEPS // 4 + 1}
    assert all(result["tokens"] > 0 for result in results)
