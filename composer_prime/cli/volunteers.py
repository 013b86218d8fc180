"""`composer-prime invite`, `join`, `doctor` and `contribution`: volunteers, from both sides."""

import json
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from composer_prime.cli.options import AllowOption, StoreArgument, read_recipe
from composer_prime.errors import BadInput
from composer_prime.private import keep_private
from composer_prime.visible import say

InvitationArgument = Annotated[
    str, typer.Argument(metavar="INVITATION", help="Its file, the line itself, or - to read it.")
]
FolderOption = Annotated[
    Path | None, typer.Option("--folder", help="Where all files go; default: ~/composer-prime/RUN.")
]
OwnKeyOption = Annotated[Path | None, typer.Option("--key", help="Your key file, where you made the key yourself.")]
UpOption = Annotated[float | None, typer.Option("--max-mbit-up", min=0.05, help="Mbit/s to send, on average.")]
DownOption = Annotated[float | None, typer.Option("--max-mbit-down", min=0.05, help="Mbit/s to fetch.")]
DiskOption = Annotated[float | None, typer.Option("--max-disk-gib", min=0.1, help="Disk that the site may use.")]

EnvsOption = Annotated[
    list[str] | None, typer.Option("--allow-env", metavar="NAME", help="An environment that may run here.")
]
HarnessesOption = Annotated[
    list[str] | None, typer.Option("--allow-harness", metavar="NAME", help="A harness that may run a model's commands.")
]
TeachersOption = Annotated[
    list[str] | None, typer.Option("--allow-teacher", metavar="URL", help="A teacher that may see prompts and answers.")
]
LocalOption = Annotated[
    bool, typer.Option("--allow-local", help="The bucket or gateway may be on this machine or its network.")
]

OwnAwsOption = Annotated[
    bool, typer.Option("--use-my-aws", help="Sign requests to the bucket with your own AWS (or Google) credentials.")
]


def invite(
    store: StoreArgument,
    name: Annotated[str | None, typer.Option(help="The volunteer's site name.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="The run's recipe; it travels along.")] = None,
    key: Annotated[Path | None, typer.Option(help="The owner's private key file.")] = None,
    expires: Annotated[str, typer.Option(help="Until when it may be used: 12h, 7d, 2w.")] = "7d",
    out: Annotated[Path | None, typer.Option(help="Default: NAME.invitation.")] = None,
    public: Annotated[
        str | None, typer.Option(help="The volunteer's own key, from their `keygen`; default: one is made.")
    ] = None,
    gateway: Annotated[
        str | None, typer.Option(help="gateway+https://host/RUN, where the bucket's keys stay with you.")
    ] = None,
    credentials: Annotated[
        Path | None, typer.Option(help="A file of NAME=VALUE lines: scoped AWS_* keys that travel along.")
    ] = None,
    credentials_env: Annotated[
        str | None, typer.Option(help="Names of variables that travel along, with commas.")
    ] = None,
    guest: Annotated[
        bool,
        typer.Option(
            "--guest/--member",
            help="A guest offers, weighs little, and never closes a round; a member is trusted like a site of yours.",
        ),
    ] = True,
    allow: AllowOption = None,
    list_all: Annotated[bool, typer.Option("--list", help="Show who was invited, and invite nobody.")] = False,
) -> None:
    """Invite a volunteer to a run that you own: admit a key for them, and write the invitation that they join with."""
    if list_all:
        _list(store)
        return
    missing = [f"--{what}" for what, given in (("name", name), ("recipe", recipe), ("key", key)) if given is None]
    if name is None or recipe is None or key is None:
        raise BadInput(f"invite needs {', '.join(missing)}: say who is invited, to what, and sign it")

    from composer_prime.config import load_any
    from composer_prime.store import open_store
    from composer_prime.sync.signatures import SigningKey
    from composer_prime.volunteers.credentials import read_credentials, rights_warnings
    from composer_prime.volunteers.entrance import utc
    from composer_prime.volunteers.host import Invitee, gateway_warning, invite, parse_expiry

    environment = read_credentials(credentials, credentials_env, gateway)
    invitee = Invitee(name, parse_expiry(expires, time.time()), public, guest, gateway, environment)
    path = Path(f"{name}.invitation") if out is None else out
    with closing(open_store(store)) as opened:
        made = invite(opened, SigningKey.load(key), invitee, load_any(recipe), path, allow or ())
    role = ", as a guest: your own sites close the rounds" if made.guest else ""
    say(f"{path}: site {name} may join run {made.run} until {utc(made.expires_at)}{role}")
    for warning in rights_warnings(made):
        say(f"warning: {warning}", err=True)
    if gateway is not None and (warning := gateway_warning(gateway)) is not None:
        say(f"warning: {warning}", err=True)
    held = " and ".join(["a private key"] * bool(made.seed) + ["credentials"] * bool(made.environment))
    if held:
        say(f"It holds {held}: send it by a way that others don't read, and to {name} alone.", err=True)


def _list(store: str) -> None:

    from composer_prime.store import open_store
    from composer_prime.volunteers.entrance import utc
    from composer_prime.volunteers.host import standings

    with closing(open_store(store)) as opened:
        found = standings(opened, time.time())
    for each in found:
        guest = ", guest" if each.guest else ""
        starts = {0: "never came", 1: "started once"}.get(each.starts, f"started {each.starts} times")
        presence = f"{each.presence}; " if each.presence else ""
        say(f"{each.site} ({each.number}): {each.state}, until {utc(each.expires_at)}{guest}; {presence}{starts}")
    if not found:
        say("nobody was invited yet")


def join(
    invitation: InvitationArgument,
    folder: FolderOption = None,
    key: OwnKeyOption = None,
    max_mbit_up: UpOption = None,
    max_mbit_down: DownOption = None,
    max_disk_gib: DiskOption = None,
    hours: Annotated[float | None, typer.Option(min=0.001, help="Leave after so many hours.")] = None,
    nice: Annotated[int, typer.Option(min=0, max=19, help="Step back for other programs.")] = 0,
    allow_env: EnvsOption = None,
    allow_harness: HarnessesOption = None,
    allow_teacher: TeachersOption = None,
    allow_local: LocalOption = False,
    use_my_aws: OwnAwsOption = False,
    pause: Annotated[bool, typer.Option("--pause", help="Ask the site that runs here to step out for now.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Take the pause back.")] = False,
) -> None:
    """Take part in a run: check this machine, fit the recipe to it, and train, until Ctrl-C or the run's end."""
    from composer_prime.volunteers.consent import Wishes
    from composer_prime.volunteers.invitation import read_invitation
    from composer_prime.volunteers.join import folder_of
    from composer_prime.volunteers.join import join as take_part

    keep_private()
    found = read_invitation(invitation, sys.stdin.read() if invitation == "-" else None)
    if pause and resume:
        raise BadInput("--pause and --resume say opposite things: give one of them")
    if pause or resume:
        place = folder_of(found, folder)
        if not place.was_used:
            raise BadInput(
                f"site {found.site} never ran from {place.root}: add the --folder that it joined with to the command"
            )
        place.pause() if pause else place.go_on()
        moment = ": in some seconds nothing of it runs" if pause else ""
        now = f"{'paused' if pause else 'not paused'}{moment if place.is_held() else '; no process of it runs here'}"
        say(f"site {found.site} is {now}")
        return
    allowed = (allow_env or (), allow_harness or (), allow_teacher or (), allow_local, use_my_aws)
    wishes = Wishes(folder, key, max_mbit_up, max_mbit_down, max_disk_gib, hours, nice, *allowed)
    is_answered = invitation != "-" and sys.stdin.isatty() and sys.stdout.isatty()
    raise typer.Exit(take_part(found, wishes, say, ask=_ask if is_answered else None))


def _ask(question: str) -> str:
    return typer.prompt(question, default="")


def doctor(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[INVITATION | RECIPE]", help="What the machine shall be able to do; default: only look."
        ),
    ] = None,
    folder: FolderOption = None,
    key: OwnKeyOption = None,
    max_mbit_up: UpOption = None,
    max_mbit_down: DownOption = None,
    allow_env: EnvsOption = None,
    allow_harness: HarnessesOption = None,
    allow_teacher: TeachersOption = None,
    allow_local: LocalOption = False,
    use_my_aws: OwnAwsOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Check this machine: torch and its bits, memory, link, and what a run needs of them. Exit code 1: it can't."""
    from composer_prime.volunteers.consent import Wishes
    from composer_prime.volunteers.doctor import (
        diagnose,
        examine_for_invitation,
        examine_for_recipe,
        lines,
        look,
        to_json,
    )
    from composer_prime.volunteers.invitation import is_invitation, read_invitation

    allowed = (allow_env or (), allow_harness or (), allow_teacher or (), allow_local, use_my_aws)
    wishes = Wishes(folder, key, max_mbit_up, max_mbit_down, None, None, 0, *allowed)
    if source is None:
        found = diagnose(look())
    elif is_invitation(source):
        found = examine_for_invitation(read_invitation(source, sys.stdin.read() if source == "-" else None), wishes)
    else:
        found = examine_for_recipe(read_recipe(source, context.args), wishes)
    _print(to_json(found) if as_json else None, lines(found))
    raise typer.Exit(0 if found.is_able else 1)


def contribution(
    source: Annotated[
        str, typer.Argument(metavar="INVITATION | STORE", help="Yours, or the run's root in its bucket.")
    ],
    site: Annotated[str | None, typer.Option(help="The site's name, where a STORE is given.")] = None,
    key: OwnKeyOption = None,
    allow_local: LocalOption = False,
    use_my_aws: OwnAwsOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """What a site has given to a run, from the bucket alone: the site of an invitation, or any site of a run."""
    from composer_prime.store import open_store
    from composer_prime.volunteers.consent import Wishes
    from composer_prime.volunteers.contribution import contribution as look
    from composer_prime.volunteers.contribution import contribution_of, lines
    from composer_prime.volunteers.invitation import is_invitation, read_invitation

    if is_invitation(source):
        if site is not None:
            raise BadInput("an invitation says whose part it is: leave --site out")
        wishes = Wishes(key_file=key, allow_local=allow_local, use_my_aws=use_my_aws)
        found = contribution_of(read_invitation(source), wishes)
    elif site is None:
        raise BadInput(f"{source} is no invitation: correct its path, or name a run's STORE and the site with --site")
    else:
        with closing(open_store(source)) as opened:
            found = look(opened, site)
    _print(json.dumps(asdict(found), indent=2) if as_json else None, lines(found))


def _print(as_json: str | None, lines: Iterable[str]) -> None:
    if as_json is not None:
        typer.echo(as_json)
        return
    for line in lines:
        say(line)
