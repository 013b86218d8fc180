"""What the hook says when it can't be installed: one line, the exit code of a person's mistake, nothing touched."""

import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from composer_prime.errors import ConfigError, StoreUnusable
from composer_prime.sites.prime_rl import membership, outer, settings, versions
from composer_prime.sites.prime_rl.outer import steps
from composer_prime.store import keys, open_store
from composer_prime.store.file import FileStore
from composer_prime.sync.founding import FoundingRecord, announce
from composer_prime.sync.metered import MeteredStore
from tests.sites.prime_rl.standin_runs import STANDIN, site
from tests.store.meeting import Meeting
from tests.sync.harness import HandSite, make_net, make_terms

OUTER = {"COMPOSER_PRIME_OUTER": "/nowhere", "COMPOSER_PRIME_SITE": "a"}
SHAPES = [("blocks.0.w", (1,)), ("blocks.1.w", (1,))]

TRAINER = """
def train(config):
    setup_rl_loss_fn()
    progress = None
"""
LOSSES = """
def setup_rl_loss_fn():
    install()
"""


@dataclass
class Inputs:
    trainer_logprobs: Any
    inference_logprobs: Any
    ref_logprobs: Any
    advantages: Any
    loss_mask: Any
    loss_weights: Any = None


@dataclass
class Outputs:
    loss: Any
    metrics: Any


class FakeManager:
    """Has what the hook wraps."""

    def get_ckpt_path(self, step: int) -> Path:
        return Path(f"step_{step}")

    def save(self, step: int) -> None: ...
    def load(self, step: int) -> None: ...


class FakeLoader:
    """Has what the hook wraps."""

    def __init__(self, dp_world_size: int) -> None: ...
    def get_batch(self) -> list[Any]:
        return []


async def log(data: dict[str, float], step: int) -> None: ...


def names() -> dict[str, Any]:
    """The globals of a trainer's module."""
    return {
        "setup_optimizer": lambda named_params: None,
        "setup_scheduler": lambda optimizer: None,
        "DataLoader": FakeLoader,
        "FakeDataLoader": FakeLoader,
    }


def upstream_modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "prime_rl"}


@pytest.fixture(autouse=True)
def _without_upstream() -> Iterator[None]:
    """No module of PRIME-RL is here from tests before, and none is left."""
    before = upstream_modules()
    for name in before:
        del sys.modules[name]
    yield
    for name in upstream_modules():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`trainer(environ, **config)` imports the loss inside a trainer of a known version; returns its globals."""
    monkeypatch.syspath_prepend(str(STANDIN))
    modules = {
        "prime_rl.trainer.ckpt": {"CheckpointManager": FakeManager},
        "prime_rl.trainer.rl.loss": {"LossInputs": Inputs, "LossOutputs": Outputs},
        "prime_rl.monitors": {"log": log},
    }
    for name, held in modules.items():
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "prime_rl", raising=False)

    def run(environ: dict[str, str], given: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        given = names() if given is None else given
        losses = vars(sys.modules["prime_rl.trainer.rl.loss"])
        losses["install"] = lambda: outer.install(environ)
        exec(LOSSES, losses)
        given["setup_rl_loss_fn"] = losses["setup_rl_loss_fn"]
        exec(TRAINER, given)
        config = {"output_dir": Path("outputs/run-1"), "model": SimpleNamespace(full_offload=None)}
        config |= {"loss": SimpleNamespace(), "max_steps": 4, "dist_timeout_seconds": 240}
        given["train"](SimpleNamespace(**config | changes))
        return given

    return run


def line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that was printed."""
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and printed.startswith("composer-prime: "), printed
    return printed


def test_every_name_is_wrapped_where_a_run_is_configured_and_none_where_not(trainer: Any) -> None:
    kept, save = names(), FakeManager.save
    untouched = trainer({}, dict(kept))
    assert {name: untouched[name] for name in kept} == kept and FakeManager.save is save
    wrapped = trainer(OUTER, dict(kept))
    try:
        assert [name for name in kept if wrapped[name] is kept[name]] == []
        assert FakeManager.save is not save
    finally:
        FakeManager.save = save


def test_a_site_or_key_without_a_store_is_refused() -> None:
    for name in (settings.SITE, settings.KEY, settings.SAME_NAME, settings.MBIT_UP, settings.MBIT_DOWN):
        with pytest.raises(ConfigError, match=f"{name} is set .x. and COMPOSER_PRIME_OUTER isn't"):
            outer.install({name: "x"})


def test_whether_a_name_may_be_taken_over_is_read_or_refused() -> None:
    found = [
        settings.HookSettings.read(OUTER | {"COMPOSER_PRIME_SAME_NAME": word}) for word in ("", "replace", "refuse")
    ]
    assert [each.replace for each in found if each is not None] == [True, True, False]
    with pytest.raises(ConfigError, match=r'SAME_NAME \(no\) must be "replace" or "refuse"'):
        settings.HookSettings.read(OUTER | {"COMPOSER_PRIME_SAME_NAME": "no"})


def test_limits_of_the_link_are_read_or_refused() -> None:
    found = settings.HookSettings.read(OUTER | {settings.MBIT_UP: "2.5", settings.MBIT_DOWN: ""})
    assert found is not None and (found.mbit_up, found.mbit_down) == (2.5, None)
    for wrong in ("0", "-1", "fast", "nan", "inf"):
        with pytest.raises(ConfigError, match=rf"MAX_MBIT_DOWN \({wrong}\) must be a number above 0, in Mbit/s"):
            settings.HookSettings.read(OUTER | {settings.MBIT_DOWN: wrong})


@pytest.mark.parametrize(("limits", "kind"), [((1.5, None), MeteredStore), ((None, None), FileStore)])
def test_limits_of_the_link_hold_for_the_trainers_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[float | None, float | None], kind: type
) -> None:
    uri = str(tmp_path / "bucket")
    HandSite(open_store(uri), make_terms(), "a", [0.0])
    monkeypatch.setattr(membership.dist, "get_rank", lambda: 0)
    told = settings.HookSettings(uri, "b", None, True, *limits)
    leading = membership._Leading(told, tmp_path / "b", None, SHAPES)
    leading.open()
    assert type(leading._store) is kind


def test_an_announced_run_is_not_founded_where_two_of_racing_writers_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership.dist, "get_rank", lambda: 0)
    bucket = Meeting(secrets.token_hex(8), num_meeting=2)
    monkeypatch.setattr(membership, "open_store", lambda uri, key_file: bucket)
    announce(bucket, FoundingRecord(run="run", terms=make_terms()))
    told = settings.HookSettings(bucket.uri, "a", None)
    outer = membership._Leading(told, tmp_path / "a", None, SHAPES).open()
    with pytest.raises(StoreUnusable, match=r"of 20 races of 16 writers, .*had [23] winners"):
        outer.join(make_net().named_parameters())
    assert bucket.list("") == [keys.founding()]


def test_in_a_trainer_that_makes_its_loss_elsewhere_a_run_is_refused_in_one_line_and_none_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "is_loaded", lambda: True)
    with pytest.raises(SystemExit) as ended:
        outer.loss(object(), outer="/nowhere", site="a")  # type: ignore[arg-type]
    assert ended.value.code == 2 and "no PRIME-RL's trainer makes its loss here" in line(capsys)
    caplog.set_level("INFO", "composer_prime")
    outer.install({})
    assert "no_outer_run: this trainer trains alone" in caplog.text


OFFLOADED = {"model": SimpleNamespace(full_offload=True)}


@pytest.mark.parametrize(
    ("environ", "changes", "lacks", "said"),
    [
        ({"COMPOSER_PRIME_SITE": "x"}, {}, "", ["COMPOSER_PRIME_SITE is set (x)"]),
        (OUTER | {"COMPOSER_PRIME_SITE": "Run 1"}, {}, "", ["COMPOSER_PRIME_SITE", "'Run 1'"]),
        ({settings.OUTER: "/nowhere"}, {}, "", ["COMPOSER_PRIME_SITE, or trainer.loss.kwargs.site, must be set"]),
        (OUTER, {"max_concurrent_runs": 3}, "", ["max_concurrent_runs (3) must be 1"]),
        (OUTER, OFFLOADED, "", ["full_offload must be off", "optim_cpu_offload"]),
        (OUTER, {}, "DataLoader", ["lacks DataLoader(dp_world_size), DataLoader.get_batch", versions.TESTED]),
        (OUTER, {}, "LossOutputs", ["lacks LossOutputs(loss, metrics)"]),
    ],
    ids=["no store", "a site's name", "no site's name", "several runs", "full offload", "a name", "a loss's outputs"],
)
def test_what_a_trainer_can_t_do_is_refused_in_one_line_and_nothing_is_wrapped(
    environ: dict[str, str], changes: dict[str, Any], lacks: str, said: list[str], trainer: Any, capsys, monkeypatch
) -> None:
    given = names()
    given.pop(lacks, None)
    if lacks == "LossOutputs":
        monkeypatch.delattr(sys.modules["prime_rl.trainer.rl.loss"], lacks)
    with pytest.raises(SystemExit) as ended:
        trainer(environ, given, **changes)
    printed = line(capsys)
    assert ended.value.code == 2 and all(words in printed for words in said)
    assert given["setup_optimizer"].__name__ == "<lambda>"


def test_a_trainer_without_fake_data_is_wrapped(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeManager, "save", FakeManager.save)
    monkeypatch.setattr(FakeManager, "load", FakeManager.load)
    given = names()
    del given["FakeDataLoader"]
    assert trainer(OUTER, given)["DataLoader"] is not FakeLoader and "FakeDataLoader" not in given


@pytest.mark.parametrize("needed", [False, True])
def test_a_loss_may_return_more_but_need_not(
    needed: bool, trainer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeManager, "save", FakeManager.save)
    monkeypatch.setattr(FakeManager, "load", FakeManager.load)
    more = ("entropy", Any, field() if needed else field(default=None))
    record = make_dataclass("LossOutputs", [("loss", Any), ("metrics", Any), more])
    monkeypatch.setattr(sys.modules["prime_rl.trainer.rl.loss"], "LossOutputs", record)
    if not needed:
        trainer(OUTER)
        return
    with pytest.raises(SystemExit):
        trainer(OUTER)
    assert "lacks LossOutputs(loss, metrics)" in line(capsys)


def test_without_prime_rl_the_versions_to_install_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"isn't installed.*v0\.8\.0 and commit"):
        versions.detect()


def test_tokens_are_counted_where_any_part_of_the_loss_looks() -> None:
    mask = torch.tensor([[True, False, False, True]])
    batch = {"loss_mask": mask, "ce_weights": torch.tensor([[0.0, 0.5, 0.0, 1.0]]), "ref_kl_weights": None}
    assert steps.trained_tokens(batch).tolist() == [[True, True, False, True]]
    assert steps.trained_tokens({"loss_mask": mask}).tolist() == mask.tolist()
    pruned = batch | {"rl_weights": torch.tensor([[0.0, 1.0, 1.0, 0.0]])}  # of no advantage, as upstream marks them
    assert steps.trained_tokens(pruned).tolist() == [[False, True, False, True]]


@pytest.mark.slow
def test_a_store_without_a_run_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    code, output = site(tmp_path, "a", str(tmp_path / "bucket")).start().wait()
    assert code == 2 and "holds no run" in output and "composer-prime create RECIPE" in output
    assert "Traceback" not in output and not (tmp_path / "a" / "broadcasts").exists()


@pytest.mark.slow
def test_a_run_that_admits_keys_is_not_joined_without_one(tmp_path: Path) -> None:
    from composer_prime.sync.signatures import SigningKey

    store = open_store(str(tmp_path / "bucket"))
    key = SigningKey.generate()
    announce(store, FoundingRecord(run="run", terms=make_terms(), keys={"a": key.public}))
    store.close()
    keyless = site(tmp_path, "a", str(tmp_path / "bucket"), num_ranks=2).start()
    code, output = keyless.wait()
    assert code == 2 and "set COMPOSER_PRIME_KEY" in output and "Traceback" not in output
    key.save(tmp_path / "key.pem")
    keyed = site(tmp_path, "a", str(tmp_path / "bucket"), max_steps=12)
    keyed.env["COMPOSER_PRIME_KEY"] = str(tmp_path / "key.pem")
    assert "joined" in keyed.start().finish()
