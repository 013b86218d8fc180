"""All that is wrong is said before anything starts or is made, a line each, by every command that would start it."""

import errno
import importlib.metadata
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from composer_prime.config.toml import to_toml
from composer_prime.errors import INSTALL, BadInput
from composer_prime.sites.preflight import Found, check, check_bucket, rehearsed
from composer_prime.store.file import FileStore
from tests.cli.command_line import Answer, call
from tests.config.recipes import recipe
from tests.no_makers import hide_makers, said_of
from tests.sites.fake_site import small_recipe
from tests.sites.family_run import save_model
from tests.sites.tiny_folder import save_random_tiny

PACKAGE = """
import verifiers.v1 as vf
__all__ = ["Numbers"]
class Number(vf.Task[vf.TaskData]):
    @vf.reward
    async def nearness(self, trace) -> float:
        return {reward}
class Numbers(vf.Taskset[Number, vf.TasksetConfig]):
    def load(self): return [Number(vf.TaskData(idx=i, prompt={prompt})) for i in range(10)]
"""

Cli = Callable[..., Answer]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return lambda *arguments: call(capsys, monkeypatch, *arguments)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of environments: one whose reward raises, one whose prompt is long."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "raising_reward.py").write_text(PACKAGE.format(reward="int('seven')", prompt="str(i)"))
    (folder / "long_prompt.py").write_text(PACKAGE.format(reward="1.0", prompt="'abc' * 1000"))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def written(folder: Path, *environments: dict[str, Any], **tables: Any) -> str:
    """A recipe's file. Each environment is its taskset's table."""
    sources = [{"name": each["id"], "env": {"taskset": each}} for each in environments or [{"id": "reverse-letters"}]]
    out = Path(tables.pop("output_dir", folder / "out"))
    recipe = small_recipe(out, orchestrator={"train": {"source": sources}}, **tables)
    (folder / "recipe.toml").write_text(to_toml(recipe.to_data()))
    return str(folder / "recipe.toml")


def outer(**keys: Any) -> dict[str, Any]:
    return {"inner_steps": 4, "fragments": 2, **keys}


def lines_of(answer: Answer) -> list[str]:
    assert answer.code == 2 and answer.out == "", answer
    return answer.err.removeprefix("composer-prime: ").splitlines()


def test_five_faults_at_once_are_five_lines_and_nothing_was_made(tmp_path, cli, taken_port):
    (tmp_path / "file").touch()
    (tmp_path / "store").mkdir()
    environments = [{"id": "not-there"}, {"id": "reverse-letters", "lenght": 5}]
    recipe = written(
        tmp_path,
        *environments,
        output_dir=str(tmp_path / "file" / "out"),
        inference={"server": {"port": taken_port}},
        site={"key_file": "no.pem"},
        outer=outer(store=str(tmp_path / "store")),
    )
    before, processes = sorted(tmp_path.rglob("*")), psutil.Process().children(recursive=True)
    said = lines_of(cli("run", recipe))
    assert sorted(line.split(" ")[0] for line in said) == sorted(
        ["output_dir", "signing", "inference.server.port", "environment", "environment"]
    )
    assert "environment 'not-there' isn't installed" in "\n".join(said)
    assert "refuses its settings: env.taskset.lenght" in "\n".join(said)
    assert sorted(tmp_path.rglob("*")) == before and psutil.Process().children(recursive=True) == processes
    for command in (["plan", recipe, "--check"], ["site", recipe, "--site", "a"]):
        assert lines_of(cli(*command)) == said


def test_prompt_reward_and_engine_are_tried_before_anything_starts(tmp_path, cli, packages):
    engine = {"engine": "vllm", "python": sys.executable}
    recipe = written(tmp_path, {"id": "long-prompt"}, {"id": "raising-reward"}, inference=engine)
    said = lines_of(cli("plan", recipe, "--check"))
    python, prompt, reward = said
    assert f"inference.python ({sys.executable}) can't import vLLM: No module named vllm" in python
    assert prompt.startswith("environment 'long-prompt': its first prompt has 30")
    assert "seq_len (512) must be larger" in prompt and "raise seq_len" in prompt
    assert "ValueError: invalid literal for int() with base 10: 'seven'" in reward
    assert f"(nearness, {packages / 'raising_reward.py'}:7)" in reward
    assert lines_of(cli("run", recipe)) == said and not (tmp_path / "out").exists()


def test_a_tokenizer_with_more_ids_than_the_model_has_embeddings_is_refused(tmp_path, cli):
    model = save_random_tiny(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    said = lines_of(cli("plan", written(tmp_path, model={"name": str(model)}), "--check"))
    assert "token ids up to 264, and its embeddings have 200 rows" in said[-1]


def test_samples_longer_than_the_models_context_are_refused(tmp_path, cli):
    model = save_random_tiny(tmp_path / "model")
    context = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    recipe = written(tmp_path, model={"name": str(model)}, seq_len=context + 1)
    said = lines_of(cli("run", recipe))
    assert f"seq_len ({context + 1}) must be at most the model's context ({context}, " in said[-1]
    assert list((tmp_path / "out").glob("*")) == []


def test_setting_up_environments_takes_at_most_half_of_what_importing_verifiers_takes(tmp_path):
    def used(act: Callable[[], object]) -> float:
        """Seconds of CPU, of a process that `act` starts and awaits."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        act()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    source = {"name": "letters", "env": {"taskset": {"id": "reverse-letters", "lenght": 5}}}  # no rollout follows
    recipe = small_recipe(tmp_path, orchestrator={"train": {"source": [source]}})
    importing = used(lambda: subprocess.run([sys.executable, "-c", "import verifiers.v1"], check=True))
    took: list[str] = []
    looking = used(lambda: took.extend(rehearsed(recipe, "a").took))
    print(f"importing verifiers {importing:.2f} s of CPU, all of stage 2 {looking:.2f} s; {took}")
    assert looking <= 1.5 * importing
    assert [part.rpartition(" in ")[0] for part in took] == [
        "verifiers imported",
        "environments set up",
        "first prompts and rewards",
    ]


def test_an_answer_too_short_for_any_call_is_warned_of_with_the_value_to_set(tmp_path):
    def warnings(room: int) -> list[str]:
        source = {"name": "boxes", "env": {"taskset": {"id": "tool-letters"}}}
        train = {"source": [source], "sampling": {"max_completion_tokens": room}}
        return rehearsed(small_recipe(tmp_path, orchestrator={"train": train}, seq_len=2048), "a").warnings

    (warning,) = warnings(16)
    length = int(warning.partition("the shortest has ")[2].split()[0])
    assert warning.startswith("warning: orchestrator.train.sampling.max_completion_tokens (16) cuts every tool call")
    call = '<tool_call>\n{"name": "open", "arguments": {"box": 0}}\n</tool_call>'  # a token a byte, and markup
    assert length == len(call) - len("<tool_call></tool_call>") + 2 + len(["<|im_end|>"])
    assert warnings(length) == []


@pytest.mark.parametrize(("family", "lists"), [("deepseek-v3", False), ("qwen3", True)])
def test_a_template_that_lists_no_tools_is_warned_of(tmp_path, family, lists):
    save_model(tmp_path, family)
    source = {"name": "boxes", "env": {"taskset": {"id": "tool-letters"}}}
    recipe = small_recipe(
        tmp_path, orchestrator={"train": {"source": [source]}}, seq_len=2048, model={"name": str(tmp_path)}
    )
    found = rehearsed(recipe, "a")
    assert not found.problems and lists is not any("doesn't list tools" in each for each in found.warnings)


def test_a_template_that_refuses_a_tools_result_is_refused_where_there_are_tools(tmp_path):
    save_model(tmp_path, "qwen3")
    template = tmp_path / "chat_template.jinja"
    refusal = (
        "{%- for each in messages %}{% if each.role == 'tool' %}{{ raise_exception('no role tool') }}{% endif %}"
        "{% endfor %}"
    )
    template.write_text(refusal + template.read_text())
    for taskset, problems in (("tool-letters", 1), ("reverse-letters", 0)):
        source = {"name": taskset, "env": {"taskset": {"id": taskset}}}
        model = {"name": str(tmp_path)}
        recipe = small_recipe(tmp_path, orchestrator={"train": {"source": [source]}}, seq_len=2048, model=model)
        found = rehearsed(recipe, "a").problems
        assert len(found) == problems, found
        said = "this model's chat template refuses a call with its result (no role tool)"
        assert all(said in each for each in found)


UNADMITTED = outer(owner="ed25519:" + "A" * 42 + "E=")
CHECKING = """
import sys
from pathlib import Path
from composer_prime.config import load_recipe
from composer_prime.errors import BadInput, Problems
from composer_prime.sites.preflight import Found, check
recipe = load_recipe(Path(sys.argv[1]))
try:
    check(recipe, recipe.site_names, rehearse=lambda recipe, site: Found([], [], []))
except BadInput as error:
    print(error)
assert not {"torch", "transformers", "verifiers"} & {*sys.modules}
"""


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"model": {"name": "./nowhere"}}, "model.name (./nowhere) doesn't exist"),
        ({"outer": UNADMITTED}, "this run admits keys, and site a has none: set site.key_file"),
        ({"outer": outer(store="HERE/file")}, "Not a directory: choose another folder"),
        ({"output_dir": "HERE/file"}, "Not a directory: choose another folder"),
        ({"inference": {"server": {"port": 65535}}}, "inference.server.port (65536) is in use"),
    ],
)
def test_what_needs_no_import_is_one_line_without_one(tmp_path, tables, said):
    (tmp_path / "file").touch()
    path = Path(written(tmp_path, **tables))
    path.write_text(path.read_text().replace("HERE", str(tmp_path)))
    done = subprocess.run([sys.executable, "-c", CHECKING, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout and done.stdout.count("\n") == 1, done.stdout


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "your quota"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EROFS, "write access"),
    ],
)
def test_a_quota_and_a_limit_are_told_from_a_full_disk(tmp_path, monkeypatch, number, remedy):
    def refused(**where: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(BadInput, match=f"^output_dir .*: {os.strerror(number)}.*: .*{remedy}"):
        check(small_recipe(tmp_path), "ab", rehearse=lambda recipe, site: Found([], [], []))


@pytest.mark.parametrize("monitor", ["wandb", "trackio"])
def test_a_monitor_without_its_package_is_refused_before_anything_starts(tmp_path, cli, monkeypatch, monitor):
    found, absent = importlib.metadata.distributions, {"name": monitor}
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **by: [] if by == absent else found(**by))
    said = f"monitors.{monitor} needs {monitor}, which isn't installed: {INSTALL.format(monitor)}"
    with pytest.raises(BadInput) as refused:
        recipe = small_recipe(tmp_path / "out", monitors={monitor: {}})
        check(recipe, "ab", rehearse=lambda recipe, site: Found([], [], []))
    assert str(refused.value) == said
    recipe = written(tmp_path, monitors={monitor: {}}, outer=outer(store=str(tmp_path / "store")))
    assert lines_of(cli("launch", recipe, "--on", "local")) == [said]
    assert not (tmp_path / "out").exists() and not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["tiny", "small-tools"])
def test_a_model_whose_maker_is_not_installed_is_one_line_before_anything_starts(tmp_path, cli, monkeypatch, name):
    """Said by what needs no import, and again by the rehearsal."""
    recipe = written(tmp_path, model={"name": name}, outer=outer(store=str(tmp_path / "store")))
    hide_makers(tmp_path / "hiding", monkeypatch)
    for command in (["run", recipe], ["site", recipe, "--site", "a"], ["launch", recipe, "--on", "local"]):
        assert lines_of(cli(*command)) == [said_of(name)]
    assert not (tmp_path / "out").exists() and not (tmp_path / "store").exists()
    done = subprocess.run([sys.executable, "-c", CHECKING, recipe], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{said_of(name)}\n", "")


def test_another_model_needs_no_maker(tmp_path, monkeypatch):
    model = save_random_tiny(tmp_path / "model")
    hide_makers(tmp_path / "hiding", monkeypatch)
    _, said = check(small_recipe(tmp_path / "out", model={"name": str(model)}), "ab")
    assert "first prompts and rewards in" in said


@pytest.mark.parametrize(
    "command", ["export RUN --to new --model tiny", "follow RUN --model tiny --dir new", "verify RUN", "status RUN"]
)
def test_a_store_without_a_run_is_told_before_torch_is_loaded(tmp_path, command):
    program = (
        "import sys; from composer_prime.cli.main import main; code = 0\n"
        "try: main()\n"
        "except SystemExit as ended: code = ended.code\n"
        "assert 'torch' not in sys.modules; sys.exit(code)\n"
    )
    arguments = command.replace("RUN", str(tmp_path / "none")).split()
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "holds no run" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_what_is_right_is_checked_and_leaves_nothing(tmp_path):
    _, said = check(small_recipe(tmp_path, outer=outer(store=str(tmp_path / "store"))), "ab")
    assert "verifiers imported in" in said and "first prompts and rewards in" in said
    assert list(tmp_path.iterdir()) == []


def test_a_site_tries_the_bucket_below_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created, create = [], FileStore.create

    def noted(store: FileStore, key: str, data: bytes) -> bool:
        created.append(key.rpartition("/")[0])
        return create(store, key, data)

    monkeypatch.setattr(FileStore, "create", noted)
    run = recipe(outer={"inner_steps": 4, "fragments": 2, "store": str(tmp_path)})
    check_bucket(run, "alice", new_run=False)
    assert created == ["probe/alice"] * 2
