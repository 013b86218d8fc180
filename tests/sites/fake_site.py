"""Recipes, commands and waiting for tests that supervise the stand-in roles of fake_role.py."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from composer_prime.config import Recipe, SitePaths, SiteSettings, recipe_from_data, settle_site
from composer_prime.sites.embedded.ports import claim_port
from tests.patience import wait_until

FAKE_ROLE = Path(__file__).with_name("fake_role.py")


def small_recipe(output_dir: Path, **changes: Any) -> Recipe:
    """Two sites, two fragments; `changes` replace top-level tables."""
    source = {"name": "letters", "env": {"taskset": {"id": "reverse-letters"}}}
    data: dict[str, Any] = {
        "run": {"name": "fake"},
        "max_steps": 8,
        "output_dir": str(output_dir),
        "orchestrator": {"train": {"source": [source]}},
        "outer": {"inner_steps": 4, "fragments": 2},
        "sites": {"count": 2},
    }
    return recipe_from_data(data | changes)


def settle(tmp_path: Path, site: str = "a") -> SiteSettings:
    """Settings of one fake site, on a free port."""
    port = claim_port(None, set())
    return settle_site(small_recipe(tmp_path), site, inference_port=port, model_dir=tmp_path / "model", resume=False)


def fake_roles(**behaviours: str | dict[str, str]) -> Callable[[str, Path], list[str]]:
    """Commands of the stand-in roles: each behaviour by role, or by role and site's name."""

    def command(role: str, site_dir: Path) -> list[str]:
        behaviour = behaviours.get(role, "")
        chosen = behaviour if isinstance(behaviour, str) else behaviour.get(site_dir.name, "")
        return [sys.executable, str(FAKE_ROLE), role, str(site_dir), *chosen.split()]

    return command


def pid_of(paths: SitePaths, role: str) -> int:
    """The process id that a role wrote down once it was up; waits for it."""
    wait_until((paths.root / "pids" / role).exists, f"{paths.root.name}/{role} is up")
    return int((paths.root / "pids" / role).read_text())


def is_gone(pid: int) -> bool:
    """Whether no such process runs; one that only waits to be reaped is gone."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def all_gone(pids: Sequence[int]) -> bool:
    """Whether none of them runs."""
    return all(is_gone(pid) for pid in pids)
