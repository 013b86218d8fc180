"""What the owner of a run may do from anywhere: reopen it, admit and revoke sites, hand the commits to another site."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from composer_prime.cli.store_arg import AllowOption, StoreArgument
from composer_prime.errors import BadInput
from composer_prime.visible import say

if TYPE_CHECKING:
    from composer_prime.sync.owner import Owner

KeyOption = Annotated[
    Path | None, typer.Option("--key", help="The owner's private key file; needed in a run that has an owner.")
]
SiteOption = Annotated[str, typer.Option("--site", help="The site's name.", show_default=False)]


@contextmanager
def _owner(store: str, key: Path | None) -> Iterator["Owner"]:
    """The owner's hand on the run at `store`, which is closed again at the end."""
    from composer_prime.store import open_store
    from composer_prime.sync.owner import Owner
    from composer_prime.sync.signatures import SigningKey

    signing = None if key is None else SigningKey.load(key)
    opened = open_store(store)
    try:
        yield Owner(opened, signing)
    finally:
        opened.close()


def reopen(
    store: StoreArgument,
    rounds: Annotated[int, typer.Option(min=1, help="Training rounds after which the run ends, all counted.")],
    key: KeyOption = None,
) -> None:
    """Let a run that is closed go on to more rounds. Start its sites again afterwards."""
    with _owner(store, key) as owner:
        record = owner.reopen(rounds)
    say(f"reopened for the {_ordinal(record.number)} time: the run goes on to {rounds} rounds, start its sites")


def delete(
    store: StoreArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
) -> None:
    """Delete a run that is over, or of which no site is left: all its objects, once you have said yes."""
    from contextlib import closing

    from composer_prime.store import keys, open_store
    from composer_prime.sync.deleting import delete_run, refuse_live
    from composer_prime.watch.status import look
    from composer_prime.watch.tables import run_lines

    with closing(open_store(store)) as opened:
        objects = opened.list("")
        is_cut_short = keys.manifest() not in objects and any(map(keys.is_claim, objects))
        for line in [] if is_cut_short else run_lines(look(opened)):
            say(line)
        say(f"{len(objects):,} objects in {opened.uri}")
        beats = refuse_live(opened)
        if not yes:
            typer.confirm("Delete them all, for ever?", abort=True)
        delete_run(opened, beats)
    say("deleted")


def admit(
    store: StoreArgument,
    site: SiteOption,
    public: Annotated[
        str, typer.Option("--public", help="The line `composer-prime keygen` printed for it.", show_default=False)
    ],
    guest: Annotated[
        bool, typer.Option("--guest", help="It may offer, and never commit, merge a part or close the run.")
    ] = False,
    allow: AllowOption = None,
    key: KeyOption = None,
) -> None:
    """Let a site take part in a run that admits keys, from now on."""
    with _owner(store, key) as owner:
        owner.check_open(allow or (), guest=guest)
        record = owner.admit(site, public, guest=guest)
    role = "take part as a guest" if guest else "take part"
    say(f"admission {record.number}: site {site} may {role}; admitted now: {_names(record.keys)}")


def revoke(
    store: StoreArgument,
    site: Annotated[str | None, typer.Option("--site", help="The site's name.", show_default=False)] = None,
    expired: Annotated[
        bool, typer.Option("--expired", help="Every site whose invitation expired before it ever came.")
    ] = False,
    key: KeyOption = None,
) -> None:
    """Take a site's key out of a run: from now on nothing it signs counts. What was merged of it stays."""
    if (site is None) == (not expired):
        raise BadInput("revoke needs --site NAME or --expired, and not both: say whose key is taken out")
    sites = [site] if site is not None else _expired(store)
    for name in sites:
        with _owner(store, key) as owner:
            record = owner.revoke(name)
        say(f"admission {record.number}: site {name} is revoked; admitted now: {_names(record.keys)}")
    if not sites:
        say("no invitation expired unused: nobody is revoked")


def _expired(store: str) -> list[str]:
    import time
    from contextlib import closing

    from composer_prime.store import open_store
    from composer_prime.volunteers.host import expired_unused

    with closing(open_store(store)) as opened:
        return expired_unused(opened, time.time())


def committer(
    store: StoreArgument,
    to: Annotated[str, typer.Option("--to", help="The site that shall create commits.", show_default=False)],
    key: KeyOption = None,
) -> None:
    """Hand the commits of a run with one fixed committer to another site. Stop the old one first."""
    with _owner(store, key) as owner:
        record = owner.hand_over(to)
    say(f"admission {record.number}: site {to} alone creates commits from now on")


def _names(admitted: dict[str, str]) -> str:
    return ", ".join(sorted(admitted)) or "none"


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
