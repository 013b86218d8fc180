"""Packages that a job installs: as this machine has them, wheels that pip takes, and nothing that was exchanged."""

import io
import os
import secrets
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from composer_prime.config.recipe import module_of
from composer_prime.errors import BadInput, CorruptObject
from composer_prime.executors.base import JobSpec, Secrets
from composer_prime.executors.packages import (
    LINK_VARIABLE,
    Packages,
    Wheel,
    packages_of,
)
from composer_prime.launch import launch_keys
from composer_prime.launch.plan import plan_launch
from composer_prime.launch.records import begin_launch
from composer_prime.store.obstore import MemoryStore
from tests.architecture import REPOSITORY
from tests.executors import stock_image as stock
from tests.executors.launches import Scene, small_plan, small_recipe
from tests.executors.stock_image import install, make_stock_image, make_wheel
from tests.no_makers import hide_makers, said_of

handmade = stock.handmade

SHA = "from composer_prime.executors.packages import Packages; print(Packages(('{}',)).wheels()[0].sha256)"


# which distributions


def test_environments_are_handed_over_with_this_package_and_those_of_verifiers_are_not(handmade: str) -> None:
    found = packages_of([handmade, "harbor"])
    assert found.names == ("composer-prime", handmade)
    assert f"{handmade} 1.0 of this machine" in str(found)


def test_an_editable_environment_is_found_though_its_package_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also below another's folder, as in a repository of many, and beside an environment that is installed in it."""
    (source := tmp_path / "root" / "envs").mkdir(parents=True)
    (site := tmp_path / "root" / ".venv" / "site-packages").mkdir(parents=True)
    (source / "an_environment.py").write_text("")
    for name, folder in (("the-root", tmp_path / "root"), ("other-name", source)):
        install(site, name, direct={"url": folder.as_uri(), "dir_info": {"editable": True}})
    install(site, "third-name", "a_third_environment")
    monkeypatch.syspath_prepend(str(source))
    monkeypatch.syspath_prepend(str(site))
    assert packages_of(["an_environment", "a_third_environment"]).names[1:] == ("other-name", "third-name")


def test_what_an_environment_needs_and_no_index_has_is_handed_over_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = {"url": "https://example.org/it.whl", "archive_info": {}}
    install(tmp_path, "an-env", "an_env", needs=["near >= 1", "far", "numpy; extra == 'x'", "not-here"])
    install(tmp_path, "near", "near", direct=local, needs=["nearer"])
    install(tmp_path, "nearer", "nearer", direct=local, needs=["near"])
    install(tmp_path, "far", "far")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert packages_of(["an_env"]).names[1:] == ("an-env", "near", "nearer")


def test_what_this_package_needs_is_installed_at_this_machines_versions() -> None:
    pins = packages_of([]).pins
    assert f"verifiers=={version('verifiers')}" in pins
    assert f"torch=={version('torch').partition('+')[0]}" in pins
    assert packages_of([], needs=["no-such-thing"]).pins == (*pins, "no-such-thing")


@pytest.mark.parametrize("id", ["my-env", "owner/My-Env@1.2", "my_env"])
def test_an_environment_of_any_spelling_is_the_module_that_verifiers_imports(id: str) -> None:
    assert module_of(id) == "my_env"


def test_an_environment_that_is_importable_and_in_no_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loose_module.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadInput, match="loose_module isn't installed here by a package: pip install one"):
        packages_of(["loose_module"])


def test_an_environment_that_needs_another_version_than_this_machine_has_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that this package needs comes to the job at this machine's versions."""
    elsewhere = "verifiers>=99; sys_platform == 'win32'"
    install(tmp_path, "an-env", "an_env", needs=["verifiers", "Pydantic>=2", elsewhere, "httpx<0.1; extra == 'old'"])
    install(tmp_path, "other-env", "other_env", needs=["verifiers<0.1"])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert packages_of(["an_env"]).names[1:] == ("an-env",)
    said = rf"other-env needs verifiers<0.1, and this machine has {version('verifiers')}: loosen that"
    with pytest.raises(BadInput, match=said):
        packages_of(["other_env"])


@pytest.mark.parametrize(("on", "image"), [("hf-jobs", "my/own"), ("modal", None)])
def test_a_registrys_secret_is_refused_where_nothing_is_pulled_with_it(on: str, image: str | None) -> None:
    recipe = small_recipe(launch={"registry_secret": "mine", "image": image})
    with pytest.raises(BadInput, match=r"launch.registry_secret \(mine\) is for an image of yours on Modal"):
        plan_launch(recipe, on, environment={})


def test_a_named_image_installs_nothing() -> None:
    assert small_plan("hf-jobs", launch={"image": "my/own"}).packages is None


# their wheels


def test_a_wheel_of_an_installed_distribution_is_one_that_pip_installs(handmade: str, tmp_path: Path) -> None:
    (wheel,) = Packages((handmade,)).wheels()
    file = tmp_path / wheel.file
    file.write_bytes(wheel.data)
    assert not [name for name in zipfile.ZipFile(file).namelist() if name.endswith(("INSTALLER", "direct_url.json"))]
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, str(file)], check=True)
    assert (target / f"{handmade}.py").read_text() == "ANSWER = 42\n"


BACKEND = """
import os, time, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    files = {{"METADATA": "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n", "WHEEL": {about!r}, "RECORD": ""}}
    files = {{"{name}-1.0.dist-info/" + each: text for each, text in files.items()}}
    with zipfile.ZipFile(f"{{folder}}/{name}-1.0-py3-none-any.whl", "w") as wheel:
        for each, text in {{**files, "{name}.py": open("{name}.py").read()}}.items():
            wheel.writestr(zipfile.ZipInfo(each, time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"]))[:6]), text)
    return "{name}-1.0-py3-none-any.whl"
"""
"""Of a project that needs nothing to be built, and dates its wheel as it is told."""


def write_project(folder: Path, name: str) -> None:
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (folder / "backend.py").write_text(BACKEND.format(name=name, about=stock.PURE))
    (folder / f"{name}.py").write_text("ANSWER = 42\n")


def told_sha(name: str, tmp_path: Path, python: Path | str = sys.executable, **variables: str) -> str:
    """The sha256 of a distribution's wheel as another process makes it."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path]), **variables}
    done = subprocess.run([str(python), "-c", SHA.format(name)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def source_of(wheel: Wheel, name: str) -> str:
    with zipfile.ZipFile(io.BytesIO(wheel.data)) as files:
        return files.read(f"{name}.py").decode()


def test_wheels_of_equal_files_are_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path / "it", "an_editable")
    direct = {"url": (tmp_path / "it").as_uri(), "dir_info": {"editable": True}}
    install(tmp_path / "site", "an_editable", direct=direct)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (wheel,) = Packages(("an_editable",)).wheels()
    for file in (tmp_path / "it").glob("*.*"):
        file.touch()  # only its time is another
    assert told_sha("an_editable", tmp_path) == wheel.sha256 and source_of(wheel, "an_editable") == "ANSWER = 42\n"


def test_a_distribution_of_a_repository_is_made_of_the_commit_that_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_project(tmp_path / "repository" / "envs", "of_git")
    git = ["git", "-C", str(tmp_path / "repository"), "-c", "user.name=me", "-c", "user.email=me@example.org"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path / "repository/envs/of_git.py").write_text("ANSWER = 43\n")
    subprocess.run([*git, "commit", "--quiet", "-am", "second"], check=True)
    direct = {"url": (tmp_path / "repository").as_uri(), "vcs_info": {"vcs": "git", "commit_id": commit}}
    install(tmp_path / "site", "of_git", "of_git", direct={**direct, "subdirectory": "envs"})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (wheel,) = Packages(("of_git",)).wheels()
    assert source_of(wheel, "of_git") == "ANSWER = 42\n"


def test_a_distribution_of_an_index_comes_from_the_index_that_pip_is_set_to_at_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "of_an_index", "of_an_index")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    make_wheel(tmp_path / "site", "of_an_index", first := tmp_path / "of_an_index-1.0-py3-none-any.whl")
    newer = tmp_path / "of_an_index-2.0-py3-none-any.whl"
    with zipfile.ZipFile(first) as old, zipfile.ZipFile(newer, "w") as new:
        for each in old.namelist():
            new.writestr(each.replace("1.0", "2.0"), old.read(each).replace(b"\nVersion: 1.0", b"\nVersion: 2.0"))
    assert [each.file for each in Packages(("of_an_index",)).wheels()] == ["of_an_index-1.0-py3-none-any.whl"]


def test_where_pip_is_not_installed_uv_brings_it(handmade: str, tmp_path: Path) -> None:
    programs = make_stock_image(tmp_path / "image")
    (packages,) = programs.parent.glob("lib/python*/site-packages")
    (packages / "pip").unlink()
    (programs / "uv").write_text(
        f'#!/bin/sh\n[ "$1 $2 $3 $4 $6" = "tool run --quiet --python pip" ] || exit 3\n'
        f'shift 6\nexec {sys.executable} -m pip "$@"\n'
    )
    variables = {"PATH": f"{programs}:{os.defpath}", "PYTHONPATH": f"{tmp_path / 'site'}:{REPOSITORY}"}
    (wheel,) = Packages((handmade,)).wheels()
    assert told_sha(handmade, tmp_path, programs / "python", **variables) == wheel.sha256


def test_a_distribution_with_native_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / f"native_one-1.0-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl"
    install(tmp_path / "site", "native_one", "native_one", direct={"url": file.as_uri(), "archive_info": {}})
    make_wheel(tmp_path / "site", "native_one", file)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(BadInput, match=rf"{file.name} isn't pure Python.*name an image"):
        packages_of(["native_one"]).wheels()


def test_wheels_are_made_before_anything_is_written(handmade: str, tmp_path: Path) -> None:
    (file,) = tmp_path.glob("*.whl")
    file.unlink()
    scene = Scene(plan=replace(small_plan(), packages=Packages((handmade,))))
    said = rf"^pip finds no wheels of {handmade} \(.*{file.name}.*\): install them again, .*name an image.*$"
    with pytest.raises(BadInput, match=said):
        scene.supervisor().check()
    assert not [key for key in scene.store.list("") if "attempts" in key or "wheels" in key]


# their links


class LinkingStore(MemoryStore):
    """A bucket that says how long its links are good for."""

    asked: list[int]

    def presign_get(self, key: str, expires_s: int) -> str:
        self.asked.append(expires_s)
        return f"https://bucket.example/{key}?n={len(self.asked)}"


@pytest.fixture
def linking() -> LinkingStore:
    store = LinkingStore(secrets.token_hex(8), "small")
    store.asked = []
    return store


def test_each_attempt_gets_links_of_its_own_for_a_week(handmade: str, linking: LinkingStore) -> None:
    book, packages = begin_launch(linking, "small"), Packages((handmade,))
    first, second = book.hand(packages), book.hand(packages)
    assert first.keys() == second.keys() == set(packages.links) and first != second
    assert linking.asked == [7 * 24 * 3600] * 2
    key = next(key for key in linking.list("launches/wheels/"))
    assert linking.get(key) == packages.wheels()[0].data


def test_other_bytes_at_a_wheels_place_are_said(handmade: str, linking: LinkingStore) -> None:
    book, packages = begin_launch(linking, "small"), Packages((handmade,))
    linking.create(launch_keys.wheel(packages.wheels()[0].sha256), b"something else")
    with pytest.raises(CorruptObject, match="is not what was launched: its sha256 differs"):
        book.hand(packages)


@pytest.mark.parametrize("on", ["hf-jobs", "sky"])
def test_a_bucket_without_links_is_refused_where_jobs_would_need_them(on: str, handmade: str) -> None:
    taskset = {"name": "x", "env": {"taskset": {"id": handmade}}}
    recipe = small_recipe(outer={"store": "gs://bucket/runs"}, orchestrator={"train": {"source": [taskset]}})
    with pytest.raises(BadInput, match=f"gives no links by which jobs on {on} could fetch their packages"):
        plan_launch(recipe, on, environment={})
    on_modal = plan_launch(recipe, "modal", environment={}).packages
    assert on_modal is not None and any(pin.startswith("obstore==") for pin in on_modal.pins)


@pytest.mark.parametrize(("model", "travels"), [("tiny", True), ("small-tools", True), ("org/tiny", False)])
def test_what_makes_a_model_on_the_spot_is_handed_over_with_the_environments(model: str, travels: bool) -> None:
    packages = plan_launch(small_recipe(model={"name": model}), "modal", environment={}).packages
    assert packages is not None
    assert packages.names == ("composer-prime", "reverse-letters", *["tiny-policy"] * travels)


def test_a_launch_without_what_makes_its_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_makers(tmp_path, monkeypatch)
    with pytest.raises(BadInput) as refused:
        plan_launch(small_recipe(), "modal", environment={})
    assert str(refused.value) == said_of("tiny")
    plan_launch(small_recipe(model={"name": "org/tiny"}), "modal", environment={})


def test_what_a_monitor_needs_is_installed_too() -> None:
    recipe = small_recipe(monitors={"wandb": {}, "trackio": {}})
    packages = plan_launch(recipe, "modal", environment={}).packages
    assert packages is not None and [pin.partition("==")[0] for pin in packages.pins[-2:]] == ["wandb", "trackio"]


# their installation


def installing(job: JobSpec) -> list[str]:
    assert job.packages is not None
    return job.packages.before(job.command, has_gpu=False)


def job_of(name: str, served: Path) -> JobSpec:
    """A job that is handed one distribution by a link, and says its answer and how many links it sees."""
    tells = f"import os, {name} as it; print(it.ANSWER, sum(each.startswith('{LINK_VARIABLE}') for each in os.environ))"
    links = dict.fromkeys(Packages((name,)).links, served.as_uri())
    return JobSpec("r", "a", 1, ("python3", "-c", tells), 60, secrets=Secrets(links), packages=Packages((name,)))


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_job_runs_after_its_installation_and_not_with_a_wheel_that_was_exchanged(
    handmade: str, is_changed: bool, tmp_path: Path
) -> None:
    (wheel,) = Packages((handmade,)).wheels()
    served = tmp_path / "served.whl"
    served.write_bytes(wheel.data + b" " * is_changed)
    job = job_of(handmade, served)
    env = {"PATH": f"{make_stock_image(tmp_path / 'image')}:/usr/bin:/bin", **job.secrets.reveal()}
    done = subprocess.run(installing(job), env=env, capture_output=True, text=True)
    if is_changed:
        assert done.returncode == 1 and f"{wheel.file} in the bucket isn't the one that was launched" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "42 0\n"), done.stderr
    assert "served.whl" not in done.stdout + done.stderr


def test_an_index_that_fails_is_no_mistake_of_the_person(handmade: str, tmp_path: Path) -> None:
    """uv's 2 would say so: such a job isn't tried again."""
    (wheel,) = Packages((handmade,)).wheels()
    served = tmp_path / "served.whl"
    served.write_bytes(wheel.data)
    programs = make_stock_image(tmp_path / "image")
    (programs / "uv").write_text("#!/bin/sh\nexit 2\n")
    job = job_of(handmade, served)
    env = {"PATH": f"{programs}:/usr/bin:/bin", **job.secrets.reveal()}
    assert subprocess.run(installing(job), env=env).returncode == 1


def test_torch_is_for_what_the_job_has() -> None:
    one = Packages(("composer-prime",))
    assert "--torch-backend cpu" in one.before(("true",), has_gpu=False)[2]
    assert "--torch-backend auto" in one.before(("true",), has_gpu=True)[2]
    assert "torch" not in one.commands(["w.whl"], None)[0]
