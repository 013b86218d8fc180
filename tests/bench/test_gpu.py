"""The script that repeats two measurements on a GPU: in parts, each going on from the last, nothing made twice."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from composer_prime.sites.embedded.ports import claim_port, listen
from tests.architecture import REPOSITORY
from tests.bench import gpu

MINUTES = 0.15
"""Of a part: a third of what all pieces of the fake take, and several times its start."""
FAKE = (sys.executable, str(REPOSITORY / "tests/bench/fake_cli.py"))


@pytest.fixture
def fake_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CLI", FAKE)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def command(out: Path, port: int, *more: str) -> list[str]:
    return ["--out", str(out), "--device", "cpu", "--small", "--port", str(port), *more]


def parts(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "parts.jsonl").read_text().splitlines()]


def rows(out: Path) -> dict[str, int]:
    """Every row of both ablations, and when it was written."""
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in out.glob("*/*-ablation/rows/*.json")}


@pytest.mark.usefixtures("fake_cli")
def test_parts_go_on_until_all_is_done_and_nothing_is_made_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call, before, codes = command(tmp_path, claim_port(None, set()), "--minutes", str(MINUTES)), {}, []
    while (code := gpu.main(call)) == gpu.MORE_EXIT:
        codes.append(code)
        assert "There is more to do" in capsys.readouterr().out and len(codes) < 20
        now = rows(tmp_path)
        assert before.items() <= now.items()
        before = now
    said = capsys.readouterr().out
    assert code == 0 and codes, "it wasn't interrupted at all"
    assert before.items() <= rows(tmp_path).items() and len(rows(tmp_path)) == 4 + 2
    assert "on cpu, small, no measurement" in said
    assert f"teaching: 4 of 4 runs done, {tmp_path / 'teaching/hints-ablation/report.md'}" in said
    ran = parts(tmp_path)
    assert [part["command"][0] == "run" and "--resume" not in part["command"] for part in ran].count(True) == 1
    assert all(part["device"] == "cpu" and part["small"] and part["torch"] for part in ran)
    assert all(part["seconds"] < 60 * MINUTES for part in ran)
    number = len(ran)
    assert gpu.main(call) == 0 and len(parts(tmp_path)) == number, "what is done isn't started again"


@pytest.mark.usefixtures("fake_cli")
def test_ctrl_c_ends_a_part_early_and_the_next_goes_on(tmp_path: Path) -> None:
    call = command(tmp_path, claim_port(None, set()), "--only", "sites")

    def interrupt() -> None:
        while not (tmp_path / "logs/sites.log").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert gpu.main(call) == gpu.MORE_EXIT
    thread.join()
    assert gpu.main(call) == 0 and len(rows(tmp_path)) == 2


@pytest.mark.usefixtures("fake_cli")
def test_a_model_and_recipes_of_ones_own_take_the_place_of_ours(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(gpu.SITES.recipe.read_text().replace('"equal-samples"', '"own"'))
    more = ["--only", "sites", "--sites", str(own), "--model", "some/model", "--arm", "quick max_steps=8"]
    assert gpu.main(command(tmp_path / "out", 1, *more)) == 0
    assert {Path(name).name for name in rows(tmp_path / "out")} == {"base-s0.json", "quick-s0.json"}
    (part,) = parts(tmp_path / "out")
    assert {str(own), "some/model", "quick max_steps=8"} <= set(part["command"])


@pytest.mark.usefixtures("fake_cli")
def test_a_port_in_use_and_a_device_that_is_not_there_are_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = claim_port(None, set())
    with listen(port):
        assert gpu.main(command(tmp_path / "busy", port, "--only", "teaching")) == 2
    assert f"error: --port ({port}) is in use" in capsys.readouterr().err and not rows(tmp_path / "busy")
    assert gpu.main(["--out", str(tmp_path / "out"), "--device", "mps" if sys.platform == "linux" else "cuda"]) == 2
    assert capsys.readouterr().err.startswith('error: device ("') and not (tmp_path / "out").exists()


@pytest.mark.long
def test_the_real_commands_come_to_their_end_in_parts(tmp_path: Path) -> None:
    call, codes = command(tmp_path, claim_port(None, set()), "--minutes", "3"), []
    while (code := gpu.main(call)) == gpu.MORE_EXIT:
        codes.append(code)
        assert len(codes) < 10
    assert code == 0 and codes
    for report in (tmp_path / "teaching/hints-ablation/report.md", tmp_path / "sites/equal-samples-ablation/report.md"):
        assert report.exists()
