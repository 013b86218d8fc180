"""`composer-prime keygen | admit | revoke | delete | gateway`: a signing key, and what a run's owner may do."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from composer_prime.cli.options import AllowOption, StoreArgument
from composer_prime.errors import BadInput
from composer_prime.visible import say

if TYPE_CHECKING:
    from composer_prime.sync.owner import Owner


def keygen(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A new file for the private key. It stays where it is: no one else needs it."
        ),
    ],
) -> None:
    """Make a signing key, for a site or a run's owner: write the private key to PATH, print the public one."""
    from composer_prime.sync.signatures import SigningKey

    key = SigningKey.generate()
    key.save(path)
    typer.echo(key.public)
    typer.echo(
        f'A site\'s key is named in its recipe under [site]: key_file = "{path}". It admits who creates a run\n'
        "The owner of a run that is there admits or invites others: "
        f"composer-prime admit STORE --site a --public {key.public} --key OWNER.KEY\n"
        f"An owner's key stands under [outer] of a new run's recipe: owner = \"{key.public}\"",
        err=True,
    )


KeyOption = Annotated[
    Path | None, typer.Option("--key", help="The owner's private key file; needed in a run that has an owner.")
]
SiteOption = Annotated[str, typer.Option("--site", help="The site's name.")]


@contextmanager
def _owner(store: str, key: Path | None) -> Iterator["Owner"]:
    """The owner's hand on the run at `store`, which is closed again at the end."""
    from composer_prime.store import open_store
    from composer_prime.sync.owner import Owner
    from composer_prime.sync.signatures import SigningKey

    signing = None if key is None else SigningKey.load(key)
    with closing(open_store(store)) as opened:
        yield Owner(opened, signing)


def delete(store: StoreArgument, yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False) -> None:
    """Delete a run that is over, or of which no site is left: all its objects, once you have said yes."""
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
    public: Annotated[str, typer.Option(help="The line `composer-prime keygen` printed for it.")],
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
    site: Annotated[str | None, typer.Option(help="The site's name.")] = None,
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

    from composer_prime.store import open_store
    from composer_prime.volunteers.host import expired_unused

    with closing(open_store(store)) as opened:
        return expired_unused(opened, time.time())


def _names(admitted: dict[str, str]) -> str:
    return ", ".join(sorted(admitted)) or "none"


def gateway(
    store: StoreArgument,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8790,
    rate: Annotated[
        float, typer.Option(min=1, help="Requests a second that one site may make; 4 times as many at once.")
    ] = 50,
    total_rate: Annotated[
        float, typer.Option(min=1, help="Requests a second of all sites together; twice at once.")
    ] = 500,
    max_object_mib: Annotated[int, typer.Option(min=1, max=5120, help="Largest payload that is taken, MiB.")] = 1024,
    behind_tls: Annotated[
        bool, typer.Option("--behind-tls", help="A reverse proxy on another machine speaks TLS.")
    ] = False,
    allow: AllowOption = None,
) -> None:
    """Serve one run to volunteers, who sign their requests and get presigned URLs, until Ctrl-C. Several may run.

    The run must admit keys. Put a reverse proxy (nginx, caddy) with TLS in front. Standard output gets a line of JSON
    about each request.
    """
    from composer_prime.gateway.limits import Rate, Rates
    from composer_prime.gateway.serving import serve

    serve(
        store,
        host,
        port,
        behind_tls=behind_tls,
        rates=Rates(site=Rate(rate, 4 * rate), gateway=Rate(total_rate, 2 * total_rate)),
        max_object_bytes=max_object_mib * 2**20,
        allowed=allow or (),
        say=lambda line: say(line, err=True),
        note=say,
    )
