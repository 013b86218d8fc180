"""A full disk, a limit, a folder that isn't one: every process ends with a line of value and remedy."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from composer_prime.config import SiteSettings
from composer_prime.sites.embedded.batches import write_batch
from composer_prime.sites.embedded.local_run import run_local
from composer_prime.sites.embedded.ports import claim_port
from composer_prime.sites.embedded.supervisor import SiteState, SiteSupervisor
from tests.integration.local_runs import command
from tests.patience import PATIENCE_S, wait_until
from tests.servers.fake_inference import FakePolicy, serving
from tests.sites.fake_site import fake_roles, settle, small_recipe
from tests.sites.letters_site import letters_site
from tests.sites.test_local_run import DONE, surroundings
from tests.sites.tiny_folder import save_random_tiny
from tests.sites.tiny_policy import random_samples

REFUSED = 74
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full, a file on a full disk")
LIMITED = """
import importlib, resource, sys
from pathlib import Path
name, value, module, *sys.argv[1:] = sys.argv[1:]
main = importlib.import_module(module).main
number = getattr(resource, name)
resource.setrlimit(number, (int(value), resource.getrlimit(number)[1]))
takes = {"main": (), "trainer": (Path(sys.argv[1]),), "orchestrator": (), "__main__": (sys.argv[1:],)}
sys.exit(main(*takes[module.rpartition(".")[2]]))
"""
"""Runs a module, once it is imported, under a limit of the system."""


def ended(arguments: list[str]) -> tuple[int, str]:
    """Run a command; its exit code and its stderr."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    return done.returncode, done.stderr.strip()


def role(name: str, settings: SiteSettings, limit: tuple[str, int] | None = None) -> list[str]:
    module = f"composer_prime.sites.embedded.{name}"
    if name == "inference":
        module += ".__main__"
    started = ["-m", module] if limit is None else ["-c", LIMITED, limit[0], str(limit[1]), module]
    return [sys.executable, *started, str(settings.save())]


def assert_one_line(answer: tuple[int, str], *words: str) -> None:
    code, printed = answer
    assert "Traceback" not in printed and code == REFUSED, (code, printed[-3000:])
    assert all(word in printed.splitlines()[-1] for word in words), printed.splitlines()[-1]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SiteSettings]:
    """A site that has a model, a batch to train on, and an inference server."""
    save_random_tiny(tmp_path / "model")
    with serving(FakePolicy()) as port:
        settings = letters_site(tmp_path, port=port, model_dir=tmp_path / "model", max_steps=2)
        write_batch(settings.paths.rollouts, 0, random_samples(100, 6))
        yield settings


@needs_full
@pytest.mark.slow
@pytest.mark.parametrize("name", ["orchestrator", "trainer"])
def test_a_role_whose_disk_is_full_ends_with_one_line(site: SiteSettings, name: str) -> None:
    tape = site.paths.tape(name)
    tape.parent.mkdir(parents=True, exist_ok=True)
    tape.symlink_to(FULL)
    assert_one_line(ended(role(name, site)), "error: ", "No space left on device", "MB free", "free some space")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["orchestrator", "trainer"])
def test_a_role_that_reaches_the_limit_on_file_sizes_ends_with_one_line(site: SiteSettings, name: str) -> None:
    answer = ended(role(name, site, ("RLIMIT_FSIZE", 100)))
    assert_one_line(answer, "error: ", "step_", "MB free", "--resume")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inference", "orchestrator", "trainer"])
def test_a_role_with_too_few_descriptors_ends_with_one_line(site: SiteSettings, name: str) -> None:
    if name == "inference":
        site = site.model_copy(update={"inference_port": claim_port(None, set())})
    answer = ended(role(name, site, ("RLIMIT_NOFILE", 3)))
    assert_one_line(answer, "error: ", "Too many open files", "limit 3", "ulimit -n")


@needs_full
@pytest.mark.parametrize(("trainer", "says"), [(DONE, "No space left on device"), ("ending=exit:1", "exit code 1")])
def test_a_supervisor_whose_disk_is_full_says_so_and_hides_no_other_end(
    tmp_path: Path, trainer: str, says: str
) -> None:
    supervisor = SiteSupervisor(settle(tmp_path), command=fake_roles(trainer=trainer))
    tape = supervisor.paths.tape("supervisor")
    tape.parent.mkdir(parents=True)
    tape.symlink_to(FULL)
    supervisor.start()
    wait_until(lambda: supervisor.poll() or supervisor.state is not SiteState.RUNNING, "the site ends")
    assert supervisor.error is not None and says in str(supervisor.error)


FILL = """
import os, sys, time
from pathlib import Path
while len([*Path(sys.argv[1]).parent.glob("*/logs/[io]*.log")]) < 4:
    time.sleep(0.01)
with open(os.path.join(sys.argv[1], "filler"), "wb", buffering=0) as file:
    while True:
        file.write(bytes(4096))
"""
"""Fills the disk once all processes of both sites have begun. Its traceback then has no place in its log."""


def test_of_a_process_that_had_no_place_for_its_last_words_the_supervisor_says_why(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk here")
    try:
        recipe, shown = small_recipe(disk), io.StringIO()
        around = surroundings(tmp_path, Console(file=shown, width=300))
        roles = around.role_command

        def commands(name: str, site_dir: Path) -> Sequence[str]:
            return [sys.executable, "-c", FILL, str(site_dir)] if name == "trainer" else roles(name, site_dir)

        with pytest.raises(OSError, match="No space left"):  # the summary has no place either; the command says so
            run_local(recipe, False, replace(around, role_command=commands))
        said = [line for line in shown.getvalue().splitlines() if "site a failed: " in line]
        assert len(said) == 1 and "No space left on device (0.0 MB free): free some space" in said[0], shown.getvalue()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


@pytest.mark.parametrize("verb", ["run", "site"])
def test_a_command_whose_folder_cannot_be_made_ends_with_one_line(tmp_path: Path, verb: str) -> None:
    (tmp_path / "file").write_text("")
    code, printed = ended(command(verb, tmp_path / "file"))
    assert code and "Traceback" not in printed and len(printed.splitlines()) == 1, printed
    assert "Not a directory" in printed and str(tmp_path / "file") in printed


def test_a_command_with_too_few_descriptors_ends_with_one_line(tmp_path: Path) -> None:
    arguments = command("run", tmp_path)[1:]
    answer = ended([sys.executable, "-c", LIMITED, "RLIMIT_NOFILE", "3", "composer_prime.cli.main", *arguments])
    assert_one_line(answer, "composer-prime: ", "Too many open files", "ulimit -n")
