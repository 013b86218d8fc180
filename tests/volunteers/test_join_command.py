"""`join` and `doctor` as commands, whole but for the training: what is said when, what caps do, gateways in trouble."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from composer_prime.config import Recipe, SiteSettings, settle_site
from composer_prime.config.recipe import RecipeBase
from composer_prime.gateway.app import Gateway
from composer_prime.gateway.store import GatewayStore
from composer_prime.plan.traffic import Link
from composer_prime.store import keys, open_store, remote
from composer_prime.sync.metered import BYTES_PER_MBIT, PIECE_BYTES
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.volunteers import doctor
from composer_prime.volunteers import join as joining
from composer_prime.volunteers.folder import VolunteerFolder
from composer_prime.volunteers.invitation import read_invitation
from tests.gateway.guarded import claim_of, guarding
from tests.servers.in_thread import serving_app
from tests.servers.weed import free_ports
from tests.volunteers.owned_run import CONSENT, OWNER, OwnedRun
from tests.volunteers.test_commands import invite, refused
from tests.volunteers.test_join import FakeSite

UP_MBIT, DOWN_MBIT = 1.0, 1.2


@pytest.fixture(autouse=True)
def the_volunteers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without anything of the bucket's; scratch files go to `tmp`."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def trains(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., int]], None]:
    """Sets what `join` starts for a site."""
    return lambda run_site: monkeypatch.setattr(joining, "site_runner", lambda recipe: run_site)


def place(run: OwnedRun) -> Path:
    return run.folder / "alice"


def test_who_sees_what_is_printed_before_anything_starts(
    cli, run: OwnedRun, trains, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    def note(recipe: RecipeBase, site: str, resume: bool) -> int:
        printed.append(capsys.readouterr().out)
        assert {file.name for file in place(run).iterdir()} == {"alice.key", "alice.site-lock"}
        return 0

    invite(cli, run)
    trains(note)
    assert cli("join", run.file(), *CONSENT, "--folder", place(run)).code == 0
    (before,) = printed
    assert f"site alice in run run, whose owner is {OWNER.public}." in before
    assert f" parameters come to this machine, into {place(run)}, which is yours to delete." in before
    assert (
        "Prompts and answers stay on this machine. Whoever reads the bucket sees what your training changed" in before
    )
    assert "this machine's host name" in before and "Code that runs here: environments reverse-letters" in before


def test_caps_hold_for_the_store_of_the_site_that_join_starts(cli, run: OwnedRun, trains) -> None:
    took: dict[str, float] = {}

    def transfer(recipe: RecipeBase, site: str, resume: bool) -> int:
        """As a site's trainer opens the bucket: by the settings in its folder."""
        assert isinstance(recipe, Recipe)
        folder = settle_site(recipe, site, inference_port=8000, model_dir=place(run), resume=resume).save()
        with closing(OuterLoop.from_settings(SiteSettings.load(folder))._store) as store:
            for way, act in {"up": lambda: store.put("probe/p", data), "down": lambda: store.get("probe/p")}.items():
                began = time.monotonic()
                for _ in range(num[way]):
                    act()
                took[way] = time.monotonic() - began
        return 0

    data, num = bytes(PIECE_BYTES - 1), {"up": 2, "down": 3}
    invite(cli, run)
    trains(transfer)
    caps = ("--max-mbit-up", UP_MBIT, "--max-mbit-down", DOWN_MBIT)
    answer = cli("join", run.file(), *CONSENT, "--folder", place(run), *caps)
    assert answer.code == 0 and "(capped at 1 Mbit/s), down " in answer.out
    # The last write is owed, and a second's bytes were there; of reads two seconds' bytes are owed besides.
    assert took["up"] >= 0.95 * (len(data) / (UP_MBIT * BYTES_PER_MBIT) - 1)
    assert took["down"] >= 0.95 * (2 * len(data) / (DOWN_MBIT * BYTES_PER_MBIT) - 3)


def test_a_doctor_told_of_caps_judges_by_them(cli, run: OwnedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    named = []
    monkeypatch.setattr(doctor, "measure", lambda *args: named.append(args[1:]) or Link(100.0, 100.0, 0.01))
    invite(cli, run)
    free = cli("doctor", run.file(), *CONSENT)
    capped = cli("doctor", run.file(), *CONSENT, "--max-mbit-up", 0.1, "--max-mbit-down", 0.1)
    assert (free.code, capped.code) == (0, 0) and "capped" not in free.out
    assert "up 100.0 Mbit/s (capped at 0.1 Mbit/s), down 100.0 Mbit/s (capped at 0.1 Mbit/s)" in capped.out
    a_round = [next(line for line in told.out.splitlines() if "a round" in line) for told in (free, capped)]
    assert a_round[0] != a_round[1] and named == [("alice",)] * 2, "below whose name the link was tried"


# --- behind a gateway -------------------------------------------------------------------------------------------------


def test_a_gateway_s_invitation_is_written_checked_and_joined_by_commands(cli, run: OwnedRun, trains) -> None:
    with guarding(run.store) as gateway:
        uri = f"gateway+{gateway.root}/run"

        def claim(recipe: RecipeBase, site: str, resume: bool) -> int:
            """As a site does first: by its recipe and the environment alone."""
            assert recipe.outer is not None and recipe.site.key_file is not None
            key, record = SigningKey.load(recipe.site.key_file), claim_of(site)
            signed = record.model_copy(update={"signature": key.sign(record.message(run.site.run.sha256))})
            with closing(open_store(f"{recipe.outer.store}/run")) as store:
                return 0 if store.create(keys.claim(site, 0), signed.to_bytes()) else 1

        assert "as a guest" in invite(cli, run, "--gateway", uri).out
        assert read_invitation(str(run.file())).uri == uri and str(run.folder) not in run.file().read_text()
        checked = cli("doctor", run.file(), *CONSENT, "--folder", place(run))
        assert checked.code == 0 and {line[:4] for line in checked.out.splitlines()} == {"ok  ", "    "}, checked.out
        assert "behind a gateway nothing is written to try it" in checked.out and not place(run).exists()
        trains(claim)
        joined = cli("join", run.file(), *CONSENT, "--folder", place(run))
        assert (joined.code, joined.out.splitlines()[-1]) == (0, "run run is finished")
        assert "You are a guest" in joined.out
        assert run.store.list(keys.site_prefix("alice")) == [keys.claim("alice", 0)]
        assert {(line["site"], line["status"]) for line in gateway.lines()} <= {("alice", 200), ("alice", 404)}


@pytest.mark.parametrize("command", ["join", "doctor"])
@pytest.mark.parametrize("kind", ["nobody listens", "what stands before it says 502"])
def test_a_gateway_that_is_down_is_tried_again_and_then_one_line_says_so(
    cli, run: OwnedRun, trains, command: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_CONTACT_S", 0.5)
    started, tried = FakeSite(ends_with=0), count_looks(monkeypatch)
    trains(started)
    with down(kind) as root:
        invite(cli, run, "--gateway", f"gateway+{root}/run")
        before = run.store.list("")
        answer = cli(command, run.file(), *CONSENT, "--folder", place(run))
    refused(answer, "first contact in gateway+", "ask the run's owner whether the gateway runs")
    assert ("upstream is away (502)" in answer.err) == (kind != "nobody listens")
    assert len(tried) >= 3 and started.recipes == [] and run.store.list("") == before
    left = [path.name for path in place(run).rglob("*")] if place(run).exists() else []
    assert (
        left == (["alice.site-lock"] if command == "join" else [])
        and not VolunteerFolder(place(run), "alice").is_held()
    )
    assert "COMPOSER_PRIME_KEY" not in os.environ and not list((run.folder / "tmp").iterdir())


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When a gateway was asked at first contact."""
    looked, look = [], GatewayStore._look

    def counted(store: GatewayStore, left_s: float) -> object:
        looked.append(time.monotonic())
        return look(store, left_s)

    monkeypatch.setattr(GatewayStore, "_look", counted)
    return looked


@contextmanager
def down(kind: str) -> Iterator[str]:
    """Where a gateway should be that isn't up."""
    if kind == "nobody listens":
        yield f"http://127.0.0.1:{free_ports(1)[0]}"
        return
    with serving_app(PlainTextResponse("upstream is away", 502)) as port:
        yield f"http://127.0.0.1:{port}"


def test_a_gateway_that_comes_up_late_is_joined(cli, run: OwnedRun, trains, monkeypatch: pytest.MonkeyPatch) -> None:
    away, asked, started = [502, 503, 502], [], FakeSite(ends_with=0)
    answer = Gateway._any

    async def late(gateway: Gateway, request: Request) -> Response:
        asked.append(request.url.path)
        return PlainTextResponse("upstream is away", away.pop(0)) if away else await answer(gateway, request)

    monkeypatch.setattr(Gateway, "_any", late)
    trains(started)
    with guarding(run.store) as gateway:
        invite(cli, run, "--gateway", f"gateway+{gateway.root}/run")
        assert cli("join", run.file(), *CONSENT, "--folder", place(run)).code == 0
    assert asked[:4] == ["/run/site"] * 4 and len(started.recipes) == 1
