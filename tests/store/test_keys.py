"""Keys: what is spelled can be read back, names sort as numbers do, and nothing else is taken for a key."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.errors import ConfigError, ProtocolError
from composer_prime.gateway import invitation_keys
from composer_prime.integrations import torchft_keys
from composer_prime.launch import launch_keys
from composer_prime.store import keys
from composer_prime.store.base import MAX_KEY_LENGTH, is_key

SHA = "0123456789abcdef" * 4
sites = st.from_regex(keys.SITE_NAME, fullmatch=True).filter(str.isascii)
fragments = st.integers(0, 9_999)
versions = st.integers(0, 99_999_999)
incarnations = st.integers(0, 999_999)


def test_keys_are_spelled_as_the_protocol_says() -> None:
    assert keys.manifest() == "manifest.json"
    assert keys.founding() == "founding.json"
    assert keys.close() == "close.json"
    assert keys.offer(3, 12, "a") == "rounds/0003/00000012/offers/a.json"
    assert keys.payload(3, 12, "a", SHA) == "rounds/0003/00000012/payload/a-0123456789abcdef"
    assert keys.commit(3, 12) == "rounds/0003/00000012/commit.json"
    assert keys.master(3, 12, SHA) == "masters/0003/00000012-0123456789abcdef"
    assert keys.claim("a", 7) == "sites/a/000007/claim.json"
    assert keys.beat("a", 7) == "sites/a/000007/beat"
    assert keys.tape("a", 7, SHA) == "tape/a/00000007-0123456789abcdef.jsonl"
    assert (keys.probe("xyz"), keys.probe("xyz", "a-b")) == ("probe/xyz", "probe/a-b/xyz")
    assert invitation_keys.invitation("alice", 2) == "invitations/alice/0002.json"


@given(fragments, versions, sites, incarnations)
def test_every_key_is_legal_in_every_store_and_below_its_prefix(
    fragment: int, version: int, site: str, incarnation: int
) -> None:
    below = {
        keys.offers_prefix(fragment, version): [keys.offer(fragment, version, site)],
        keys.round_prefix(fragment, version): [
            keys.offer(fragment, version, site),
            keys.payload(fragment, version, site, SHA),
            keys.commit(fragment, version),
        ],
        keys.masters_prefix(fragment): [keys.master(fragment, version, SHA)],
        keys.sites_prefix(): [keys.claim(site, incarnation), keys.beat(site, incarnation)],
        keys.site_prefix(site): [keys.claim(site, incarnation), keys.beat(site, incarnation)],
        keys.tape_prefix(site): [keys.tape(site, version, SHA)],
    }
    for prefix, spelled in below.items():
        assert all(key.startswith(prefix) and is_key(key) and len(key) < MAX_KEY_LENGTH // 4 for key in spelled)


@given(versions, versions)
def test_names_sort_as_numbers(one: int, other: int) -> None:
    assert (keys.commit(0, one) < keys.commit(0, other)) == (one < other)
    assert (keys.master(0, one, SHA) < keys.master(0, other, SHA)) == (one < other)
    assert (keys.tape("a", one, SHA) < keys.tape("a", other, SHA)) == (one < other)


def test_each_kind_is_told_from_the_others() -> None:
    kinds = {
        keys.is_offer: keys.offer(0, 0, "a"),
        keys.is_master: keys.master(0, 0, SHA),
        keys.is_claim: keys.claim("a", 0),
        keys.is_beat: keys.beat("a", 0),
    }
    others = [
        keys.manifest(),
        keys.commit(0, 0),
        keys.payload(0, 0, "a", SHA),
        keys.tape("a", 0, SHA),
        "sites/a/1/beat",
    ]
    for is_kind, own in kinds.items():
        assert [key for key in [*kinds.values(), *others] if is_kind(key)] == [own]


@pytest.mark.parametrize("parse", [keys.parse_master, keys.parse_claim, keys.offer_site])
@pytest.mark.parametrize(
    "key", ["", "manifest.json", "sites/A/000001/beat", "masters/0/1-x", "rounds/0001/x/offers/a.json"]
)
def test_foreign_key_is_a_protocol_error(parse: Callable[[str], object], key: str) -> None:
    with pytest.raises(ProtocolError, match="does not name"):
        parse(key)


@pytest.mark.parametrize("site", ["", "-a", "A", "a_b", "a/b", "..", "a" * 33, "ä", "a\n", "a b"])
def test_bad_site_name_is_refused_wherever_a_site_is_spelled(site: str) -> None:
    spell = [
        lambda: keys.check_site_name(site),
        lambda: keys.offer(0, 0, site),
        lambda: keys.payload(0, 0, site, SHA),
        lambda: keys.claim(site, 0),
        lambda: keys.beat(site, 0),
        lambda: keys.tape(site, 0, SHA),
    ]
    for act in spell:
        with pytest.raises(ConfigError, match=r"site\.name"):
            act()


def test_number_that_would_not_sort_is_refused() -> None:
    for act in (lambda: keys.commit(10_000, 0), lambda: keys.commit(0, 10**8), lambda: keys.beat("a", -1)):
        with pytest.raises(ProtocolError, match="must be from 0 to"):
            act()


@pytest.mark.parametrize("sha", ["", "abc", SHA[:15], SHA + "0", SHA.upper(), "../../../../etc/passwd"])
def test_sha_that_is_none_is_refused(sha: str) -> None:
    for act in (lambda: keys.master(0, 0, sha), lambda: keys.payload(0, 0, "a", sha)):
        with pytest.raises(ProtocolError, match="sha256"):
            act()


@given(fragments, versions, sites, incarnations)
def test_any_key_says_what_it_is(fragment: int, version: int, site: str, incarnation: int) -> None:
    place, sha = keys.Place, SHA[:16]
    assert keys.check_site_name(site) == site
    assert keys.parse_master(keys.master(fragment, version, SHA)) == (fragment, version, sha)
    assert keys.offer_site(keys.offer(fragment, version, site)) == site
    assert keys.parse_claim(keys.claim(site, incarnation)) == (site, incarnation)
    assert keys.place(keys.offer(fragment, version, site)) == place("offer", site, fragment, version)
    assert keys.place(keys.payload(fragment, version, site, SHA)) == place("payload", site, fragment, version, sha)
    assert keys.payload(fragment, version, site, SHA).startswith(keys.payloads_prefix(fragment, version, site))
    assert keys.place(keys.commit(fragment, version)) == place("commit", "", fragment, version)
    assert keys.place(keys.merged(fragment, version, 3)) == place("part", "", fragment, version)
    assert keys.place(keys.merged_payload(fragment, version, 3, SHA)) == place(
        "merged payload", "", fragment, version, sha
    )
    assert keys.place(keys.master(fragment, version, SHA)) == place("master", "", fragment, version, sha)
    assert keys.place(keys.claim(site, incarnation)) == place("claim", site, 0, incarnation)
    assert keys.place(keys.beat(site, incarnation)) == place("beat", site, 0, incarnation)
    assert keys.place(keys.tape(site, version, SHA)) == place("tape", site, 0, version, sha)
    own = {keys.manifest(): "manifest", keys.founding(): "founding", keys.close(): "close", keys.probe("7"): "probe"}
    assert all(keys.place(key) == place(kind) for key, kind in {**own, keys.probe("7", site): "probe"}.items())
    assert keys.place(keys.admission(2)) == place("admission", number=2)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "a",
        "manifest.json/x",
        "xmanifest.json",
        "rounds/0/0/offers/a.json",
        torchft_keys.run(),
        "tape/a/00000001.jsonl",
    ],
)
def test_what_no_run_of_sites_holds_is_no_place(key: str) -> None:
    assert keys.place(key) is None


def test_every_key_of_a_launch_is_legal_below_its_prefix_and_read_back() -> None:
    spelled = (launch_keys.intent, launch_keys.job, launch_keys.stop, launch_keys.end)
    found = [launch_keys.launch(12), launch_keys.stop(12), *(spell(12, "r0", 3) for spell in spelled)]
    assert all(is_key(key) and key.startswith(launch_keys.launch_prefix(12)) for key in found)
    assert len(set(found)) == len(found)
    recipe = launch_keys.recipe(SHA)
    assert is_key(recipe) and recipe.startswith(launch_keys.launches_prefix())
    others = [*found, recipe, keys.manifest(), keys.claim("a", 1)]
    assert [key for key in others if launch_keys.parse_launch(key) is not None] == [launch_keys.launch(12)]
    assert [launch_keys.parse_intent(key) for key in others if launch_keys.parse_intent(key)] == [(12, "r0", 3)]
    assert not any(keys.parse_collectable(key) for key in found)


@pytest.mark.parametrize(("site", "attempt"), [("A", 1), ("a/b", 1), ("a", 10_000), ("a", -1)])
def test_a_launch_s_site_or_number_that_would_not_sort_is_refused(site: str, attempt: int) -> None:
    with pytest.raises((ConfigError, ProtocolError)):
        launch_keys.intent(1, site, attempt)
