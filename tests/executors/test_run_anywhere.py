"""docs/run-anywhere.md, followed on loopback platforms: each section's commands from the token to the teardown."""

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.executors.loopback_local import LocalPlatform
from tests.executors.registry import loopback
from tests.executors.stock_image import make_stock_image
from tests.executors.walkthrough import PAGE, SKIPPED, Walkthrough, commands, section

pytestmark = [pytest.mark.slow, pytest.mark.s3]
HEADINGS = {"local": "This machine", "ssh": "ssh", "modal": "Modal", "hf-jobs": "HF Jobs", "sky": "SkyPilot"}
MOST_LINES = 25


@pytest.fixture
def walk(
    tmp_path: Path, store_uri: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Walkthrough]:
    """A reader whose home is empty, and whose bucket is SeaweedFS's. Machines of loopbacks have our programs."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    def begin(platform: Any, *, sites: tuple[str, ...] = ("r0", "r1"), **given: Any) -> Walkthrough:
        (tmp_path / "home").mkdir(exist_ok=True)
        given = {"store": store_uri("seaweed"), "environment": platform.environment(), **given}
        given["environment"] = {"HOME": str(tmp_path / "home"), **given["environment"]}
        return Walkthrough(folder=tmp_path, platform=platform, sites=sites, **given)

    return begin


def test_no_platforms_section_is_longer_than_25_lines_and_what_is_skipped_is_on_the_page() -> None:
    assert all(len(section(heading).strip().splitlines()) < MOST_LINES for heading in HEADINGS.values())
    told = [line for heading in HEADINGS.values() for line in commands(heading)]
    assert all(any(line.startswith(each) for line in told) for each in SKIPPED), PAGE


def test_the_section_on_this_machine_runs_as_written(walk: Callable[..., Walkthrough], tmp_path: Path) -> None:
    state = tmp_path / "home/.local/state/composer-prime"
    unset = {"COMPOSER_PRIME_STATE": "", "XDG_STATE_HOME": ""}
    with closing(LocalPlatform(state)) as platform:
        reader = walk(platform, store=str(tmp_path / "outputs/buckets"), environment=unset)
        reader.follow(commands("This machine"))
        assert reader.still_running() == []
    assert list((state / "jobs").iterdir()) == [] and len(reader.jobs) == 2


def test_the_section_on_ssh_runs_as_written(walk: Callable[..., Walkthrough], tmp_path: Path) -> None:
    """On two machines with Python alone, where pip finds what our wheels need installed."""
    pytest.importorskip("asyncssh")
    client = shutil.which("ssh")
    if client is None:
        pytest.skip("needs ssh")
    from tests.executors.loopback_ssh import SshPlatform

    programs = make_stock_image(tmp_path / "stock")
    (needed,) = programs.parent.glob("lib/python*/site-packages")
    with closing(SshPlatform(tmp_path / "platform", ("gpu1", "gpu2"))) as platform:
        config = f"Host *\n  HostName 127.0.0.1\n  UserKnownHostsFile {platform.ssh}/known_hosts\n"
        config += f"  IdentityFile {platform.ssh}/id_ed25519\n"
        for name, machine in platform.machines.items():
            machine.variables |= {"PIP_NO_INDEX": "1", "PYTHONPATH": str(needed)}
            config = f"Host {name}\n  Port {machine.port}\n{config}"
        (platform.ssh / "config").write_text(config)
        (platform.ssh / "id_ed25519").chmod(0o600)
        shim = tmp_path / "bin/ssh"  # ssh looks for its configuration in the user's home, whatever HOME says
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec {client} -F {platform.ssh}/config "$@"\n')
        shim.chmod(0o755)
        reader = walk(platform, sites=("a", "b"), names={"ENVIRONMENT": "reverse_letters ./envs/tiny_policy"})
        reader.follow(commands("ssh"))
        assert reader.still_running() == []
        assert not [
            machine.home for machine in platform.machines.values() if (machine.home / ".composer-prime").exists()
        ]


def test_the_section_on_modal_runs_as_written(walk: Callable[..., Walkthrough], tmp_path: Path) -> None:
    pytest.importorskip("modal")
    tables = {"launch.cpus": 1.0, "launch.memory_gib": 2.0, "launch.caches.weights": tmp_path / "cache"}
    with closing(loopback("modal", tmp_path / "platform")) as platform:
        reader = walk(platform, names={"composer-prime-cache-NAME": "composer-prime-cache-weights"}, tables=tables)
        reader.follow(commands("Modal"))
        assert reader.still_running() == []
        assert platform.servicer.left() == set() and len(reader.jobs) == 4  # type: ignore[attr-defined]


def test_the_section_on_hugging_face_jobs_runs_as_written(walk: Callable[..., Walkthrough], tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    tables = {"launch.caches.weights": tmp_path / "cache"}
    with closing(loopback("hf-jobs", tmp_path / "platform")) as platform:
        reader = walk(platform, names={"NAMESPACE": "tester"}, tables=tables)
        reader.follow(commands("HF Jobs"))
        assert reader.still_running() == []
        assert platform.buckets == set() and len(reader.jobs) == 4  # type: ignore[attr-defined]


def test_the_section_on_skypilot_runs_as_written(walk: Callable[..., Walkthrough], tmp_path: Path) -> None:
    """Its server asks for the token that the page has exported."""
    with closing(loopback("sky", tmp_path / "platform")) as platform:
        platform.token, platform.clouds = "sky_loopback", ["aws"]  # type: ignore[attr-defined]
        names = {"https://sky.example.com": platform.url, "sky_...": platform.token}  # type: ignore[attr-defined]
        reader = walk(platform, environment={}, names=names)
        reader.follow(commands("SkyPilot"))
        assert reader.still_running() == []
        smoked, *launched = platform.jobs.values()  # type: ignore[attr-defined]
        assert smoked.status == "SUCCEEDED" and {job.status for job in launched} == {"CANCELLED"}
        assert {task["resources"]["use_spot"] for task in platform.tasks} == {True}  # type: ignore[attr-defined]
    config = yaml.safe_load((tmp_path / "home/.sky/config.yaml").read_text())
    assert config["jobs"]["controller"]["consolidation_mode"] is True
