"""A guest's tokens and hours are its own word: shown as such, and counted up to what the members did meanwhile."""

import json
import shutil
from pathlib import Path

import pytest

from composer_prime.store import keys, open_store
from composer_prime.sync.owner import Owner
from composer_prime.sync.records import Beat, Commit
from composer_prime.volunteers.contribution import contribution, lines
from composer_prime.watch.status import look
from tests.spec.runs import KEYS, OWNER, Play
from tests.watch.test_bounds import signed

FALSE = 70_000_000


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the members a and b and the guest c, after three rounds, of 3, 10 and 17 tokens each."""
    folder = tmp_path_factory.mktemp("run") / "run"
    play = Play(folder, "ab", signed=True, sizes=(10, 40, 7), quorum=2)
    Owner(play.store, OWNER).admit("c", KEYS["c"].public, guest=True)
    play.join("c")
    play.rounds(3)
    return folder


@pytest.fixture
def lying(honest: Path, tmp_path: Path) -> Path:
    """The same, of which c has claimed 70 million tokens in every offer, and beaten 2^53 times."""
    folder = Path(shutil.copytree(honest, tmp_path / "run"))
    store = open_store(f"file://{folder}")
    for fragment in range(2):
        for version in range(3):
            key = keys.commit(fragment, version)
            commit = Commit.from_bytes(store.get(key), key)
            taken = tuple(
                entry.model_copy(
                    update={"offer": entry.offer.model_copy(update={"tokens": FALSE, "trained_tokens": FALSE})}
                )
                if entry.site == "c"
                else entry
                for entry in commit.taken
            )
            store.put(key, signed(store, commit.model_copy(update={"taken": taken}), commit.committer).to_bytes())
    key = keys.beat("c", 0)
    beat = Beat.from_bytes(store.get(key), key).model_copy(update={"trained_tokens": FALSE, "counter": 2**53})
    store.put(key, signed(store, beat, "c").to_bytes())
    return folder


def test_a_guest_s_tokens_count_up_to_the_members_median_of_the_same_rounds(honest: Path, lying: Path) -> None:
    true, found = look(open_store(f"file://{honest}")), look(open_store(f"file://{lying}"))
    members = {site.site: site for site in found.sites if site.site != "c"}
    assert {site.site: site for site in true.sites if site.site != "c"} == members
    (guest,) = [site for site in found.sites if site.guest]
    assert guest.site == "c" and guest.rounds_taken == 6
    least = min(site.merged_tokens for site in members.values())  # of two members the lower one is the middle one
    assert guest.merged_tokens == least > 0
    assert least <= guest.trained_tokens <= 2 * least
    assert guest.carried_tokens + guest.dropped_tokens + guest.merged_tokens == guest.trained_tokens


def test_a_guest_s_claims_stay_claims_when_it_is_revoked(lying: Path) -> None:
    store = open_store(f"file://{lying}")
    before = {site.site: site.merged_tokens for site in look(store).sites}
    Owner(store, OWNER).revoke("c")
    found = {site.site: site for site in look(store).sites}
    assert found["c"].guest and found["c"].state == "revoked" and found["c"].trained_tokens < FALSE
    assert {name: site.merged_tokens for name, site in found.items()} == before


def test_an_honest_guest_loses_nothing_of_what_it_did_with_the_others(tmp_path: Path) -> None:
    play = Play(tmp_path / "run", "ba", signed=True, sizes=(10, 40, 7), quorum=2)
    Owner(play.store, OWNER).admit("c", KEYS["c"].public, guest=True)
    play.join("c")
    play.sites.sort(key=lambda site: site.courier._site != "c")  # the guest trains the fewest
    play.rounds(3)
    (guest,) = [site for site in look(play.store).sites if site.guest]
    assert guest.merged_tokens == 9 and guest.trained_tokens >= 9


def test_contribution_says_a_share_and_hours_that_can_be(lying: Path) -> None:
    store = open_store(f"file://{lying}")
    found, member = contribution(store, "c"), contribution(store, "a")
    assert found.share <= 1 / 3
    assert 0 < found.hours <= max(member.hours, contribution(store, "b").hours)
    told = "\n".join(lines(found))
    assert "claim" in told and f"{FALSE:,}" not in told
    assert "claim" not in "\n".join(lines(member))


def test_status_shows_a_guest_s_tokens_as_claims(cli, lying: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = cli("status", lying).out
    (row,) = [line for line in shown.splitlines() if " c " in line and " live " in line]
    assert "claims" in row and f"{FALSE:,}" not in shown
    told = json.loads(cli("status", lying, "--json").out)
    assert [site["guest"] for site in told["sites"]] == [False, False, True]


def test_what_a_guest_s_tape_says_was_dropped_is_no_more_than_it_trained(lying: Path) -> None:
    event = {"event": "dropped", "site": "c", "fragment": 0, "version": 0, "tokens": 2**53}
    place = lying / f"{keys.tape_prefix('c')}000000/90000000.jsonl"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(event) + "\n")
    (guest,) = [site for site in look(open_store(f"file://{lying}")).sites if site.guest]
    assert guest.dropped_tokens <= guest.trained_tokens - guest.merged_tokens
