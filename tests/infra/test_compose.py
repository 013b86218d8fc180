"""Two sites and a SeaweedFS under Compose: its own schema, SeaweedFS's own flags, and commands that ours takes."""

import re
import shlex
import subprocess
from typing import Any

import httpx
import pytest
import yaml

from tests.architecture import REPOSITORY
from tests.infra.scripts import complaints, linter
from tests.infra.site_commands import fill, read_site_command
from tests.patience import PATIENCE_S
from tests.servers import S3Server
from tests.servers.weed import weed_program

FOLDER = REPOSITORY / "infra/compose"
COMPOSE = FOLDER / "compose.yaml"
DOCKERFILE = FOLDER / "Dockerfile"


def services() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())["services"]


def test_composes_own_schema_is_content() -> None:
    checker = linter("check-jsonschema")
    if checker is None:
        pytest.skip("check-jsonschema isn't installed: pip install check-jsonschema")
    assert complaints([checker, "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]) == ""


def test_the_sites_run_one_recipe_in_one_bucket_and_share_no_volume() -> None:
    sites = {name: service for name, service in services().items() if name != "bucket"}
    read = {name: read_site_command([fill(word, {}) for word in site["command"]]) for name, site in sites.items()}
    assert {name: site for name, (site, _) in read.items()} == {"site-a": "a", "site-b": "b"}
    assert read["site-a"][1] == read["site-b"][1]
    assert read["site-a"][1].outer is not None and read["site-a"][1].outer.store == "s3://runs"
    volumes = [volume.partition(":")[0] for service in services().values() for volume in service["volumes"]]
    assert len(set(volumes)) == len(volumes) == 3


def test_what_the_sites_wait_for_is_the_bucket_they_write_to() -> None:
    bucket = services()["bucket"]
    for site in ("site-a", "site-b"):
        service = services()[site]
        assert service["depends_on"] == {"bucket": {"condition": "service_healthy"}}
        assert service["environment"]["AWS_ENDPOINT_URL"] == "http://bucket:8333"
    assert "-bucket=runs" in bucket["command"] and "ports" not in bucket


def test_no_credential_has_a_value_of_its_own() -> None:
    for service in services().values():
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            assert re.fullmatch(rf"\$\{{{name}:\?.+\}}", service["environment"][name])


def test_seaweedfs_knows_every_flag() -> None:
    command, *flags = services()["bucket"]["command"]
    listed = subprocess.run([weed_program(), command, "-h"], capture_output=True, text=True, timeout=PATIENCE_S)
    known = set(re.findall(r"^\s+-([\w.]+)", listed.stdout + listed.stderr, re.MULTILINE))
    assert {flag.lstrip("-").partition("=")[0] for flag in flags} <= known


@pytest.mark.s3
def test_seaweedfs_answers_where_its_health_is_asked(seaweed: S3Server) -> None:
    (url,) = [word for word in services()["bucket"]["healthcheck"]["test"] if word.startswith("http")]
    assert httpx.get(url.replace("http://bucket:8333", seaweed.endpoint)).status_code == 200


def test_the_image_has_what_the_commands_need_and_is_not_roots() -> None:
    lines = DOCKERFILE.read_text().replace("\\\n", " ").splitlines()
    kept = {line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    copied = [path for line in lines if line.startswith("COPY") for path in shlex.split(line)[1:-1]]
    assert set(copied) == kept and all((REPOSITORY / path).exists() for path in copied)
    environments = {
        f"/opt/composer-prime/{path.parent.relative_to(REPOSITORY)}"
        for path in REPOSITORY.glob("envs/*/pyproject.toml")
    }
    (install,) = [line for line in lines if "pip install" in line]
    assert environments <= set(install.split())
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001"]
