"""What stands in wandb and in Trackio of a site whose roles are stand-ins, and what their failure does to it."""

import json
import logging
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config.settings import SiteSettings, settle_site
from composer_prime.metrics import ROLLOUT_PER_S, TRAIN_TOKENS, MetricsTape, read_tape
from composer_prime.sites.embedded.ports import claim_port
from composer_prime.sites.embedded.supervisor import ROLES, SiteState, SiteSupervisor
from tests.patience import wait_until
from tests.planted_secrets import BY_FORM
from tests.sites.fake_site import fake_roles, small_recipe
from tests.wandb_files import history, records

NAMED = "correct horse battery"
"""A secret that only its variable's name tells."""
PLANTED = (NAMED, BY_FORM["openai"], BY_FORM["github"])


def settle(folder: Path, *, resume: bool = False, **monitors: Any) -> SiteSettings:
    taskset = {"id": "reverse-letters", "note": f"{PLANTED[0]} {PLANTED[1]}"}
    source = {"name": "letters", "env": {"taskset": taskset}}
    recipe = small_recipe(folder, orchestrator={"train": {"source": [source]}}, monitors=monitors)
    port = claim_port(None, set())
    return settle_site(recipe, "a", inference_port=port, model_dir=folder / "model", resume=resume)


def follow(settings: SiteSettings, until: Callable[[], object], *, trainer: str) -> None:
    """Run a site until something holds; its last step comes as it is ended."""
    supervisor = SiteSupervisor(settings, command=fake_roles(trainer=trainer))
    supervisor.start()
    wait_until(lambda: (supervisor.poll(), until())[1], "it never came to be")
    assert supervisor.state is SiteState.RUNNING
    last = len(trained(settings))
    for role, name in (("orchestrator", ROLLOUT_PER_S), ("trainer", TRAIN_TOKENS)):
        with MetricsTape(settings.paths.tape(role)) as tape:
            tape.log(last, **{name: 7})
    supervisor.stop()


def logged(settings: SiteSettings, num_steps: int) -> bool:
    """Whether all monitors have logged so many steps."""
    files = [settings.paths.tape(name).with_suffix(".json") for name in settings.recipe.monitors.model_fields_set]
    return all(file.exists() and json.loads(file.read_text())[1] == num_steps for file in files)


def trained(settings: SiteSettings) -> list[dict[str, float]]:
    """By step what the site's files say of it; of a step that was trained twice, what they said first."""
    played, learned = (
        {int(record.pop("step")): record for record in reversed(read_tape(settings.paths.tape(role)))}
        for role in ("orchestrator", "trainer")
    )
    whole = [played[step] | learned[step] for step in sorted(learned)]
    return [{name: values[name] for name in values if name != "time"} for values in whole]


@dataclass(frozen=True)
class Monitored:
    settings: SiteSettings
    trackio: Path

    def in_trackio(self, query: str) -> list[Any]:
        (file,) = self.trackio.glob("*.db")
        return sqlite3.connect(file).execute(query).fetchall()


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    """A site that took 4 steps, began again at the first and came to 6; in Trackio an older run has its name."""
    folder = tmp_path_factory.mktemp("monitored")
    tables = {"wandb": {"project": "p", "tags": ["t", PLANTED[2]], "offline": True}, "trackio": {"project": "p"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.setenv("SHOP_PASSWORD", NAMED)
        patch.delenv("WANDB_MODE", raising=False)
        older = settle(folder / "older", trackio=tables["trackio"])
        follow(older, lambda: logged(older, 1), trainer="steps=1")
        first = settle(folder / "out", **tables)
        follow(first, lambda: logged(first, 3), trainer="steps=3")
        settings = settle(folder / "out", resume=True, **tables)
        follow(settings, lambda: logged(settings, 5), trainer="steps=5")
    yield Monitored(settings, folder / "trackio")


def test_each_trained_step_is_in_wandb_once_over_a_resume(monitored: Monitored) -> None:
    rows = history(monitored.settings.paths.root)
    assert [row["_step"] for row in rows] == list(range(6))
    assert [{name: row[name] for name in row if not name.startswith("_")} for row in rows] == trained(
        monitored.settings
    )


def test_each_trained_step_is_in_trackio_once_over_a_resume(monitored: Monitored) -> None:
    rows = monitored.in_trackio("SELECT step, metrics, run_id, run_name FROM metrics ORDER BY id")
    assert [row[0] for row in rows] == [0, 1, *range(6)]
    assert [json.loads(row[1]) for row in rows[2:]] == trained(monitored.settings)
    assert [len({row[2] for row in part}) for part in (rows[:2], rows[2:], rows)] == [1, 1, 2]


def test_a_sites_run_is_called_after_run_and_site_in_the_runs_group(monitored: Monitored) -> None:
    runs = [
        record.run for record in records(monitored.settings.paths.root) if record.WhichOneof("record_type") == "run"
    ]
    assert {(run.project, run.display_name, run.run_group, run.tags[0]) for run in runs} == {
        ("p", "fake-a", "fake", "t")
    }
    assert len({run.run_id for run in runs}) == 1
    assert {name for (name,) in monitored.in_trackio("SELECT run_name FROM metrics")} == {"fake-a"}
    configs = [json.loads(config) for (config,) in monitored.in_trackio("SELECT config FROM configs")]
    assert {config["_Group"] for config in configs} == {"fake"}


def test_no_secret_of_the_recipe_is_in_either(monitored: Monitored) -> None:
    folders = (monitored.settings.paths.root / "wandb", monitored.trackio)
    files = [file.read_bytes() for folder in folders for file in folder.rglob("*") if file.is_file()]
    assert any(b"reverse-letters" in data for data in files)
    assert not [secret for secret in PLANTED for data in files if secret.encode() in data]


def test_a_monitor_that_fails_is_said_in_a_line_and_the_site_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setenv("WANDB_MODE", "online")
    for name in ("WANDB_API_KEY", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    settings = settle(tmp_path / "out", wandb={}, trackio={})
    follow(
        settings,
        lambda: "in wandb" in caplog.text and settings.paths.tape("trackio").with_suffix(".json").exists(),
        trainer="steps=2",
    )
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2, said
    assert said[0].startswith("site a isn't logged in wandb: UsageError: No API key configured.")
    assert said[1].startswith("site a isn't logged in trackio: ") and "Not a directory" in said[1]


def test_without_monitors_there_is_no_process_for_them(tmp_path: Path) -> None:
    supervisor = SiteSupervisor(settle(tmp_path), command=fake_roles())
    supervisor.start()
    assert set(supervisor.children) == set(ROLES) and not supervisor.monitors
    supervisor.stop()
