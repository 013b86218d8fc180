"""A run with an owner and one site, in a folder, and invitations to it: what tests of volunteers start from."""

import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer_prime.config import Recipe
from composer_prime.config.toml import to_toml
from composer_prime.store import open_store
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding
from composer_prime.sync.terms import terms_of
from composer_prime.volunteers.consent import Wishes
from composer_prime.volunteers.doctor import Gpu, Machine, Torch
from composer_prime.volunteers.host import Invitee, invite
from composer_prime.volunteers.invitation import Invitation, read_invitation
from tests.config.recipes import recipe
from tests.sync.harness import HandSite

OWNER = SigningKey.from_bytes(bytes(range(32)))
FIRST = SigningKey.from_bytes(b"a" * 32)
HOUR_S = 3600
CONSENT = ("--allow-env", "reverse-letters", "--allow-local")
"""What a volunteer says who knows the run: its environment, and that its bucket is a folder here."""
GIB = 2**30


def run_recipe(**outer: Any) -> Recipe:
    """The recipe of the run."""
    values = {"inner_steps": 4, "fragments": 2, "sync_delay": 0, "codec": "fp32", "liveness_s": 0.4, **outer}
    return recipe(run={"name": "run"}, outer=values)


class OwnedRun:
    """A run at `uri` that OWNER owns and site a has founded."""

    def __init__(self, folder: Path, owner: SigningKey | None = OWNER, uri: str | None = None, **outer: Any) -> None:
        self.folder = folder
        self.uri = uri or str(folder / "bucket" / "run")
        founding = Founding(owner.public, {"a": FIRST.public}) if owner else Founding()
        self.recipe = run_recipe(owner=founding.owner, **outer)
        self.store = open_store(self.uri)
        terms, key = terms_of(self.recipe), FIRST if owner else None
        self.site = HandSite(self.store, terms, "a", [0.0], key=key, founding=founding)

    def invite(self, site: str = "alice", **changes: Any) -> Invitation:
        """A member's invitation that holds for an hour; its file is SITE.invitation in the folder."""
        invitee = replace(Invitee(site, int(time.time()) + HOUR_S, guest=False), **changes)
        return invite(self.store, OWNER, invitee, self.recipe, self.file(site))

    def file(self, site: str = "alice") -> Path:
        return self.folder / f"{site}.invitation"


def come(run: OwnedRun, site: str = "alice") -> HandSite:
    """The invited site, whose invitation lies in the folder, in its run."""
    key = read_invitation(str(run.file(site))).key()
    return HandSite(run.store, terms_of(run.recipe), site, run.site.runtime.clock, key=key)


def machine(**changes: Any) -> Machine:
    """A machine that can do anything a tiny run needs; name what a test cares about."""
    found = Machine(
        python="3.11.9",
        cores=8,
        free_memory_bytes=16 * GIB,
        torch=Torch("2.13.0", "vector", (Gpu("card", 24 * GIB),)),
    )
    return replace(found, **changes)


def consenting(run: OwnedRun, **changes: Any) -> Wishes:
    """The wishes of a volunteer who knows the run: its environment, and that its bucket is a folder here."""
    given = {"folder": run.folder / "alice", "allow_envs": ("reverse-letters",), "allow_local": True}
    return Wishes(**{**given, **changes})


def signed(run: OwnedRun, invitation: Invitation, **changes: Any) -> Invitation:
    """The invitation with other fields, as the run's owner signs it: a hostile owner writes what they like."""
    changed = invitation.model_copy(update={**changes, "signature": None})
    return changed.model_copy(update={"signature": OWNER.sign(changed.message(run.site.run.sha256))})


def with_recipe(run: OwnedRun, invitation: Invitation, settings: dict[str, Any]) -> Invitation:
    """The invitation with other settings in its recipe, by their dotted names, signed by the run's owner."""
    data = tomllib.loads(invitation.recipe)
    for name, value in settings.items():
        *tables, last = name.split(".")
        table: Any = data
        for part in tables:
            table = table[int(part)] if isinstance(table, list) else table.setdefault(part, {})
        table[last] = value
    return signed(run, invitation, recipe=to_toml(data))
