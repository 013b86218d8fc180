"""A dry run is true: its platform is given what it shows of a GPU recipe's job, and a replica runs every step of that.

    python -m pytest tests/executors/test_dry_run_replica.py -s

prints by platform the steps that ran, and what stood in for the platform, the image, GitHub and the GPU.
"""

import json
import os
import pickle
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from composer_prime.config import load_any
from composer_prime.errors import ModelError, Problems
from composer_prime.executors.packages import CUDA_IMAGE, CUDA_VARIABLES, LINK_VARIABLE, PRIME_RL_IMAGES, packages_of
from composer_prime.launch.budget import Limits
from composer_prime.launch.plan import plan_launch
from composer_prime.launch.preflight import described
from composer_prime.plan.prices import shipped
from tests.architecture import REPOSITORY
from tests.cli.command_line import call
from tests.executors.registry import loopback
from tests.executors.replica import COMMIT, STAND_INS, Replica
from tests.executors.test_model_access import serving_hub
from tests.servers import S3Server
from tests.servers.moto_server import BUCKET

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells whose child rl is")

RECIPE = REPOSITORY / "recipes/multi_site/reverse_text_2.toml"
KEYS = {"AWS_ACCESS_KEY_ID": "an-id-of-tests", "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests"}
GPUS = {"hf-jobs": "a10g-largex2", "sky": "B200"}
PLATFORMS = {
    "modal": "its client and a loopback server",
    "hf-jobs": "its client and a loopback server",
    "sky": "a loopback server",
    "ssh": "asyncssh's server on this machine, where ~/.composer-prime/venv has a tiny PRIME-RL and composer-prime",
    "local": "this machine, where the PATH has a tiny PRIME-RL's rl",
}
"""What stands in for each."""
ELSEWHERE = {"the bucket": "moto's S3 server", "huggingface.co": "a server that answers 503"}
IN_SCRIPTS = ("apt-get", "github.com")
"""Of STAND_INS, those that only some scripts meet."""
OR_END = " || exit 1\n"


@dataclass(frozen=True)
class Job:
    """A job as a dry run shows it, or as its platform is given it: then with more, which isn't compared.

    script   what comes before its command: a shell's, or a Dockerfile
    whole    the shell's words that hold script and command
    files    that a Dockerfile copies, by their place
    values   of the secrets, by their names
    """

    machine: str
    image: str
    script: str
    command: list[str]
    env: Mapping[str, str]
    secrets: frozenset[str]
    timeout_s: int
    whole: str = field(default="", compare=False)
    files: Mapping[str, bytes] = field(default_factory=dict, compare=False)
    values: Mapping[str, str] = field(default_factory=dict, compare=False)


def shown_in(printed: str) -> Job:
    """What a dry run of one site shows."""
    about, _, rest = printed.partition("before the command of a\n")
    rows = dict(re.findall(r"^    (\S+) +(.*)$", about, re.MULTILINE))
    lines = re.match(r"(  .*\n)*", rest)
    return Job(
        machine=rows["machine"],
        image=rows.get("image", ""),
        script="\n".join(line.removeprefix("  ") for line in lines[0].splitlines()) if lines else "",
        command=shlex.split(rows["command"]),
        env=dict(each.split("=", 1) for each in shlex.split(rows["env"])),
        secrets=frozenset(rows["secrets"].split(", ")),
        timeout_s=int(rows["time-out"].removesuffix(" s")),
    )


def given_to_modal(platform: Any) -> Job:
    servicer, (call,) = platform.servicer, platform.servicer.calls.by_id.values()
    (job,), _ = pickle.loads(call.input.args)
    function = servicer.functions[call.function_id]
    has, gpu = function.definition.resources, function.definition.resources.gpu_config
    cpus, mib = (has.milli_cpu / 1000, has.milli_cpu_max / 1000), (has.memory_mb, has.memory_mb_max)
    base, *lines = (line for line in servicer.built if line.strip() and line != "FROM base")
    (wheel,) = (each for each in servicer.mounted if each.startswith("/opt/"))
    (data,) = (data for sha256, data in servicer._files.items() if sha256.startswith(wheel.split("/")[2]))
    script = [f"COPY {Path(wheel).name} {wheel}" if line.startswith("COPY ") else line for line in lines]
    return Job(
        machine=f"a container of Modal's: gpu {gpu.gpu_type}:{gpu.count}, cpu {cpus}, memory {mib}",
        image=base.removeprefix("FROM "),
        script="\n".join(script),
        command=job["command"],
        env=job["env"],
        secrets=frozenset(function.secrets),
        timeout_s=job["timeout_s"],
        files={wheel: data},
        values=function.secrets,
    )


def given_to_hf_jobs(platform: Any) -> Job:
    (hosted,) = platform.hosted.values()
    asked = hosted.request
    words = [*asked["command"], *asked["arguments"]]
    (flavor,) = (each for each in shipped("hf-jobs") if each.name == asked["flavor"])
    return Job(
        machine=f"flavor {flavor}",
        image=asked["dockerImage"],
        env=asked["environment"],
        timeout_s=asked["timeoutSeconds"],
        whole=shlex.join(words),
        values=asked["secrets"],
        **installing(words, asked["secrets"]),
    )


def given_to_sky(platform: Any) -> Job:
    (task,) = platform.tasks
    run, resources = task["run"], task["resources"]
    command = re.search(r'timeout --kill-after=\d+ "\$left" (.*) 2>&1$', run, re.MULTILINE | re.DOTALL)
    timeout = re.search(r"left=(\d+)$", run, re.MULTILINE)
    assert command and timeout
    return Job(
        machine=f"SkyPilot's ({platform.url}) by resources {json.dumps(resources)}",
        image=resources["image_id"].removeprefix("docker:"),
        env=task["envs"],
        timeout_s=int(timeout[1]),
        whole=run,
        values=task["secrets"],
        **installing(shlex.split(command[1]), task["secrets"]),
    )


def installing(words: Sequence[str], secrets: Mapping[str, str]) -> dict[str, Any]:
    """Of a job that installs its packages itself: by links, which its script names."""
    program, option, script, name, *command = words
    assert (program, option, name) == ("sh", "-c", "sh")
    links = {each for each in secrets if each.startswith(LINK_VARIABLE)}
    assert links and f"unset {' '.join(sorted(links))}{OR_END}" in script
    return {"script": script, "command": command, "secrets": frozenset(secrets) - links}


def run_image(replica: Replica, shown: Job, given: Job) -> tuple[list[str], CompletedProcess[str]]:
    """Build a Dockerfile, and run the job in the image."""
    variables: dict[str, str] = dict(path_of(replica, shown))
    for line in shown.script.splitlines():
        word, _, rest = line.partition(" ")
        if word == "ENV":
            name, _, value = rest.partition("=")
            variables[name] = replica.there(value)
        elif word == "COPY":
            path = rest.split()[1]
            place = Path(replica.there(path))
            place.parent.mkdir(parents=True)
            place.write_bytes(given.files[path])
        else:
            assert word == "RUN"
            done = replica.run(rest, **variables)
            assert done.returncode == 0, f"{rest}: {done.stderr}"
    env = {**variables, **shown.env, **given.values}
    return shown.script.splitlines(), replica.run('exec "$@"', "sh", *shown.command, **env)


def run_script(replica: Replica, shown: Job, given: Job) -> tuple[list[str], CompletedProcess[str]]:
    """Run the job as it is given, its script noting each step that has ended with 0."""
    *steps, last = shown.script.split(OR_END)
    note = f"echo >> {replica.folder}/ran"
    noting = OR_END.join([*(f"{step}{OR_END}{note}" for step in steps), last])
    whole = given.whole.replace(shlex.quote(shown.script), shlex.quote(noting))
    assert whole != given.whole
    env = {**path_of(replica, shown), **shown.env, **given.values}
    done = replica.run(f"exec bash -c {shlex.quote(whole)}", **env)
    assert len((replica.folder / "ran").read_text()) == len(steps), done.stdout + done.stderr
    return steps, done


def path_of(replica: Replica, job: Job) -> dict[str, str]:
    """What PRIME-RL's own image sets."""
    return {} if job.image == CUDA_IMAGE else {"PATH": replica.there(CUDA_VARIABLES["PATH"])}


INSTALLING = {
    "modal": (given_to_modal, run_image),
    "hf-jobs": (given_to_hf_jobs, run_script),
    "sky": (given_to_sky, run_script),
}
"""How a platform's loopback tells what it was given, and how a replica runs that."""


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Replica:
    machine = Replica(tmp_path_factory.mktemp("machine"))
    machine.prepare()
    machine.keep_image()
    return machine


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command that succeeds; what it printed."""

    def run(*words: str) -> str:
        answer = call(capsys, monkeypatch, *words)
        assert answer.code == 0, answer
        return answer.out

    return run


@pytest.fixture
def platform(on: str, moto: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The platform's loopback, and a bucket; the hub is down."""

    def unknown(model: str) -> Any:
        raise ModelError("the hub doesn't answer")

    monkeypatch.setattr("composer_prime.launch.preflight.named_shapes", unknown)
    monkeypatch.chdir(tmp_path)
    with serving_hub() as hub, closing(loopback(on, tmp_path / "platform")) as opened:
        hub.broken = True
        service = opened.environment().get("HF_ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", service)
        for name, value in {**moto.environment(), **opened.environment(), **KEYS, "HF_ENDPOINT": hub.url}.items():
            monkeypatch.setenv(name, value)
        yield opened


@pytest.fixture
def launch(on: str, version: str, platform: Any) -> list[str]:
    """The words of a launch of one site."""
    words = ["launch", str(RECIPE), "--on", platform.launch_option(), "--sites", "a", "--gpu", GPUS.get(on, "L4")]
    settings = {"outer.store": store_of(on, version), "prime_rl.version": version, "launch.timeout_hours": "12"}
    return [*words, *(each for name in settings for each in (f"--{name}", settings[name])), "--unchecked"]


def store_of(on: str, version: str) -> str:
    return f"s3://{BUCKET}/{on}-{version}"


def run_of(on: str, version: str) -> str:
    return f"{store_of(on, version)}/reverse-text-2"


def assert_reached_rl(printed: str, command: Sequence[str], environment: Path) -> str:
    """That the command's own process started PRIME-RL's `rl`; how."""
    parent, rl = [line for line in printed.splitlines() if line.startswith(("rl's parent: ", "rl of "))][-2:]
    words = parent.removeprefix("rl's parent: ").split()[-len(command) :]
    assert (Path(words[0]).name, words[1:]) == (Path(command[0]).name, [*command[1:]]), printed
    assert re.fullmatch(rf"rl of {environment} \S+ @ /\S+/rl.toml", rl), printed
    return rl


def report(on: str, job: Job, ran: Sequence[str], rl: str, stand_ins: Mapping[str, str]) -> None:
    image = f", {job.image}" if job.image else ""
    steps = [f"  {step}".replace("\n", "\n  ") for step in (*ran, shlex.join(job.command))]
    instead = [f"  {name}: {how}" for name, how in {on: PLATFORMS[on], **stand_ins, **ELSEWHERE}.items()]
    print("\n".join(["", f"{on}{image}: these ran", *steps, "and reached", f"  {rl}", "with stand-ins for", *instead]))


@pytest.mark.parametrize(
    ("on", "version"), [*((on, COMMIT) for on in INSTALLING), ("modal", "0.8.0"), ("hf-jobs", "0.8.0")]
)
def test_each_step_that_a_dry_run_shows_is_its_platforms_and_runs_up_to_rl(
    on: str, version: str, platform: Any, launch: list[str], cli: Callable[..., str], replica: Replica
) -> None:
    shown = shown_in(cli(*launch, "--dry-run"))
    given_to, run = INSTALLING[on]
    with platform.hold_pending():
        cli(*launch, "--yes", "--no-limit", "--detach")
        given = given_to(platform)
        assert shown == given
        replica.renew(shown.image)
        ran, done = run(replica, shown, given)
        cli("cancel", run_of(on, version))
    assert done.returncode == 0, done.stdout + done.stderr
    rl = assert_reached_rl(done.stdout, shown.command, replica.folder / "app/.venv")
    met = {name: how for name, how in STAND_INS.items() if name in shown.script or name not in IN_SCRIPTS}
    report(on, shown, ran, rl, met)


@pytest.mark.parametrize("version", ["0.8.0"])
@pytest.mark.parametrize("on", ["ssh", "local"])
def test_on_a_machine_of_ones_own_a_dry_run_shows_the_command_which_runs_up_to_rl(
    on: str,
    version: str,
    platform: Any,
    launch: list[str],
    cli: Callable[..., str],
    replica: Replica,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = own_machine(replica)
    if on == "ssh":
        (platform.machine.home / ".composer-prime").mkdir()
        (platform.machine.home / ".composer-prime/venv").symlink_to(environment)
        platform.machine.variables["PYTHONPATH"] = ""
    else:
        monkeypatch.setenv("PATH", f"{environment}/bin", prepend=os.pathsep)
    shown = shown_in(cli(*launch, "--dry-run"))
    assert (shown.image, shown.script) == ("", "")
    cli(*launch, "--poll-s", "0.2")
    rl = assert_reached_rl(cli("logs", run_of(on, version)), shown.command, environment)
    report(on, shown, [], rl, {name: how for name, how in STAND_INS.items() if name not in ("the image", *IN_SCRIPTS)})


@pytest.mark.parametrize(("on", "scripts"), [("modal", ["a, b, c, d"]), ("modal:1,hf-jobs:3", ["a", "b, c, d"])])
def test_sites_that_install_alike_have_one_script_in_a_dry_run(on: str, scripts: list[str]) -> None:
    recipe = load_any(RECIPE.with_name("math_4b_4.toml"), ["--launch.gpu", "H200"])
    plan, problems = plan_launch(recipe, on, environment={}), Problems()
    printed = list(described(plan, Limits(), problems, dry_run=True))
    problems.check()
    headings = [line for line in printed if line.startswith("before")]
    assert headings == [f"before the command of {each}" for each in scripts]
    assert sum("python3 -m composer_prime.sites.prime_rl" in line for line in printed) == len(scripts)


def own_machine(replica: Replica) -> Path:
    """Make it one that has our package beside PRIME-RL v0.8.0; the environment that holds them."""
    replica.renew(PRIME_RL_IMAGES["0.8.0"])
    packages = packages_of([], prime_rl="0.8.0")
    (wheel,) = packages.wheels()
    file = replica.folder / wheel.file
    file.write_bytes(wheel.data)
    for command in packages.commands([str(file)], None):
        done = replica.run(command, PATH=replica.there(CUDA_VARIABLES["PATH"]))
        assert done.returncode == 0, f"{command}: {done.stderr}"
    return replica.folder / "app/.venv"
