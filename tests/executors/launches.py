"""Launches of tests: a small recipe, a plan for it, and a fleet on a scripted platform over a store in memory."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from composer_prime.config import RecipeBase, recipe_from_data
from composer_prime.executors.base import Job
from composer_prime.launch.budget import Limits
from composer_prime.launch.fleet import Fleet, begin_fleet
from composer_prime.launch.plan import LaunchPlan, plan_launch
from composer_prime.launch.records import Attempt, JobRecord, LaunchBook, begin_launch, open_launch
from composer_prime.launch.supervisor import Supervisor
from composer_prime.store.base import Store
from composer_prime.store.obstore import MemoryStore
from tests.executors.scripted import ScriptedPlatform

SECRET = "very-secret-value-0123456789"
ENVIRONMENT = {"HF_TOKEN": SECRET, "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "UNRELATED": "x"}


def small_recipe(**tables: Any) -> RecipeBase:
    """A recipe of embedded sites whose bucket is s3://bucket/runs, with further tables."""
    source = {"name": "x", "env": {"taskset": {"id": "reverse-letters"}}}
    data = {
        "run": {"name": "small"},
        "max_steps": 16,
        "model": {"name": "tiny"},
        "orchestrator": {"train": {"source": [source]}},
        "outer": {"store": "s3://bucket/runs"},
        "sites": {"count": 2},
    }
    return recipe_from_data({**data, **tables})


def small_plan(on: str = "local", *, launch: dict[str, Any] | None = None, **options: Any) -> LaunchPlan:
    """Of the small recipe with that `[launch]` table."""
    return plan_launch(small_recipe(launch=launch or {}), on, environment=ENVIRONMENT, **options)


def attempt_at(created_at: float, site: str = "a", number: int = 1, **fields: Any) -> Attempt:
    """An attempt that was recorded then, with a job; further fields are its record's."""
    record = JobRecord(
        **{
            "on": "local",
            "spec": "0" * 64,
            "timeout_s": 3600,
            "usd_per_hour": 1.0,
            "secrets": (),
            "account": "here",
            "created_at": created_at,
            **fields,
        }
    )
    return Attempt(site, number, record, Job("local", f"{site}/{number}", "small", site, number))


def empty_bucket() -> MemoryStore:
    """A bucket for launches of the small recipe: the run's folder in it."""
    return MemoryStore(secrets.token_hex(8), "small")


@dataclass
class Scene:
    """One launch with its supervisor, on a platform that a test scripts."""

    limits: Limits = field(default_factory=lambda: Limits(max_restarts=2))
    store: Store = field(default_factory=empty_bucket)
    platform: ScriptedPlatform = field(default_factory=ScriptedPlatform)
    plan: LaunchPlan = field(default_factory=small_plan)
    said: list[str] = field(default_factory=list)
    ticks: float = 0.0
    later_s: float = 0.0
    """Seconds by which fleets' clocks are ahead."""

    def book(self) -> LaunchBook:
        return begin_launch(self.store, self.plan.recipe.run.name)

    def fleet(self) -> Fleet:
        """A client on a machine that knows nothing but the bucket and the platform."""
        return self._fleet(self.book())

    def stopped_fleet(self) -> Fleet:
        """The same, of the newest launch, stopped or not."""
        return self._fleet(open_launch(self.store))

    def begin(self) -> Fleet:
        """What `launch` opens."""
        return begin_fleet(self.store, self.plan.recipe.run.name, opener=lambda on: self.platform)

    def _fleet(self, book: LaunchBook) -> Fleet:
        return Fleet(book, opener=lambda on: self.platform, clock=lambda: time.time() + self.later_s)

    def supervisor(self, fleet: Fleet | None = None) -> Supervisor:
        return Supervisor(fleet or self.fleet(), self.plan, self.limits, say=self.said.append, ticks=lambda: self.ticks)

    def job_id(self, site: str, attempt: int) -> str:
        return f"{self.book().name}--{site}--{attempt}"


def meant(scene: Scene) -> Fleet:
    """The launch whose launcher was killed between its records and its jobs."""
    fleet = scene.fleet()
    for site, on in scene.plan.places.items():
        spec = fleet.spec(scene.plan, site, 1)
        fleet.intend(on, spec, fleet.price(scene.plan, spec), 600)
    return fleet


def running(scene: Scene) -> list[str]:
    """Site and attempt of the jobs that run on the platform, whatever the records say."""
    found = [(spec.site, spec.attempt) for spec, status in scene.platform.jobs.values() if not status.state.final]
    return [f"{site}{attempt}" for site, attempt in sorted(found)]
