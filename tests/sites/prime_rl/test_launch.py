"""Starting PRIME-RL sites, with a stand-in for its `rl`: what it is given, what comes back, how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from composer_prime.config import PrimeRecipe, RunPaths
from composer_prime.config.prime_rl import PrimeRlConfig
from composer_prime.errors import BadInput, ConfigError, FingerprintMismatch
from composer_prime.outer.fragments import model_fingerprint
from composer_prime.sites.embedded.ports import HOST
from composer_prime.sites.prime_rl import launch
from composer_prime.sites.prime_rl.installation import find_installation
from composer_prime.sites.prime_rl.placement import Ports, place_sites
from composer_prime.sites.prime_rl.result import RunEnd
from composer_prime.store import keys, open_store
from composer_prime.sync.canonical import PROTOCOL, sha256_hex
from composer_prime.sync.founding import FoundingRecord
from composer_prime.sync.records import Manifest, ParameterShape
from composer_prime.sync.terms import terms_of
from composer_prime.waiting import WAIT_S, Waits
from tests.architecture import REPOSITORY
from tests.patience import PATIENCE_S, wait_until
from tests.sites.fake_site import is_gone
from tests.sites.prime_rl.recipes import prime_recipe

FAKE = Path(__file__).with_name("fake_rl.py")


@pytest.fixture
def rl(tmp_path: Path) -> Path:
    """An executable `rl`: the stand-in."""
    path = tmp_path / "bin" / "rl"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
    path.chmod(0o755)
    return path


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`orders(exit=3)`: what the stand-in does."""
    return lambda **orders: monkeypatch.setenv("FAKE_RL", json.dumps(orders))


def small(tmp_path: Path, rl: Path, **tables: Any) -> PrimeRecipe:
    tables = {"prime_rl": {"version": "559b447", "command": [str(rl)]}, **tables}
    return prime_recipe(tmp_path / "outputs", **tables)


def seen(recipe: PrimeRecipe, site: str = "a") -> dict[str, Any]:
    return json.loads((RunPaths.of(recipe).site(site).root / "seen.json").read_text())


def test_rl_reads_the_rendered_file_and_its_words_come_back(tmp_path: Path, rl: Path, orders) -> None:
    recipe, said = small(tmp_path, rl), []
    orders(lines=["step 1", "step 2 reward 0.5"])
    assert launch.run_local(recipe, False, say=said.append) == 0
    file = RunPaths.of(recipe).site("a").root / "rl.toml"
    assert seen(recipe)["arguments"] == ["@", str(file)]
    assert tomllib.loads(file.read_text())["trainer"]["env_vars"]["COMPOSER_PRIME_SITE"] == "a"
    assert said[1:] == ["step 1", "step 2 reward 0.5"]
    assert "step 2 reward 0.5\n" in RunPaths.of(recipe).site("a").log("rl").read_text()


def test_credentials_reach_rl_by_its_environment_and_lie_in_no_file(
    tmp_path: Path, rl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    recipe = small(tmp_path, rl)
    assert launch.run_local(recipe, False, say=lambda line: None) == 0
    assert seen(recipe)["environment"]["AWS_SECRET_ACCESS_KEY"] == "hush-hush"
    root = RunPaths.of(recipe).root
    written = [path for path in root.rglob("*") if path.is_file() and path.name != "seen.json"]
    assert len(written) > 3 and not [path for path in written if b"hush-hush" in path.read_bytes()]


@pytest.mark.parametrize(("how", "code"), [({"exit": 3}, 3), ({"signal": signal.SIGKILL}, 137), ({"signal": 15}, 143)])
def test_the_exit_code_is_rls(tmp_path: Path, rl: Path, orders, how: dict[str, int], code: int) -> None:
    said: list[str] = []
    orders(**how)
    assert launch.run_local(small(tmp_path, rl), False, say=said.append) == code
    assert said[-1].startswith("site a: rl ended with ") and said[-1].endswith("rl.log")


def test_rl_is_stopped_when_its_outer_run_has_ended_with_steps_left(tmp_path: Path, rl: Path, orders) -> None:
    recipe, said = small(tmp_path, rl), []
    orders(result={"steps_left": True}, lines=["step 7"], wait=True)
    assert launch.run_local(recipe, False, say=said.append) == 0
    assert (RunPaths.of(recipe).site("a").root / "terminated").exists()
    assert "step 7" in said and any("the outer run has ended" in line for line in said)


def test_rl_makes_its_last_step_and_ends_by_itself_when_the_outer_run_ends_with_it(
    tmp_path: Path, rl: Path, orders
) -> None:
    recipe = small(tmp_path, rl)
    site = RunPaths.of(recipe).site("a").root

    def say(line: str) -> None:
        if line == "last checkpoint":
            (site / "go").touch()

    orders(result={"steps_left": False}, lines=["last checkpoint"], wait=True, exit=3)
    assert launch.run_local(recipe, False, say=say) == 3
    assert not (site / "terminated").exists()


def test_a_trainers_long_wait_and_its_end_are_said_once_each(tmp_path: Path, rl: Path, orders) -> None:
    recipe, said, clock = small(tmp_path, rl), [], [0.0]
    site = RunPaths.of(recipe).site("a").root
    waits: list[Waits] = []

    def say(line: str) -> None:
        said.append(line)
        if line == "step 7":
            waits.append(Waits(site / "prime-rl" / "outer" / "waiting.json", lambda: clock[0], lambda: clock[0]))
            waits[0].say("batch", "a batch")
            clock[0] = WAIT_S
            waits[0].say("batch", "a batch")
        elif "waits" in line:
            waits[0].say("batch", None)
        elif "goes on" in line:
            (site / "go").touch()

    orders(lines=["step 7"], wait=True)
    assert launch.run_local(recipe, False, say=say) == 0
    of_waits = [line for line in said if "site a: waits" in line or "goes on" in line]
    assert of_waits == ["site a: waits since 1970-01-01T00:00:00Z: a batch", "site a: goes on"]


def test_what_an_earlier_trainer_left_stops_nothing(tmp_path: Path) -> None:
    result = tmp_path / "outer" / "result.json"
    result.parent.mkdir()
    end = RunEnd(tmp_path)
    assert not end.has_come()
    result.write_text('{"steps_left": true}')
    assert end.has_come() and not RunEnd(tmp_path).has_come()
    result.write_text('{"steps_left": false}')
    assert not end.has_come()


def test_a_dry_run_lets_prime_rl_check_and_leaves_the_runs_own_folder_and_bucket_alone(
    tmp_path: Path, rl: Path
) -> None:
    recipe = small(tmp_path, rl)
    assert launch.run_local(recipe, False, dry_run=True, say=lambda line: None) == 0
    root = RunPaths.of(recipe).root
    dry = root.with_name("test.dry-run") / "sites" / "a"
    assert json.loads((dry / "seen.json").read_text())["arguments"] == ["@", str(dry / "rl.toml"), "--dry-run"]
    uri = tomllib.loads((dry / "rl.toml").read_text())["trainer"]["env_vars"]["COMPOSER_PRIME_OUTER"]
    assert not root.exists() and uri == str(root / "bucket" / "test")
    assert launch.run_local(recipe, False, say=lambda line: None) == 0


def test_sites_on_one_machine_get_gpus_and_ports_of_their_own(
    tmp_path: Path, rl: Path, orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,6,7")
    recipe, said = small(tmp_path, rl, sites={"count": 2}, deployment={"num_train_gpus": 2}), []
    orders(lines=["hello"])
    assert launch.run_local(recipe, False, say=said.append) == 0
    assert [seen(recipe, site)["environment"]["CUDA_VISIBLE_DEVICES"] for site in "ab"] == ["0,1,2", "3,6,7"]
    files = [tomllib.loads((RunPaths.of(recipe).site(site).root / "rl.toml").read_text()) for site in "ab"]
    assert [file["inference"]["server"]["port"] for file in files] == [12000, 12200]
    assert len({file["trainer"]["env_vars"]["COMPOSER_PRIME_OUTER"] for file in files}) == 1
    assert {"[a] hello", "[b] hello"} <= set(said)


def test_ports_of_twenty_six_sites_never_meet() -> None:
    ports = [Ports.starting_at(12000 + 200 * index) for index in range(26)]
    listened = [port for each in ports for port in (*each.all(), *range(each.env_servers, each.env_servers + 60))]
    beside = [each.server + 21000 for each in ports]
    assert len(set(listened)) == len(listened) - 26  # env_servers itself is in both
    assert max(listened + beside) < 65536 and not set(listened) & set(beside)


def test_a_site_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, rl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    program = (
        "import pathlib, sys; sys.exit(4 if '/a/' in sys.argv[2] else (pathlib.Path(sys.argv[2] + '.done').touch()))"
    )
    rl.write_text(f"#!{sys.executable}\n{program}")
    recipe, said = small(tmp_path, rl, sites={"count": 2}), []
    assert launch.run_local(recipe, False, say=said.append) == 4
    assert (RunPaths.of(recipe).site("b").root / "rl.toml.done").exists()
    assert [line for line in said if "rl ended" in line] == [
        f"site a: rl ended with exit code 4; its log is {RunPaths.of(recipe).site('a').log('rl')}"
    ]


@pytest.mark.parametrize(
    ("version", "orchestrators", "key"),
    [("559b447", "checkpoints", "resume.step"), ("0.8.0", "run_default/checkpoints", "ckpt.resume_step")],
)
@pytest.mark.parametrize(
    ("lacks", "start"),
    [
        ((), "from step 4"),
        (("step_4/trainer/.metadata",), "from step 2"),
        (("step_4/trainer/data",), "from step 2"),
        (("outer/step_4.pt",), "from step 2"),
        (("step_4/orchestrator/progress.pt",), "from step 2"),
        (("step_2/trainer/.metadata", "step_4/trainer/.metadata"), "from the start: no checkpoint in "),
    ],
    ids=str,
)
def test_resume_takes_the_newest_step_of_which_all_is_there(
    tmp_path: Path, rl: Path, version: str, orchestrators: str, key: str, lacks: tuple[str, ...], start: str
) -> None:
    recipe, said = small(tmp_path, rl, prime_rl={"version": version, "command": [str(rl)]}), []
    assert launch.run_local(recipe, False, say=lambda line: None) == 0
    site = RunPaths.of(recipe).site("a").root
    for step in (2, 4):
        for file in ("step_{}/trainer/data", "step_{}/trainer/.metadata", "outer/step_{}.pt"):
            lay(site / "prime-rl" / "checkpoints" / file.format(step), lacks)
        lay(site / "prime-rl" / orchestrators / f"step_{step}" / "orchestrator" / "progress.pt", lacks)
        outer = site / "prime-rl" / "checkpoints" / "outer"
        (outer / f"step_{step}.files").write_text(".metadata\ndata")
        (outer / f"step_{step}.sha256").write_text(f"{sha256_hex(b'')}  step_{step}.pt\n")
    (site / "prime-rl" / orchestrators / "step_6" / "orchestrator").mkdir(parents=True)
    assert launch.run_local(recipe, True, say=said.append) == 0
    table, last = key.split(".")
    resumed = tomllib.loads((site / "rl.toml").read_text()).get(table, {}).get(last)
    assert f", {start}" in said[0] and resumed == (int(start[-1]) if start.startswith("from step") else None)


def test_resume_deletes_no_checkpoint_of_the_trainer(tmp_path: Path, rl: Path) -> None:
    recipe = small(tmp_path, rl)
    assert launch.run_local(recipe, False, say=lambda line: None) == 0
    lay(kept := RunPaths.of(recipe).site("a").root / "prime-rl/checkpoints/step_4/trainer/.metadata", ())
    with pytest.raises(ConfigError, match="put back what is missing, or start over "):
        launch.run_local(recipe, True, say=lambda line: None)
    assert kept.exists()


def lay(file: Path, lacks: tuple[str, ...]) -> None:
    if not any(str(file).endswith(f"checkpoints/{name}") for name in lacks):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def test_resume_cleans_what_never_had_a_checkpoint(tmp_path: Path, rl: Path) -> None:
    recipe, said = small(tmp_path, rl), []
    for resume in (False, True):
        launch.run_local(recipe, resume, say=said.append)
        data = tomllib.loads((RunPaths.of(recipe).site("a").root / "rl.toml").read_text())
        assert ("clean" in data, "resume" in data) == (resume, False)
    assert all(line.endswith("rl.toml") for line in said)


def test_what_an_earlier_start_printed_is_not_said_again(tmp_path: Path, rl: Path, orders) -> None:
    recipe, said = small(tmp_path, rl), []
    orders(lines=["first"])
    launch.run_local(recipe, False, say=lambda line: None)
    orders(lines=["second"])
    launch.run_local(recipe, True, say=said.append)
    assert said[1:] == ["second"]
    assert RunPaths.of(recipe).site("a").log("rl").read_text() == "first\nsecond\n"


def test_one_site_of_a_bigger_run_leaves_ports_and_gpus_to_the_recipe(tmp_path: Path, rl: Path) -> None:
    recipe = small(tmp_path, rl, sites={"count": 2})
    assert launch.run_site(recipe, "b", False, say=lambda line: None) == 0
    data = tomllib.loads((RunPaths.of(recipe).site("b").root / "rl.toml").read_text())
    assert "port" not in data["inference"].get("server", {})
    assert data["trainer"]["env_vars"]["COMPOSER_PRIME_SITE"] == "b"


def test_the_run_is_announced_in_its_bucket_before_its_first_site_starts(tmp_path: Path, rl: Path) -> None:
    outer = {"inner_steps": 10, "fragments": 2, "store": str(tmp_path / "bucket"), "codec": "int4"}
    recipe = small(tmp_path, rl, outer=outer)
    launch.run_site(recipe, "a", False, say=lambda line: None)
    launch.run_site(recipe, "b", False, say=lambda line: None)
    store = open_store(str(tmp_path / "bucket" / "test"))
    record = FoundingRecord.model_validate_json(store.get(keys.founding()))
    assert (record.run, record.terms.inner_steps, record.terms.codec, record.terms.rounds) == ("test", 10, "int4", 2)


def test_a_run_that_create_made_is_joined_and_written_at_once_only_where_names_are_the_models(
    tmp_path: Path, rl: Path
) -> None:
    from composer_prime.sites.prime_rl.create import create

    recipe = small(tmp_path, rl, outer={"inner_steps": 10, "fragments": 2, "store": str(tmp_path / "bucket")})
    assert create(recipe).startswith("announced run test in ")
    assert launch.run_site(recipe, "a", False, say=lambda line: None) == 0
    Qwen3Config(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4,
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    trainer = {"model": {"impl": "hf"}}
    other = small(tmp_path, rl, trainer=trainer, model={"name": str(tmp_path / "model")}, run={"name": "other"})
    refused(BadInput, lambda: create(other))  # the folder has no weights: it would have been written at once


# --- what is refused, before anything starts -------------------------------------------------------------------------


def refused(kind: type[BadInput], start: Callable[[], object]) -> str:
    with pytest.raises(kind) as raised:
        start()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_machine_without_prime_rl_is_told_which_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    recipe = prime_recipe(tmp_path / "outputs")
    message = refused(ConfigError, lambda: launch.run_local(recipe, False))
    assert message.startswith("prime_rl.command (rl) isn't on the PATH: install PRIME-RL (v0.8.0 and ")
    assert not (tmp_path / "outputs").exists()


def test_another_h_or_p_is_refused_on_resume(tmp_path: Path, rl: Path) -> None:
    recipe = small(tmp_path, rl)
    launch.run_local(recipe, False, say=lambda line: None)
    for change, shown in (
        ({"inner_steps": 20}, "outer.inner_steps (20, there: 10)"),
        ({"fragments": 1}, "(1, there: 2)"),
    ):
        other = small(tmp_path, rl, outer={"inner_steps": 10, "fragments": 2, **change})
        (RunPaths.of(recipe).site("a").root / "seen.json").unlink(missing_ok=True)
        assert shown in refused(ConfigError, lambda other=other: launch.run_local(other, True))
        assert not (RunPaths.of(recipe).site("a").root / "seen.json").exists()


def test_another_h_or_p_than_the_buckets_is_refused_on_another_machine(tmp_path: Path, rl: Path) -> None:
    def at(place: str, **change: int) -> PrimeRecipe:
        outer = {"inner_steps": 10, "fragments": 2, "store": str(tmp_path / "bucket"), **change}
        return prime_recipe(tmp_path / place, outer=outer, prime_rl={"version": "559b447", "command": [str(rl)]})

    launch.run_site(at("one"), "a", False, say=lambda line: None)
    message = refused(BadInput, lambda: launch.run_site(at("two", inner_steps=20), "b", False))
    assert "outer.inner_steps: run 10, recipe 20" in message
    assert not list((tmp_path / "two").rglob("seen.json"))


def test_a_run_that_has_begun_with_other_terms_is_refused(tmp_path: Path, rl: Path) -> None:
    outer = {"inner_steps": 10, "fragments": 1, "store": str(tmp_path / "bucket")}
    recipe = small(tmp_path, rl, outer=outer)
    manifest = Manifest(
        protocol=PROTOCOL,
        run="test",
        fingerprint=model_fingerprint([("w", (8,))]),
        parameters=(ParameterShape(name="w", shape=(8,)),),
        masters=("0" * 64,),
        terms=terms_of(recipe),
        test_vector="",
        created_by="a",
        nonce="0" * 32,
    )
    open_store(str(tmp_path / "bucket" / "test")).create(keys.manifest(), manifest.to_bytes())
    assert launch.run_site(recipe, "a", False, say=lambda line: None) == 0
    other = small(tmp_path, rl, outer={**outer, "codec": "topk"}, output_dir=str(tmp_path / "elsewhere"))
    message = refused(FingerprintMismatch, lambda: launch.run_site(other, "b", False))
    assert "outer.codec: run 'int8', recipe 'topk'" in message
    assert not list((tmp_path / "elsewhere").rglob("seen.json"))


def test_too_few_gpus_are_counted_out(tmp_path: Path) -> None:
    recipe = prime_recipe(tmp_path, sites={"count": 2}, deployment={"num_train_gpus": 2})
    message = refused(ConfigError, lambda: place_sites(recipe, ["0", "1", "2"]))
    assert message.startswith("sites.count (2) at 3 GPUs a site needs 6, and this machine shows 3: ")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen(1)
        port = other.getsockname()[1]
        recipe = prime_recipe(tmp_path, sites={"count": 2}, prime_rl={"first_port": min(port, 40000)})
        if port <= 40000:
            message = refused(BadInput, lambda: place_sites(recipe, list("0123")))
            assert message.startswith(f"port {port} of site a is in use on this machine: ")


def test_slurm_places_sites_by_itself(tmp_path: Path) -> None:
    recipe = prime_recipe(tmp_path, sites={"count": 2}, slurm={"partition": "gpu"})
    assert [placement.ports for placement in place_sites(recipe).values()] == [None, None]


# --- which PRIME-RL it is --------------------------------------------------------------------------------------------


def layout(tmp_path: Path, *files: str) -> Path:
    """A package that has the files by which a version is told."""
    for file in ("__init__.py", *files):
        (tmp_path / "src" / "prime_rl" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / "prime_rl" / file).touch()
    return tmp_path / "src"


@pytest.mark.parametrize(
    ("files", "version"),
    [
        (("utils/monitor/__init__.py",), "0.8.0"),
        (("monitors/__init__.py",), "559b447"),
        (("monitors/__init__.py", "trainer/runs.py"), "559b447"),
    ],
)
def test_the_version_is_asked_of_the_python_beside_rl(
    tmp_path: Path, rl: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], version: str
) -> None:
    (rl.parent / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (rl.parent / "python").chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", f"{layout(tmp_path, *files)}{os.pathsep}{REPOSITORY}")
    found = find_installation(PrimeRlConfig(command=(str(rl),)))
    assert (found.version, found.command) == (version, (str(rl),))


def test_a_release_we_dont_know_is_written_for_in_the_newest_keys(rl: Path) -> None:
    (rl.parent / "python").write_text("#!/bin/sh\necho v2.0.0\n")  # a composer-prime newer than ours
    (rl.parent / "python").chmod(0o755)
    assert find_installation(PrimeRlConfig(command=(str(rl),))).version == "559b447"


def test_an_unknown_prime_rl_or_one_without_our_package_is_refused(
    tmp_path: Path, rl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PrimeRlConfig(command=(str(rl),))
    assert "isn't at" in refused(ConfigError, lambda: find_installation(settings))
    python = rl.parent / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", f"{layout(tmp_path, 'trainer/new.py')}{os.pathsep}{REPOSITORY}")
    assert "lacks metric monitors" in refused(ConfigError, lambda: find_installation(settings))
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    assert "install it there too" in refused(ConfigError, lambda: find_installation(settings))


# --- signals ---------------------------------------------------------------------------------------------------------


def launched(tmp_path: Path, rl: Path) -> tuple[subprocess.Popen, Path]:
    """A launcher in a process of its own, whose `rl` has started and waits; and its site's folder."""
    recipe = small(tmp_path, rl)
    program = (
        "import json, sys\n"
        "from composer_prime.config import any_from_data\n"
        "from composer_prime.sites.prime_rl.launch import run_local\n"
        "sys.exit(run_local(any_from_data(json.loads(sys.argv[1])), False))\n"
    )
    env = {**os.environ, "FAKE_RL": json.dumps({"wait": True}), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", program, json.dumps(recipe.to_data())]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    site = RunPaths.of(recipe).site("a").root
    wait_until((site / "seen.json").exists, "rl is up")
    return process, site


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_rl_in_its_own_way(tmp_path: Path, rl: Path, number: signal.Signals) -> None:
    process, site = launched(tmp_path, rl)
    process.send_signal(number)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and "--resume" in out
    assert (site / "terminated").exists()


def test_a_launcher_that_is_killed_leaves_no_rl_behind(tmp_path: Path, rl: Path) -> None:
    process, site = launched(tmp_path, rl)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    wait_until((site / "terminated").exists, "rl was asked to end")
    pid = json.loads((site / "seen.json").read_text())["pid"]
    wait_until(lambda: is_gone(pid), "rl is gone")
