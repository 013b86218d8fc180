"""Packages that a job installs: as this machine has them, wheels that pip takes, and nothing that was exchanged."""

import io
import secrets
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config import any_from_data
from composer_prime.config.recipe import module_of
from composer_prime.errors import BadInput, CorruptObject
from composer_prime.executors.base import JobSpec
from composer_prime.executors.packages import LINK_VARIABLE, PRIME_RL_IMAGE, UV_IMAGE, Packages, packages_of
from composer_prime.executors.secrets import Secrets
from composer_prime.launch.plan import plan_launch
from composer_prime.launch.records import begin_launch
from composer_prime.store import launch_keys
from composer_prime.store.memory import MemoryStore
from tests.executors import stock_image as stock
from tests.executors.launches import Scene, small_plan, small_recipe
from tests.executors.stock_image import install, make_stock_image

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


@pytest.mark.parametrize("module", ["no_such_thing", "no.such"])
def test_an_environment_that_is_not_installed_is_refused(module: str) -> None:
    with pytest.raises(BadInput, match=f"{module} isn't installed here by a package"):
        packages_of([module])


def test_an_environment_that_is_importable_and_in_no_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loose_module.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadInput, match="loose_module isn't installed here by a package: pip install one"):
        packages_of(["loose_module"])


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
    with pytest.raises(BadInput, match=r"-cp311-cp311-linux_x86_64.whl isn't pure Python.*name an image"):
        packages_of([handmade]).wheels()


def test_a_programs_mode_stays(handmade: str, tmp_path: Path) -> None:
    (tmp_path / "site" / f"{handmade}.py").chmod(0o755)
    (wheel,) = Packages((handmade,)).wheels()
    modes = {each.filename: each.external_attr >> 16 for each in zipfile.ZipFile(io.BytesIO(wheel.data)).infolist()}
    assert modes.pop(f"{handmade}.py") & 0o777 == 0o755
    assert {mode & 0o777 for mode in modes.values()} == {0o644}


def lose_record(info: Path) -> None:
    (info / "RECORD").unlink()


def lose_about(info: Path) -> None:
    (info / "WHEEL").unlink()
    (info / "RECORD").write_text((info / "RECORD").read_text().replace(f"{info.name}/WHEEL,,\n", ""))


def add_data(info: Path) -> None:
    (info / "RECORD").write_text((info / "RECORD").read_text() + "../../../share/it/data.json,,\n")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lose_record, "without a record of its files: pip install it again"),
        (lose_about, "without a record of its files: pip install it again"),
        (add_data, r"has \.\./\.\./\.\./share/it/data.json outside of its packages: .*name an image"),
    ],
)
def test_an_installation_of_which_no_wheel_can_be_made_is_refused_in_one_line(
    handmade: str, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(next((tmp_path / "site").glob("*.dist-info")))
    with pytest.raises(BadInput, match=said) as refused:
        Packages((handmade,)).wheels()
    assert "\n" not in str(refused.value)


def test_wheels_are_made_before_anything_is_written(handmade: str, tmp_path: Path) -> None:
    lose_record(next((tmp_path / "site").glob("*.dist-info")))
    scene = Scene(plan=replace(small_plan(), packages=Packages((handmade,))))
    with pytest.raises(BadInput, match="without a record of its files"):
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


def test_a_bucket_without_links_is_refused_where_jobs_would_need_them(handmade: str) -> None:
    taskset = {"name": "x", "env": {"taskset": {"id": handmade}}}
    recipe = small_recipe(outer={"store": "gs://bucket/runs"}, orchestrator={"train": {"source": [taskset]}})
    with pytest.raises(BadInput, match="gives no links by which jobs on hf-jobs could fetch their packages"):
        plan_launch(recipe, "hf-jobs", environment={})
    on_modal = plan_launch(recipe, "modal", environment={}).packages
    assert on_modal is not None and any(pin.startswith("gcsfs==") for pin in on_modal.pins)


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


def test_beside_prime_rl_nothing_of_its_environment_is_exchanged() -> None:
    beside, alone = (packages_of([], on_prime_rl=each) for each in (True, False))
    assert (beside.image, alone.image) == (PRIME_RL_IMAGE, UV_IMAGE)
    ours, lacking, check = beside.commands(["w.whl"], "auto")
    assert ours.endswith("--python /app/.venv --no-deps w.whl") and "torch" not in lacking
    assert check == "python3 -m composer_prime.sites.prime_rl"


PRIME: dict[str, Any] = {
    "run": {"name": "small"}, "max_steps": 16, "model": {"name": "Qwen/Qwen3-0.6B"}, "site": {"backend": "prime-rl"},
    "outer": {"store": "s3://bucket/runs"},
}  # fmt: skip


def prime_packages(**tables: Any) -> Packages:
    plan = plan_launch(any_from_data({**PRIME, **tables}), "modal", environment={})
    assert plan.packages is not None
    return plan.packages


def test_environments_of_a_prime_rl_recipe_are_found_wherever_it_names_them(handmade: str) -> None:
    of_ours = {"env": {"taskset": {"id": handmade}}}
    orchestrator = {"train": {"source": [{"env": {"taskset": {"id": "gsm8k"}}}]}, "eval": {"source": [of_ours]}}
    packages = prime_packages(orchestrator=orchestrator)
    assert packages.on_prime_rl and packages.names == ("composer-prime", handmade)
    with pytest.raises(BadInput, match="revers_letters isn't installed here"):
        prime_packages(orchestrator={"train": {"env": [{"taskset": {"id": "revers-letters"}}]}})


@pytest.mark.parametrize(
    "source", ["a table", [{"env": "a word"}], [{"taskset": "a word"}], [{"taskset": {"id": 3}}], {}]
)
def test_what_prime_rl_would_refuse_is_left_to_it(source: object) -> None:
    assert prime_packages(orchestrator={"train": {"source": source}}).names == ("composer-prime",)


def test_another_prime_rl_than_the_images_is_refused() -> None:
    with pytest.raises(BadInput, match=r"prime_rl.version \(559b447\) isn't that of the image.*or name an image"):
        prime_packages(prime_rl={"version": "559b447"})
