"""The whole way out, with our real inference server at its end: its answers become those of the run's masters."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from composer_prime.bearer import SITE_TOKEN, headers
from composer_prime.errors import SiteError
from composer_prime.export.following import ATTEMPTS, Follower
from composer_prime.export.reading import MasterReader
from composer_prime.export.server import WeightServer
from composer_prime.store import open_store
from composer_prime.store.base import Store
from tests.cli.command_line import assert_refused
from tests.export.fake_server import serving_fake
from tests.export.runs import make_run
from tests.export.test_export import expected
from tests.export.test_following import Growing
from tests.patience import PATIENCE_S
from tests.sites.test_inference_process import TOKEN, Process, start
from tests.sites.tiny_folder import score

pytestmark = pytest.mark.slow
PROMPT = [10, 20, 30, 40]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers' here: whoever brings a site weights by hand has it in this variable."""
    monkeypatch.setenv(SITE_TOKEN, TOKEN)


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_run(tmp_path_factory.mktemp("bucket") / "run", base, rounds=3)


@pytest.fixture
def growing(run: Store, tmp_path: Path) -> Growing:
    growing = Growing(run, "unused")
    growing.store = open_store(str(tmp_path / "growing"))
    return growing


@pytest.fixture
def served(tmp_path: Path, base: Path) -> Iterator[Process]:
    process = start(tmp_path / "served", base)
    try:
        process.wait_healthy()
        yield process
    finally:
        kill(process)


def kill(process: Process) -> None:
    if process.popen.poll() is None:
        process.popen.kill()
        process.popen.communicate()


def assert_answers_as(process: Process, run: Store, base: Path, version: int) -> None:
    """The server's log-probabilities are those of the masters of that version, rounded to bf16."""
    body = {"token_ids": PROMPT, "sampling_params": {"temperature": 1.0, "max_tokens": 8, "seed": 0, "logprobs": 1}}
    answer = httpx.post(
        f"{process.url}/inference/v1/generate", json=body, headers=headers(TOKEN), timeout=PATIENCE_S
    ).json()
    assert answer["policy_version"] == version
    policy = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    values = expected(run, version, torch.bfloat16 if version else torch.float32)
    policy.load_state_dict({name: value.float() for name, value in values.items()}, strict=False)
    (choice,) = answer["choices"]
    told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert told == pytest.approx(score(policy, PROMPT, choice["token_ids"]), abs=1e-5)


def test_answers_become_those_of_each_new_master_also_after_the_server_was_killed(growing, served, run, base, tmp_path):
    growing.show(1)
    said: list[str] = []
    told = WeightServer(served.url)
    follower = Follower(MasterReader(growing.store), base, "bfloat16", tmp_path / "followed", told, say=said.append)
    assert_answers_as(served, run, base, 0)
    assert follower.look()
    assert_answers_as(served, run, base, 1)
    growing.show(2)
    assert follower.look()
    assert_answers_as(served, run, base, 2)

    said.clear()
    kill(served)
    assert not follower.look() and not follower.look()
    assert said == [f"the server at {served.url} isn't up: waiting for it"]
    growing.show(3)
    assert not follower.look() and follower.version == 3
    again = start(tmp_path / "again", base, port=served.settings.inference_port)
    try:
        again.wait_healthy()
        assert_answers_as(again, run, base, 0)
        assert follower.look()
        assert said[-2:] == [f"the server at {served.url} is up", f"version 3: the server at {served.url} has it"]
        assert_answers_as(again, run, base, 3)
        said.clear()
        assert follower.look() and said == []
    finally:
        kill(again)
        told.close()


def test_a_restart_between_two_looks_is_noticed_by_the_version_that_the_server_names(
    growing, served, run, base, tmp_path
):
    growing.show(1)
    told = WeightServer(served.url)
    follower = Follower(
        MasterReader(growing.store), base, "bfloat16", tmp_path / "followed", told, say=lambda line: None
    )
    assert follower.look()
    body = {"weight_dir": str(base), "version": 0}
    httpx.post(f"{served.url}/update_weights", json=body, headers=headers(TOKEN)).raise_for_status()
    assert follower.look()
    assert_answers_as(served, run, base, 1)
    told.close()


def test_the_command_brings_folder_and_server_to_the_newest_version(cli, run, served, base, tmp_path):
    places = ("--server", served.url, "--model", base, "--dir", tmp_path / "followed")
    answer = cli("follow", run.uri, *places, "--once")
    assert (answer.code, answer.err) == (0, "")
    first, last = answer.out.splitlines()
    assert first.startswith("version 4: ") and last == f"version 4: the server at {served.url} has it"
    assert_answers_as(served, run, base, 4)


def test_a_healthy_server_that_keeps_failing_ends_it_and_one_that_refuses_ends_it_at_once(growing, base, tmp_path):
    growing.show(1)
    with serving_fake() as fake:
        told, said = WeightServer(fake.url), list[str]()
        follower = Follower(MasterReader(growing.store), base, "bfloat16", tmp_path / "followed", told, say=said.append)
        fake.statuses["/update_weights"] = 500
        for attempt in range(1, ATTEMPTS):
            assert not follower.look()
            assert said[-1].endswith(f"trying again ({attempt} of {ATTEMPTS})")
        with pytest.raises(SiteError, match=f"{ATTEMPTS} times in a row"):
            follower.look()
        fake.statuses["/update_weights"] = 400
        fake.paths()
        with pytest.raises(SiteError, match="refused /update_weights with 400"):
            follower.look()
        assert fake.paths().count("/update_weights") == 1
        fake.statuses.clear()
        assert follower.look()
        told.close()


def test_a_server_that_names_no_version_gets_the_weights_again_after_it_was_down(growing, base, tmp_path):
    growing.show(1)
    with serving_fake() as fake:
        told = WeightServer(fake.url)
        follower = Follower(
            MasterReader(growing.store), base, "bfloat16", tmp_path / "out", told, say=lambda line: None
        )
        assert follower.look() and follower.look()
        assert fake.paths().count("/update_weights") == 1
        fake.statuses["/health"] = 503
        assert not follower.look()
        fake.statuses.clear()
        assert follower.look()
        assert fake.paths().count("/update_weights") == 1
        told.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--server": "nowhere"}, "--server (nowhere) must be an http:// or https:// URL"),
        ({"--model": "/no/model"}, "model.name (/no/model) doesn't exist"),
    ],
)
def test_bad_input_is_one_line(cli, run, base, tmp_path, changes, said):
    options = {"--model": base, "--dir": tmp_path / "out", "--server": "http://127.0.0.1:1"} | changes
    assert_refused(cli("follow", run.uri, *(word for one in options.items() for word in one)), said)
    assert not (tmp_path / "out").exists()
