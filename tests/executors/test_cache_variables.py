"""Who wins where a machine's own variables name other caches than the recipe: the machine."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from composer_prime.executors.local import LocalExecutor
from tests.executors.jobs import Stage, run_to_end
from tests.executors.loopback_ssh import SshPlatform

TELL = "import json; mark('got', json.dumps([os.environ['HF_HOME'], os.environ['VLLM_CACHE_ROOT']]))"


def caches(folder: Path) -> dict[str, str]:
    return {"weights": str(folder / "weights"), "compiles": str(folder / "compiles") + "/"}


def test_on_this_machine_an_exported_variable_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/exported")
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    stage = Stage(tmp_path / "stage", "exported")
    spec = stage.spec(TELL, caches=caches(tmp_path))
    with closing(LocalExecutor(tmp_path / "state")) as executor:
        described = executor.describe(spec)
        run_to_end(executor, spec)
    assert json.loads(stage.await_mark("got")) == ["/exported", f"{tmp_path}/compiles/vllm"]
    assert f"VLLM_CACHE_ROOT={tmp_path}/compiles/vllm" in described and "HF_HOME=/exported" in described


def test_over_ssh_the_machines_own_variables_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    stage = Stage(tmp_path / "stage", "hosts")
    with closing(SshPlatform(tmp_path / "machines")) as platform:
        platform.machine.variables["HF_HOME"] = "/data/hf"
        with closing(platform.executor()) as executor:
            run_to_end(executor, stage.spec(TELL, caches=caches(tmp_path)))
    assert json.loads(stage.await_mark("got")) == ["/data/hf", f"{tmp_path}/compiles/vllm"]
