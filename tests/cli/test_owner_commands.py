"""`admit` and `revoke`: what they print, and how a mistake is answered."""

from pathlib import Path

import pytest

from composer_prime.store import keys, open_store
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding
from tests.cli.command_line import assert_refused
from tests.sync.harness import HandSite, make_terms


@pytest.fixture
def owned(tmp_path: Path) -> tuple[str, str]:
    """(folder of a run with an owner and site a, the owner's key file)."""
    owner, key = SigningKey.generate(), SigningKey.generate()
    owner.save(tmp_path / "owner.pem")
    founding, terms = Founding(owner.public, {"a": key.public}), make_terms(aggregate="clipped", weighting="equal")
    HandSite(open_store(str(tmp_path / "run")), terms, "a", [0.0], key=key, founding=founding)
    return str(tmp_path / "run"), str(tmp_path / "owner.pem")


def test_sites_are_admitted_and_revoked_with_the_owners_key(cli, owned):
    store, key = owned
    public = SigningKey.generate().public
    admitted = cli("admit", store, "--site", "b", "--public", public, "--key", key)
    assert admitted.code == 0 and admitted.out == "admission 1: site b may take part; admitted now: a, b\n"
    revoked = cli("revoke", store, "--site", "a", "--key", key)
    assert revoked.code == 0 and revoked.out == "admission 2: site a is revoked; admitted now: b\n"
    assert len(open_store(store).list(keys.admissions_prefix())) == 2


def test_without_the_owners_key_nothing_happens(cli, owned, tmp_path: Path):
    store, _ = owned
    SigningKey.generate().save(tmp_path / "other.pem")
    assert_refused(cli("revoke", store, "--site", "a"), "has an owner", "--key")
    assert_refused(cli("revoke", store, "--site", "a", "--key", str(tmp_path / "other.pem")), "is owned by")
    assert_refused(cli("revoke", store, "--site", "a", "--key", str(tmp_path / "none.pem")), "doesn't exist")
    assert open_store(store).list(keys.admissions_prefix()) == []


def test_a_folder_without_a_run_is_answered_in_one_line(cli, tmp_path: Path):
    assert_refused(cli("revoke", str(tmp_path), "--site", "a"), "holds no run")
