"""What the rounds have merged, as one reads it who doesn't train: from commits of those who may make them."""

from composer_prime.export.reading import MasterReader
from composer_prime.store import keys, open_store
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding
from tests.sync.harness import HandSite, empty_commit, make_terms

KEY = SigningKey.from_bytes(b"a" * 32)


def test_a_commit_of_nobody_at_the_open_round_unmakes_no_round_before_it() -> None:
    store = open_store("memory://test_reading")
    site = HandSite(store, make_terms(fragments=1), "a", [0.0], key=KEY, founding=Founding(keys={"a": KEY.public}))
    site.hand_over(0, 1.0)
    site.tick(times=3)
    reader = MasterReader(store)
    before = reader.merged(1)
    assert before.tokens == {"a": 10} and before.void == 0
    garbage = empty_commit(version=1, voids=(0,), base_sha="0" * 64, previous="0" * 64)
    assert store.create(keys.commit(0, 1), garbage.to_bytes())
    assert reader.merged(1) == before
    reader.close()
