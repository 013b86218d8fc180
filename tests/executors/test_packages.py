"""Packages that a job installs: as this machine has them, wheels that pip takes, and nothing that was exchanged."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from composer_prime.errors import BadInput
from composer_prime.executors.base import JobSpec, WheelLink
from composer_prime.executors.installing import WHEELS_VARIABLE, installing, links_of
from composer_prime.executors.packages import Packages, packages_of
from composer_prime.executors.records import begin_launch
from tests.executors import stock_image
from tests.executors.launches import empty_bucket, small_plan
from tests.executors.stock_image import make_stock_image

handmade = stock_image.handmade


def test_what_came_from_an_index_is_named_and_what_came_from_elsewhere_is_handed_over(handmade: str) -> None:
    found = packages_of([handmade, "verifiers"])
    assert handmade in found.handed and "verifiers" not in found.handed
    assert [each for each in found.requirements if each.startswith("verifiers==")]
    assert f"{handmade} 1.0 of this machine" in str(found)


def test_a_wheel_of_an_installed_distribution_is_one_that_pip_installs_and_equal_each_time(
    handmade: str, tmp_path: Path
) -> None:
    (wheel,) = Packages(handed=(handmade,)).wheels()
    file = tmp_path / wheel.file
    file.write_bytes(wheel.data)
    assert not [name for name in zipfile.ZipFile(file).namelist() if name.endswith(("INSTALLER", "direct_url.json"))]
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, str(file)], check=True)
    assert (target / f"{handmade}.py").read_text() == "ANSWER = 42\n"


def test_an_environment_that_is_not_installed_is_refused() -> None:
    with pytest.raises(BadInput, match="environment no_such_thing isn't installed here"):
        packages_of(["no_such_thing"])


def test_a_bucket_without_links_is_refused_before_anything_is_built() -> None:
    book = begin_launch(empty_bucket(), "small")
    with pytest.raises(BadInput, match=r"jobs can't fetch nothing-there from memory://.*/small, which gives no links"):
        book.hand(Packages(handed=("nothing-there",)))


def test_a_named_image_installs_nothing() -> None:
    assert small_plan("hf-jobs", image="my/own").packages is None


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_job_runs_after_its_installation_and_not_with_a_wheel_that_was_exchanged(
    handmade: str, is_changed: bool, tmp_path: Path
) -> None:
    (wheel,) = Packages(handed=(handmade,)).wheels()
    served = tmp_path / "served.whl"
    served.write_bytes(wheel.data + b" " * is_changed)
    job = JobSpec(
        run="r", site="a", attempt=1, timeout_s=60,
        command=("python3", "-c", f"import os, {handmade} as it; print(it.ANSWER, '{WHEELS_VARIABLE}' in os.environ)"),
        packages=Packages(handed=(handmade,)),
        wheels=(WheelLink(wheel.file, wheel.sha256, served.as_uri()),),
    )  # fmt: skip
    env = {"PATH": f"{make_stock_image(tmp_path / 'image')}:/usr/bin:/bin", **links_of(job.wheels)}
    done = subprocess.run(installing(job), env=env, capture_output=True, text=True)
    if is_changed:
        assert done.returncode == 1 and f"{wheel.file} in the bucket isn't the one that was launched" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "42 False\n"), done.stderr
    assert "served.whl" not in done.stdout + done.stderr
