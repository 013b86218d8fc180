"""The Modal app: modal itself builds it without its servers, and its function calls the command line, no more."""

import importlib.util
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture import REPOSITORY
from tests.infra.scripts import Stage
from tests.patience import PATIENCE_S

pytest.importorskip("modal", reason="modal isn't installed: pip install -e '.[modal]'")
from tests.executors.loopback_modal import LoopbackModal

APP = REPOSITORY / "infra/modal/app.py"


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The app as `modal run` loads it, with no server to reach."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("MODAL_SERVER_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("MODAL_CONFIG_PATH", "/nonexistent")
    monkeypatch.setenv("GPU", "A10G:2")
    spec = importlib.util.spec_from_file_location("infra_modal_app", APP)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_modals_own_command_line_finds_the_entrypoint_and_its_options(tmp_path: Path) -> None:
    environment = {**os.environ, "MODAL_CONFIG_PATH": "/nonexistent", "MODAL_SERVER_URL": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", "modal", "run", str(APP.relative_to(REPOSITORY)), "--help"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert all(option in done.stdout for option in ("--recipe", "--site", "--settings"))


def test_deployed_it_has_a_limit_retries_gpus_a_volume_and_the_buckets_secret(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "modal", "deploy", str(APP.relative_to(REPOSITORY))]
    with closing(LoopbackModal(tmp_path)) as modal:
        environment = {**os.environ, **modal.environment(), "GPU": "A10G:2"}
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (function,) = modal.servicer.functions.values()
        brought = modal.servicer.mounted
    assert any(name.endswith("composer_prime/cli/main.py") for name in brought)
    assert not any("__pycache__" in name for name in brought), "as Dockerfile.dockerignore says"
    definition = function.definition
    assert definition.timeout_secs == 24 * 3600 and definition.retry_policy.retries == 7
    assert (definition.resources.gpu_config.gpu_type, definition.resources.gpu_config.count) == ("A10G", 2)
    assert list(function.volumes) == ["/data"] and len(definition.secret_ids) == 1


def test_the_function_calls_the_command_line(app: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path, ["composer-prime"])
    monkeypatch.setenv("PATH", str(stage.bin))
    with pytest.warns(UserWarning, match="will not have access to the mounted Volume"):
        app.run_site.local("recipes/local/two_sites.toml", "b", ["--outer.store", "s3://my-bucket/runs"])
    assert stage.words() == [
        [
            "composer-prime", "site", "/opt/composer-prime/recipes/local/two_sites.toml", "--site", "b", "--resume",
            "--output_dir", "/data", "--outer.store", "s3://my-bucket/runs",
        ]
    ]  # fmt: skip


def ends_with(code: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "composer-prime").write_text(f"#!/bin/sh\nexit {code}\n")
    (folder / "composer-prime").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_site_that_fails_is_a_failure_to_modal(
    app: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_with(3, tmp_path, monkeypatch)
    with pytest.warns(UserWarning), pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        app.run_site.local("r.toml", "b", [])


def test_what_only_a_person_can_mend_is_not_tried_again(
    app: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_with(2, tmp_path, monkeypatch)
    with pytest.warns(UserWarning):
        app.run_site.local("r.toml", "b", [])
