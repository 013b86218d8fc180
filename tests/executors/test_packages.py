"""Packages that a job installs: as this machine has them, wheels that pip takes, and nothing that was exchanged."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from composer_prime.config.recipe import module_of
from composer_prime.errors import BadInput
from composer_prime.executors.base import JobSpec, Resources
from composer_prime.executors.installing import (
    LINK_VARIABLE,
    PRIME_RL_IMAGE,
    UV_IMAGE,
    install_commands,
    installing,
    link_names,
    stock_image,
)
from composer_prime.executors.packages import Packages, packages_of
from composer_prime.executors.secrets import Secrets
from composer_prime.launch.plan import LaunchOptions, plan_launch
from tests.executors import stock_image as stock
from tests.executors.launches import small_plan, small_recipe
from tests.executors.stock_image import make_stock_image

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
    source, site = tmp_path / "source", tmp_path / "site"
    info = site / "other_name-1.0.dist-info"
    for folder in (source, info):
        folder.mkdir(parents=True)
    (source / "an_environment.py").write_text("")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-name\nVersion: 1.0\n")
    (info / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {"editable": True}}))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.syspath_prepend(str(source))
    assert packages_of(["an_environment"]).names == ("composer-prime", "other-name")


@pytest.mark.parametrize("id", ["my-env", "owner/My-Env@1.2", "my_env"])
def test_an_environment_of_any_spelling_is_the_module_that_verifiers_imports(id: str) -> None:
    assert module_of(id) == "my_env"


@pytest.mark.parametrize("module", ["no_such_thing", "no.such"])
def test_an_environment_that_is_not_installed_is_refused(module: str) -> None:
    with pytest.raises(BadInput, match=f"environment {module} isn't installed here"):
        packages_of([module])


def test_an_environment_that_is_importable_and_in_no_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loose_module.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadInput, match=r"loose_module \(.*\) is in no installed package: pip install it"):
        packages_of(["loose_module"])


def test_a_named_image_installs_nothing() -> None:
    assert small_plan("hf-jobs", image="my/own").packages is None


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


def test_wheels_of_equal_files_are_equal_bytes(handmade: str, tmp_path: Path) -> None:
    (wheel,) = Packages((handmade,)).wheels()
    for file in (tmp_path / "site").rglob("*.*"):
        file.touch()  # only its time is another
    env = {"PYTHONPATH": ":".join([str(tmp_path / "site"), *sys.path])}
    done = subprocess.run([sys.executable, "-c", SHA.format(handmade)], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == wheel.sha256, done.stderr


def test_a_distribution_with_native_code_is_refused(handmade: str, tmp_path: Path) -> None:
    (about,) = tmp_path.rglob("WHEEL")
    about.write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n")
    with pytest.raises(BadInput, match=r"\(cp311-cp311-linux_x86_64\) isn't pure Python.*name an image"):
        Packages((handmade,)).wheels()


def test_a_bucket_without_links_is_refused_where_jobs_would_need_them(handmade: str) -> None:
    taskset = {"name": "x", "env": {"taskset": {"id": handmade}}}
    recipe = small_recipe(outer={"store": "gs://bucket/runs"}, orchestrator={"train": {"source": [taskset]}})
    options = LaunchOptions(environment={})
    with pytest.raises(
        BadInput, match=f"gives no links by which jobs on hf-jobs could fetch composer-prime, {handmade}"
    ):
        plan_launch(recipe, "hf-jobs", options)
    assert plan_launch(recipe, "modal", options).linked is None


# their installation


def job_of(name: str, served: Path) -> JobSpec:
    """A job that is handed one distribution by a link, and says its answer and how many links it sees."""
    tells = f"import os, {name} as it; print(it.ANSWER, sum(each.startswith('{LINK_VARIABLE}') for each in os.environ))"
    links = dict.fromkeys(link_names(Packages((name,))), served.as_uri())
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
    done = subprocess.run(installing(job, Packages((handmade,))), env=env, capture_output=True, text=True)
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
    assert subprocess.run(installing(job, Packages((handmade,))), env=env).returncode == 1


def test_torch_is_for_what_the_job_has() -> None:
    one = Packages(("composer-prime",))
    with_gpu = JobSpec("r", "a", 1, ("true",), 60, resources=Resources("H100", 1))
    assert "--torch-backend cpu" in installing(JobSpec("r", "a", 1, ("true",), 60), one)[2]
    assert "--torch-backend auto" in installing(with_gpu, one)[2]
    assert "torch" not in install_commands(one, ["w.whl"], None)[0]


def test_beside_prime_rl_nothing_of_its_environment_is_exchanged() -> None:
    beside, alone = (Packages(("composer-prime",), on_prime_rl=each) for each in (True, False))
    assert (stock_image(beside), stock_image(alone)) == (PRIME_RL_IMAGE, UV_IMAGE)
    ours, lacking, check = install_commands(beside, ["w.whl"], "auto")
    assert ours.endswith("--python /app/.venv --no-deps w.whl") and "torch" not in lacking
    assert check == "python3 -m composer_prime.sites.prime_rl"
