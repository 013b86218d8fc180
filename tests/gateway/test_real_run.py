"""One owner's site and one guest train the tiny policy for real; the guest has no credentials of the bucket.

`test_training.py` has the outer loop of such sites without models, `test_serving.py` the command, in the default run.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync.records import Commit
from tests.gateway.guarded import KEYS, OWNER, admit_guests
from tests.integration.local_runs import command, run_paths, started, wait_until

pytestmark = [pytest.mark.long, pytest.mark.s3]


def site(folder: Path, name: str, store: str) -> list[str]:
    """`composer-prime site` for one site of a run that site a founds."""
    # 40 rounds of two seconds, so that the run is still on when the volunteer comes.
    settings: dict[str, Any] = {"outer__store": store, "outer__pace": "seconds", "outer__inner_seconds": 2.0}
    settings |= {"max_steps": 480}
    settings |= {"outer__owner": OWNER.public, "outer__keys__a": KEYS["a"].public}
    settings |= {"site__key_file": folder / f"{name}.key"}
    return command("site", folder / f"out-{name}", "--site", name, **settings)


def takers(store: Store) -> set[str]:
    """The sites of which commits took anything."""
    places = {key: keys.place(key) for key in store.list(keys.rounds_prefix(0))}
    commits = [key for key, place in places.items() if place is not None and place.kind == "commit"]
    return {entry.site for key in commits for entry in Commit.from_bytes(store.get(key), key).taken}


def test_a_volunteer_behind_a_gateway_trains_a_run_to_its_end(
    tmp_path: Path, store_uri: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, audit = store_uri("seaweed"), tmp_path / "audit.jsonl"
    for name in ("a", "alice"):
        KEYS[name].save(tmp_path / f"{name}.key")
    logs = {name: tmp_path / f"{name}.log" for name in ("a", "alice", "gateway")}
    with ExitStack() as stack:
        bucket = stack.enter_context(closing(open_store(f"{uri}/two-sites")))
        owners = stack.enter_context(started(site(tmp_path, "a", uri), logs["a"]))
        wait_until(lambda: bucket.list(keys.manifest()) != [], owners, logs["a"])
        admit_guests(bucket, "alice")
        serve = [str(Path(sys.executable).with_name("composer-prime")), "gateway", f"{uri}/two-sites", "--port", "0"]
        gateway = stack.enter_context(started([*serve, "--audit", str(audit), "--rate", "500"], logs["gateway"]))
        wait_until(lambda: "sites use" in logs["gateway"].read_text(), gateway, logs["gateway"])
        root = logs["gateway"].read_text().split("listening at ")[1].split()[0]
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
            monkeypatch.delenv(variable)
        volunteer = stack.enter_context(started(site(tmp_path, "alice", f"gateway+{root}"), logs["alice"]))
        codes = [waited(process, log) for process, log in ((volunteer, logs["alice"]), (owners, logs["a"]))]
        assert codes == [0, 0], [log.read_text()[-3000:] for log in logs.values()]
        gateway.terminate()
        gateway.wait(600)
        assert takers(bucket) == {"a", "alice"}
    ends = [
        json.loads(run_paths(tmp_path / f"out-{name}").summary.read_text())["sites"][name] for name in ("a", "alice")
    ]
    assert ends[0]["master_sha256"] == ends[1]["master_sha256"] and ends[1]["finished"]
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert {line["site"] for line in lines} == {"alice"}
    assert [line for line in lines if line["verdict"] not in ("allowed", "missing")] == []
    written = {
        place.kind for line in lines if line["operation"] in ("create", "put") and (place := keys.place(line["key"]))
    }
    assert written == {"claim", "beat", "offer", "payload", "tape"}


def waited(process: subprocess.Popen[bytes], log: Path) -> int:
    try:
        return process.wait(600)
    except subprocess.TimeoutExpired:
        raise AssertionError(log.read_text()[-3000:]) from None
