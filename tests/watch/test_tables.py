"""The tables that `status` prints: every number stands below the word that it is."""

from dataclasses import replace

from rich.console import Console

from composer_prime.watch.records import Bytes, FragmentStatus, RunStatus, SiteStatus
from composer_prime.watch.tables import draw

SITE = SiteStatus(
    site="a",
    guest=False,
    incarnation=6,
    incarnations=7,
    state="live",
    beating=True,
    contributing=True,
    beat_counter=11,
    inner_step=1234,
    versions=(21, 22),
    trained_tokens=6000,
    merged_tokens=1000,
    carried_tokens=2000,
    dropped_tokens=3000,
    rounds_taken=41,
    rounds_missed=42,
    bytes_up=43,
    bytes_down=44,
    rounds_clipped=51,
    least_clip=0.125,
)
FRAGMENT = FragmentStatus(
    fragment=0, parameters=70_001, version=71, void=72, faulty=73, participation=0.74, open_offers=75, snapshots=(76,)
)
STATUS = RunStatus(
    uri="s3://bucket/runs/r",
    run="r",
    created_by="founder",
    inner_steps=81,
    fragments=82,
    sync_delay=83,
    codec="int4",
    rounds_done=84,
    rounds=85,
    closed=False,
    signed=True,
    owner="ed25519:owner",
    quorum=87,
    contributing=88,
    live=89,
    liveness_s=15.0,
    watched_s=5.0,
    sites=(SITE,),
    by_fragment=(FRAGMENT, replace(FRAGMENT, fragment=1, participation=None, snapshots=tuple(range(9)))),
    refused={"stands on another master": 91},
    bytes=Bytes(payloads=1_100_000, merged=2_200, masters=3_300_000_000),
    problems=("tape/a is no JSON",),
)


def drawn(status: RunStatus) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        draw(status, console)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def row(text: str, title: str, first: str) -> dict[str, str]:
    """By column, what the table below `title` says in the row that begins with `first`."""
    lines = text.partition(f"{title}\n")[2].splitlines()
    names, *rows = [
        [cell.strip() for cell in line.replace("┃", "│").strip("│").split("│")] for line in lines if line[:1] in "┃│"
    ]
    return dict(zip(names, next(cells for cells in rows if cells[0] == first), strict=True))


def test_a_sites_row_has_its_state_and_the_fates_of_its_tokens_below_their_names():
    assert row(drawn(STATUS), "sites", "a") == {
        "site": "a",
        "state": "live",
        "alive": "yes",
        "in last round": "yes",
        "step": "1,234",
        "versions": "21 22",
        "tokens": "6,000",
        "merged": "1,000",
        "carried": "2,000",
        "dropped": "3,000",
        "taken": "41",
        "missed": "42",
        "processes": "7",
    }
    silent = replace(SITE, beating=None, contributing=False, state="silent", versions=())
    found = row(drawn(replace(STATUS, sites=(silent,))), "sites", "a")
    assert [found[name] for name in ("state", "alive", "in last round", "versions")] == ["silent", "beat 11", "no", "-"]


def test_a_fragments_row_has_its_rounds_below_their_names():
    text = drawn(STATUS)
    assert row(text, "rounds of each fragment", "0") == {
        "fragment": "0",
        "parameters": "70,001",
        "version": "71",
        "void": "72",
        "unsound": "73",
        "sites taken": "74%",
        "open offers": "75",
        "snapshots": "76",
    }
    other = row(text, "rounds of each fragment", "1")
    assert (other["sites taken"], other["snapshots"]) == ("-", "0 .. 7 8")


def test_the_lines_above_have_the_run_its_bytes_and_three_counts_of_sites():
    assert drawn(STATUS).splitlines()[:4] == [
        "run r in s3://bucket/runs/r, created by founder",
        "going on: 84 of 85 rounds of each fragment; H 81, P 82, tau 83, codec int4; keys, owner ed25519:owner",
        "payloads 1.10 MB, merged parts 2.20 kB, stored masters 3.30 GB",
        "live 89, contributing 88, quorum 87",
    ]
    assert drawn(STATUS).splitlines()[-2:] == ["refused 91: stands on another master", "problem: tape/a is no JSON"]
