"""docs/protocol.md says enough: a reader written from it alone rebuilds what sites made, hash for hash."""

import re
from pathlib import Path

import pytest

from composer_prime.outer.fragments import model_fingerprint, plan_fragments
from composer_prime.store import keys, open_store
from composer_prime.sync.canonical import PROTOCOL
from composer_prime.sync.owner import Owner
from tests.spec import records
from tests.spec.layout import blocks_of, fingerprint, fragment_sizes
from tests.spec.reader import Reading, read_run
from tests.spec.runs import KEYS, OWNER, Play, read_commit, verify
from tests.sync.harness import ThreadSite, make_terms, run_sites

PAGE = Path(__file__).parents[2] / "docs/protocol.md"


def test_page_reader_and_sites_name_one_protocol():
    """The number stands in the manifest and in every signature: with another one nothing of a run can be read."""
    (version,) = re.findall(r"protocol version (\d+)", PAGE.read_text())
    assert int(version) == records.PROTOCOL == PROTOCOL


def read_as_verify_does(folder: Path) -> Reading:
    """The reading of a run with which nothing is wrong, after it was compared with the verifier's."""
    reading, verdict = read_run(folder), verify(folder)
    assert reading.masters == verdict.masters
    assert reading.voids.keys() == verdict.voids.keys(), (reading.voids, verdict.voids)
    assert (reading.wrong, verdict.wrong) == ([], [])
    assert reading.is_closed == verdict.is_closed
    return reading


def assert_moved(reading: Reading, versions: int, fragments: int = 2) -> None:
    """So many rounds of so many fragments, each with a master of its own."""
    assert all(reading.versions(fragment) == versions for fragment in range(fragments))
    assert len(set(reading.masters.values())) == len(reading.masters)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "topk"])
@pytest.mark.parametrize("shape", ["gathered", "sliced"])
def test_the_reader_written_from_the_document_rebuilds_every_master_of_a_run_with(tmp_path, codec, shape):
    fragments = 2 if shape == "gathered" else 1
    if shape == "gathered":
        Play(tmp_path, "ab", codec=codec, quorum=2).rounds(2)
    else:
        Play(tmp_path, "abcde", codec=codec, quorum=5, momentum=0.9).rounds(2, fragments)
    assert_moved(read_as_verify_does(tmp_path), 2, fragments)
    assert read_commit(tmp_path, 1).num_parts == (5 if shape == "sliced" and codec != "topk" else 0)


@pytest.mark.parametrize("aggregate", ["mean", "clipped"])
@pytest.mark.parametrize(("names", "momentum", "weighting"), [("abcd", 0.9, "equal"), ("abcdef", 0.0, "steps")])
def test_the_reader_rebuilds_every_master_merged_by(tmp_path, aggregate, names, momentum, weighting):
    terms = {"aggregate": aggregate, "momentum": momentum, "weighting": weighting, "clip": 1.5}
    Play(tmp_path, names, quorum=len(names), **terms).rounds(2, fragments=1)
    assert_moved(read_as_verify_does(tmp_path), 2, fragments=1)
    assert read_commit(tmp_path, 1).num_parts == (6 if len(names) == 6 else 0)


def cut_short(folder: Path, version: int) -> None:
    """Take the last byte off a payload of c, and put one behind a payload of d."""
    for site, change in (("c", lambda data: data[:-1]), ("d", lambda data: data + b"\0")):
        (path,) = (folder / keys.round_prefix(0, version) / "payload").glob(f"{site}-*")
        path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("aggregate", ["mean", "clipped"])
def test_the_reader_rebuilds_parts_that_left_offers_out(tmp_path, aggregate):
    play = Play(tmp_path, "abcde", codec="int8", quorum=5, aggregate=aggregate)
    play.rounds(2, fragments=1, spoil=cut_short)
    assert_moved(read_as_verify_does(tmp_path), 2, fragments=1)
    records = [(tmp_path / keys.merged(0, 1, part)).read_bytes() for part in range(5)]
    assert [b'"site":"c"' in data and b'"site":"d"' in data for data in records] == [False] * 4 + [True]


def test_the_reader_rebuilds_a_round_of_many_offers_whose_payloads_are_one_slice(tmp_path):
    Play(tmp_path, "abcde", codec="int8", quorum=5, slices=1).rounds(1, fragments=1)
    assert_moved(read_as_verify_does(tmp_path), 1, fragments=1)
    assert read_commit(tmp_path, 0).num_parts == 0


def test_the_reader_rebuilds_every_master_of_a_signed_run_with_admissions_a_guest_and_a_revoked_site(tmp_path):
    play = Play(tmp_path, "ab", signed=True, quorum=2, aggregate="clipped").rounds(1)
    Owner(play.store, OWNER).admit("c", KEYS["c"].public, guest=True)
    play.join("c")
    play.rounds(1)
    Owner(play.store, OWNER).admit("d", KEYS["d"].public)
    play.join("d")
    play.rounds(1)
    Owner(play.store, OWNER).revoke("b")
    play.sites = [site for site in play.sites if site.name != "b"]
    play.clock[0] += 2e6
    play.rounds(1)
    assert_moved(read_as_verify_does(tmp_path), 4)
    commits = [read_commit(tmp_path, version) for version in range(4)]
    assert [commit.admissions for commit in commits] == [0, 1, 2, 3]
    assert [[entry.site for entry in commit.taken] for commit in commits] == [[*"ab"], [*"abc"], [*"abcd"], [*"acd"]]


def test_the_reader_carries_a_void_round_and_what_the_next_commits_say_of_it(tmp_path):
    play = Play(tmp_path, "ab", quorum=2, max_stale_rounds=2).rounds(1)
    play.store.create(keys.commit(0, 1), b'{"not":"a commit"}')
    for site in play.sites:
        site.tick()
    play.rounds(3)
    reading = read_as_verify_does(tmp_path)
    assert reading.voids.keys() == {(0, 1)} and reading.masters[0, 1] == reading.masters[0, 2]
    assert [read_commit(tmp_path, version).voids for version in (2, 3)] == [(1,), (1,)]


def test_the_reader_carries_a_round_whose_merge_is_not_finite(tmp_path):
    play = Play(tmp_path, "ab", quorum=2, lr=1000.0).rounds(1, fragments=1)
    play.scale = 1e37
    play.rounds(1, fragments=1)
    play.scale = 1e-5
    play.rounds(1, fragments=1)
    assert read_as_verify_does(tmp_path).voids.keys() == {(0, 1)}


def test_the_reader_rebuilds_a_run_that_closed_with_void_rounds(tmp_path):
    uri = f"file://{tmp_path / 'run'}"
    first = ThreadSite(open_store(uri), make_terms(codec="int8"), "a")
    first.after_join = lambda: open_store(uri).create(keys.commit(0, 3), b"garbage")
    run_sites(first)
    closed = read_as_verify_does(tmp_path / "run")
    assert closed.is_closed and closed.voids.keys() == {(0, 3)}


def test_the_reader_reads_no_round_behind_the_closing_one(tmp_path):
    uri = f"file://{tmp_path / 'run'}"
    run_sites(ThreadSite(open_store(uri), make_terms(), "a"))
    open_store(uri).create(keys.commit(0, 4), b"garbage")
    assert read_as_verify_does(tmp_path / "run").versions(0) == 4


NAMES = {
    "embeddings, numbers out of order, head": ["wte.w", "h.10.b", "h.2.b", "h.2.a", "ln.w", "head.w"],
    "two stacks of layers": ["vision.0.w", "vision.1.w", "glue.w", "text.0.w", "text.1.w"],
    "no numbers": ["zeta.w", "alpha.w", "zeta.b", "middle.w"],
    "names beyond ASCII": ["é.w", "l.0.ü", "l.0.u", "l.٣.w"],
}


@pytest.mark.parametrize("model", NAMES)
def test_the_reader_cuts_a_model_into_the_same_fragments(model):
    shapes = [(name, (place + 1, 2)) for place, name in enumerate(NAMES[model])]
    blocks = blocks_of([{"name": name, "shape": list(shape)} for name, shape in shapes])
    assert fingerprint(blocks) == model_fingerprint(shapes)
    assert fragment_sizes(blocks, 2) == [fragment.numel for fragment in plan_fragments(shapes, 2)]
