"""From a bare laptop: our wheel with a platform's extra, a token, a bucket, and one command that names no image."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config import load_recipe
from composer_prime.config.toml import to_toml
from composer_prime.errors import ComposerPrimeError
from composer_prime.executors.base import Executor
from composer_prime.executors.packages import LINK_VARIABLE
from composer_prime.launch.records import LaunchBook, by_site, open_launch
from composer_prime.launch.supervisor_job import SITE
from composer_prime.store import Store, keys, open_store
from composer_prime.sync.records import Manifest
from tests.executors.jobs import wait_until
from tests.executors.registry import loopback
from tests.integration.laptop import Laptop, build_wheels, install_wheels
from tests.integration.local_runs import QUICK, REPEATABLE, REPOSITORY, run_paths
from tests.patience import PATIENCE_S

EXTRAS = {"local": "", "ssh": "ssh", "modal": "modal", "hf-jobs": "hf", "sky": ""}
AFTER = {"r0": ["preempted", "succeeded"], "r1": ["succeeded"], SITE: []}

pytestmark = [pytest.mark.slow, pytest.mark.s3]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(autouse=True)
def our_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the path of a loopback whose machines are as this environment."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def write_recipe(folder: Path, name: str, **changes: object) -> str:
    """The demo's recipe as a file, by which r0 and r1 do what a and b do; its path."""
    values = {**QUICK, "outer.quorum": 2, "output_dir": folder / name, **changes}
    overrides = [part for key, value in values.items() for part in (f"--{key}", str(value))]
    data = load_recipe(REPOSITORY / "recipes/local/two_sites.toml", overrides).to_data()
    twins = (("a", "r0"), ("b", "r1"))
    seeds = {site: {"sampling_seed": number} for number, pair in enumerate(twins) for site in pair}
    data["sites"] = {"count": 2, "overrides": seeds}
    (folder / f"{name}.toml").write_text(to_toml(data))
    return str(folder / f"{name}.toml")


def masters(output_dir: Path, sites: tuple[str, str] = ("r0", "r1")) -> list[dict[str, Any]]:
    """The hashes that the sites ended with."""
    results = [run_paths(output_dir).site(site).result for site in sites]
    return [json.loads(result.read_text())["master_sha256"] for result in results]


@pytest.fixture(scope="module")
def local_masters(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> dict[str, Any]:
    """What `composer-prime run` ends with, from the wheel too."""
    folder = tmp_path_factory.mktemp("local-run")
    laptop = Laptop(folder, wheels, "", {})
    with laptop.running(f"composer-prime run {write_recipe(folder, 'run', **REPEATABLE)}") as process:
        assert process.wait(PATIENCE_S) == 0, laptop.said
    first, second = masters(folder / "run", ("a", "b"))
    assert first == second
    return first


@contextmanager
def platform_of(name: str, folder: Path, wheels: Path) -> Iterator[tuple[Any, str, dict[str, str]]]:
    """A loopback, what stands behind `--on` for two sites, and what the laptop has in its environment."""
    if name == "ssh":  # hosts that docs/run-anywhere.md's command has prepared
        from tests.executors.loopback_ssh import SshPlatform

        platform = SshPlatform(folder, ("left", "right"))
        for each in platform.machines.values():
            install_wheels(each.home / ".composer-prime" / "venv", wheels)
            each.variables["PYTHONPATH"] = ""
        on = ",".join(f"ssh:{platform.host(each)}" for each in platform.machines)
    else:
        platform = loopback(name, folder)
        on = platform.launch_option()
    with closing(platform):
        yield platform, on, platform.environment()


@pytest.mark.parametrize("name", EXTRAS)
def test_two_replicas_from_our_wheel_end_with_the_masters_of_a_local_run(
    name: str, tmp_path: Path, wheels: Path, local_masters: dict[str, Any], store_uri: Callable[[str], str]
) -> None:
    uri = store_uri("seaweed")
    recipe = write_recipe(tmp_path, "launched", **REPEATABLE, **{"outer.store": uri})
    with platform_of(name, tmp_path / "platform", wheels) as (_, on, environment):
        laptop = Laptop(tmp_path / "laptop", wheels, EXTRAS[name], environment)
        with laptop.running(f"composer-prime launch {recipe} --on {on} --replicas 2 --yes --no-limit") as launcher:
            assert launcher.wait(PATIENCE_S) == 0, laptop.said
    assert masters(tmp_path / "launched") == [local_masters, local_masters]
    assert LINK_VARIABLE not in laptop.said and "X-Amz" not in laptop.said
    with closing(open_store(f"{uri}/two-sites")) as store:
        first = Manifest.from_bytes(store.get(keys.manifest()), keys.manifest()).masters
    assert [each["sha256"] for each in local_masters.values()] != list(first), "something was learned"


def ends(book: LaunchBook) -> dict[str, list[str]]:
    """How each site's attempts ended, of those that have."""
    found = by_site(book.attempts())
    return {site: [each.ended.state for each in attempts if each.ended] for site, attempts in found.items()}


@pytest.mark.parametrize("name", ["hf-jobs", "modal"])
def test_a_launch_goes_on_when_the_laptop_that_began_it_is_switched_off(
    name: str, tmp_path: Path, wheels: Path, store_uri: Callable[[str], str]
) -> None:
    """The launcher is killed as soon as the supervisor's job is there. The same command finds that one, and a
    replica whose machine is taken then is started again."""
    uri = store_uri("seaweed")
    recipe = write_recipe(tmp_path, "launched", **{"outer.store": uri, "max_steps": 64})
    with platform_of(name, tmp_path / "platform", wheels) as (platform, on, environment):
        laptop = Laptop(tmp_path / "laptop", wheels, EXTRAS[name], environment)
        line = (
            f"composer-prime launch {recipe} --on {on} --replicas 2 --supervise-on {on} --poll-s 0.5 --yes --no-limit"
        )
        with closing(open_store(f"{uri}/two-sites")) as store, closing(platform.executor()) as executor:
            with platform.hold_pending():  # the run can't be over before the second launch
                with laptop.running(line) as launcher:
                    wait_until(lambda: launcher.poll() is not None or supervised(store, executor), "its supervisor")
                    launcher.kill()
                assert supervised(store, executor), laptop.said
                book = open_launch(store)
                with laptop.running(line) as again:
                    assert again.wait(PATIENCE_S) == 0 and "The launch is watched " in laptop.said, laptop.said
                    assert len(book.attempts(SITE)) == 1  # the same job, whether the first launcher noted it or not
            wait_until(lambda: bool(store.list("rounds/")), "a round")
            job = book.attempts("r0")[0].job
            assert job is not None
            platform.preempt(job)
            wait_until(lambda: {**ends(book), SITE: []} == AFTER, "both sites' ends")
    first, second = masters(tmp_path / "launched")
    assert first == second


def supervised(store: Store, executor: Executor) -> bool:
    """Whether the run's launch has a supervisor's job on the platform."""
    with suppress(ComposerPrimeError):  # there is no launch yet
        return any(job.site == SITE for job in executor.find(open_launch(store).name))
    return False
