"""Jobs of PRIME-RL sites without an image of their own: which PRIME-RL they take, how they get it, and what is refused.

`prime_rl_locks/` holds, for each version, what `uv sync` installs on Linux from its uv.lock with all packages of its
workspace and the extras of its image, or of our job: names, and the versions of those that it takes from elsewhere.
"""

import io
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from composer_prime.config import any_from_data
from composer_prime.errors import BadInput, Problems
from composer_prime.executors.packages import (
    CUDA_IMAGE,
    PRIME_RL_COMMITS,
    PRIME_RL_HAS,
    PRIME_RL_IMAGES,
    PRIME_RL_LACKS,
    UV_IMAGE,
    Packages,
    packages_of,
)
from composer_prime.launch.budget import Limits
from composer_prime.launch.plan import plan_launch
from composer_prime.launch.preflight import described
from composer_prime.sites.prime_rl.toml import VERSIONS
from tests.architecture import REPOSITORY
from tests.executors import stock_image as stock
from tests.executors.replica import COMMIT, Replica
from tests.executors.stock_image import install

handmade = stock.handmade

PRIME: dict[str, Any] = {
    "run": {"name": "small"}, "max_steps": 16, "model": {"name": "Qwen/Qwen3-0.6B"}, "site": {"backend": "prime-rl"},
    "outer": {"store": "s3://bucket/runs"}, "launch": {"gpu": "a10g-largex2"}, "inference": {},
}  # fmt: skip
TEACHERS = {
    "name": "taught",
    "env": {"id": "composer-prime", "taskset": {"id": "gsm8k"}, "teachers": [{"name": "big", "base_url": "http://t"}]},
}
HINTS = {
    "name": "hinted",
    "env": {"id": "composer-prime", "taskset": {"id": "gsm8k"}, "hints": {"base_url": "http://t"}},
}
PAIRS = {"name": "pairs", "env": {"taskset": {"id": "composer-prime-pairs", "file": "pairs.jsonl"}}}
TOP_K = {"distill": {"top_k": 4}}


def sources(*tables: object) -> dict[str, Any]:
    return {"train": {"source": list(tables)}}


def prime_packages(on: str = "modal", **tables: Any) -> Packages:
    plan = plan_launch(any_from_data({**PRIME, **tables}), on, environment={})
    assert plan.packages is not None
    return plan.packages


# which PRIME-RL


def test_every_version_whose_keys_are_written_has_an_image_or_a_commit() -> None:
    assert [*PRIME_RL_IMAGES, *PRIME_RL_COMMITS] == list(VERSIONS) == list(PRIME_RL_HAS)
    assert all(commit.startswith(version) for version, commit in PRIME_RL_COMMITS.items())


@pytest.mark.parametrize("on", ["modal", "hf-jobs", "sky"])
@pytest.mark.parametrize("version", ["auto", *VERSIONS])
def test_a_dry_run_says_which_image_a_version_takes_and_what_is_installed_on_it(on: str, version: str) -> None:
    gpu = "a10g-largex2" if on == "hf-jobs" else "L4"
    recipe = any_from_data({**PRIME, "prime_rl": {"version": version}, "launch": {"gpu": gpu}})
    plan = plan_launch(recipe, on, environment={})
    shown = " ".join(" ".join(described(plan, Limits(), problems := Problems(), dry_run=True)).split())
    problems.check()
    if version == COMMIT:
        assert f"image {CUDA_IMAGE} installs PRIME-RL {COMMIT} from its lock, composer-prime " in shown
    else:
        image = f"ghcr.io/primeintellect-ai/prime-rl:v{'0.8.0' if version == 'auto' else version}"
        assert f"image {image} installs composer-prime " in shown and "from its lock" not in shown


@pytest.mark.parametrize(
    ("tables", "version"),
    [
        ({}, "0.8.0"),
        ({"orchestrator": sources({"env": {"taskset": {"id": "gsm8k"}}})}, "0.8.0"),
        ({"orchestrator": sources(TEACHERS)}, COMMIT),
        ({"orchestrator": sources(HINTS), "trainer": TOP_K}, COMMIT),
        ({"orchestrator": sources(PAIRS)}, COMMIT),
        ({"trainer": {"model": {"moe_fused_kernel": True}}}, COMMIT),
    ],
    ids=["nothing", "rollouts", "teachers", "hints", "pairs", "a newer key"],
)
def test_where_the_recipe_names_no_version_it_is_the_newest_image_or_the_commit_that_it_needs(
    tables: dict[str, Any], version: str
) -> None:
    assert prime_packages(**tables).prime_rl == version


@pytest.mark.parametrize("on", ["modal", "hf-jobs", "sky", "ssh:gpu1", "local"])
@pytest.mark.parametrize(
    ("source", "said"),
    [
        (TEACHERS, "place for teachers and hints (env.id = composer-prime)"),
        (HINTS, "place for teachers and hints (env.id = composer-prime)"),
        (PAIRS, "place for pairs (env.taskset.id = composer-prime-pairs)"),
    ],
    ids=["teachers", "hints", "pairs"],
)
def test_streams_that_the_named_version_can_not_carry_are_refused_in_one_line(
    source: dict[str, Any], said: str, on: str
) -> None:
    recipe = any_from_data(
        {**PRIME, "prime_rl": {"version": "0.8.0"}, "orchestrator": sources(source), "trainer": TOP_K}
    )
    with pytest.raises(BadInput) as refused:
        plan_launch(recipe, on, environment={})
    assert str(refused.value) == (
        f'PRIME-RL 0.8.0 has no {said}: drop the source, or install a newer one: set prime_rl.version to "{COMMIT}"'
    )


@pytest.mark.parametrize("version", ["auto", "0.8.0", COMMIT])
def test_what_is_wrong_for_every_version_is_said_as_it_is(version: str) -> None:
    trainer = {"distill": {"divergence": "taid"}}
    with pytest.raises(BadInput, match=r"\[trainer.distill\] divergence") as refused:
        prime_packages(trainer=trainer, prime_rl={"version": version})
    assert "prime_rl.version" not in str(refused.value)


# what is there, and what is installed


def test_environments_of_a_prime_rl_recipe_are_found_wherever_it_names_them(handmade: str) -> None:
    of_ours = {"env": {"taskset": {"id": handmade}}}
    orchestrator = {"train": {"source": [{"env": {"taskset": {"id": "gsm8k"}}}]}, "eval": {"source": [of_ours]}}
    packages = prime_packages(orchestrator=orchestrator)
    assert packages.prime_rl == "0.8.0" and packages.names == ("composer-prime", handmade)
    with pytest.raises(BadInput, match="revers_letters isn't installed here"):
        prime_packages(orchestrator={"train": {"env": [{"taskset": {"id": "revers-letters"}}]}})


@pytest.mark.parametrize(
    "source", ["a table", [{"env": "a word"}], [{"taskset": "a word"}], [{"taskset": {"id": 3}}], ["a word"], 5, {}]
)
def test_what_prime_rl_would_refuse_is_left_to_it(source: object) -> None:
    assert prime_packages(orchestrator={"train": {"source": source}}).names == ("composer-prime",)


def test_a_value_where_a_table_must_be_is_one_line() -> None:
    with pytest.raises(BadInput, match=r"^trainer \(3\) must be a table, since trainer.loss.type is set: correct it$"):
        prime_packages(trainer=3)


def lock(version: str) -> dict[str, str]:
    """Version by name, without its local part; "" where it isn't an index's."""
    lines = Path(__file__).with_name("prime_rl_locks").joinpath(f"{version}.txt").read_text().split()
    return {name: held.partition("+")[0] for name, _, held in (line.partition("==") for line in lines)}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_known_of_a_version_is_its_locks_and_what_we_need_beside_it_is_what_that_lacks(version: str) -> None:
    held = lock(version)
    assert not held["verifiers"] and PRIME_RL_HAS[version].items() - {"verifiers": ""}.items() >= {
        (name, held[name]) for name in PRIME_RL_HAS[version] if name != "verifiers"
    }
    needs = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    assert (
        tuple(name for name in sorted(Requirement(each).name for each in needs) if name not in held) == PRIME_RL_LACKS
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_beside_prime_rl_its_own_versions_decide_and_not_this_machines(version: str) -> None:
    beside = packages_of([], needs=["gradientmail"], prime_rl=version)
    assert beside.pins == (*PRIME_RL_LACKS, "gradientmail")
    ours, _, lacking, check = beside.commands(["w/composer_prime-1.whl", "w/env-1.whl"], "auto")
    assert ours.endswith("--python /app/.venv --no-deps w/composer_prime-1.whl") and "torch" not in lacking
    assert lacking.endswith(" w/env-1.whl") and check == "python3 -m composer_prime.sites.prime_rl"


def test_alone_nothing_of_prime_rl_is_installed() -> None:
    alone = packages_of([])
    assert (alone.image, alone.preparation, alone.prime_rl) == (UV_IMAGE, [], None)


@pytest.mark.parametrize(
    ("needs", "version", "has"),
    [
        ("verifiers>=0.3", "0.8.0", "0.2.2.dev76"),
        ("verifiers>=0.3.1", COMMIT, "0.3.1.dev62"),
        ("torch<2.11", COMMIT, ""),
    ],
)
def test_an_environment_that_conflicts_with_a_versions_lock_is_refused_by_both_names(
    needs: str, version: str, has: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "an-env", "an_env", needs=["numpy", needs])
    monkeypatch.syspath_prepend(str(tmp_path))
    said = rf"an-env needs {needs}, and PRIME-RL {version} \(prime_rl.version\) has {has or '2.11.0'}: loosen that"
    tables = {"prime_rl": {"version": version}, "orchestrator": sources({"env": {"taskset": {"id": "an-env"}}})}
    with pytest.raises(BadInput, match=said):
        prime_packages(**tables)


# its installation, in a replica


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Replica:
    """One that is as the commands before the wheels leave it."""
    machine = Replica(tmp_path_factory.mktemp("machine"))
    machine.prepare()
    return machine


def test_a_commit_is_installed_from_its_lock_with_its_environments_and_at_its_submodules_versions(
    replica: Replica,
) -> None:
    """By a real git, and a real uv of the version that a job takes."""
    found = replica.installed()
    wanted = {"verifiers": "0.3.1.dev1", "gsm8k": "0.1.0", "packaging": "24.2", "pluggy": "1.5.0", "prime-rl": "0.8.0"}
    assert wanted.items() <= found.items() and not found.keys() & {"toolz", "mccabe"}
    assert (replica.folder / "app/deps/renderers/README").read_text() == "renderers.git"
    apt = (replica.folder / "apt").read_text()
    assert "git" in apt.split() and "python3-venv" in apt.split()


def test_a_job_runs_beside_the_prime_rl_that_it_has_installed(replica: Replica) -> None:
    """The whole script, from its first line, with this package's own wheel."""
    packages = packages_of([], prime_rl=COMMIT)
    (wheel,) = packages.wheels()
    served = replica.folder / "served.whl"
    served.write_bytes(wheel.data)
    program, option, script, *words = packages.before(("rl", "@", "it.toml"), has_gpu=True)
    assert (program, option) == ("sh", "-c")
    done = replica.run(script, *words, **dict.fromkeys(packages.links, served.as_uri()))
    assert done.returncode == 0, done.stderr
    version, _, rl = done.stdout.splitlines()[-3:]
    assert (version, rl) == (COMMIT, f"rl of {replica.folder}/app/.venv /usr/local/cuda @ it.toml")
    found = replica.installed()
    assert {"composer-prime", *PRIME_RL_LACKS} <= found.keys() and "torch" not in found
    assert (found["verifiers"], found["packaging"]) == ("0.3.1.dev1", "24.2")


@pytest.mark.parametrize("needs", ["iniconfig", "packaging<24", "verifiers>=0.3.1"])
def test_an_environments_needs_are_installed_or_conflict_by_name_and_nothing_is_exchanged(
    needs: str, replica: Replica, tmp_path: Path
) -> None:
    """What is there from a folder, as verifiers is, isn't exchanged either, and the folder's rules don't count."""
    rules = replica.folder / "app/pyproject.toml"
    rules.write_text(rules.read_text().replace('"7 days"', '"2015-01-01T00:00:00Z"'))
    assert replica.run("cd /app && /opt/uv/bin/uv pip install --quiet toolz").returncode != 0, "its own rules"
    for name, wanted in (("composer_prime", ["torch"]), ("an_env", [needs])):
        (tmp_path / f"{name}-1.0-py3-none-any.whl").write_bytes(made_wheel(name, wanted))
    files = [str(file) for file in sorted(tmp_path.iterdir())]
    before = replica.installed()
    *steps, last, _ = Packages(("composer-prime",), ("pluggy",), COMMIT).commands(files, "auto")
    path = f"{replica.folder}/opt/uv/bin:{replica.env['PATH']}"
    for step in steps:
        assert (done := replica.run(f"cd /app && {step}", PATH=path)).returncode == 0, done.stderr
    done, after = replica.run(f"cd /app && {last}", PATH=path), replica.installed()
    assert {name: after[name] for name in ("packaging", "verifiers", "pluggy")} == {
        name: before[name] for name in ("packaging", "verifiers", "pluggy")
    }
    assert "torch" not in after
    if needs == "iniconfig":
        assert done.returncode == 0 and {"iniconfig", "an-env"} <= after.keys()
    else:
        assert done.returncode == 1 and f"an-env==1.0 depends on {needs}" in " ".join(done.stderr.split())


def made_wheel(name: str, needs: Sequence[str]) -> bytes:
    """A wheel with one module and those needs."""
    info = f"{name}-1.0.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {each}" for each in needs)]
    texts = {f"{name}.py": "", f"{info}/METADATA": "\n".join([*lines, ""]), f"{info}/WHEEL": stock.PURE}
    record = f"{info}/RECORD"
    texts[record] = "".join(f"{file},,\n" for file in (*texts, record))
    with zipfile.ZipFile(data := io.BytesIO(), "w") as archive:
        for file, text in texts.items():
            archive.writestr(file, text)
    return data.getvalue()
