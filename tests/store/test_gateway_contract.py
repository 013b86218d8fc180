"""The stores' contract through a gateway, as far as it is about reading and writing: real HTTP, and a real S3 server.

Members may do little of it, so here everybody may do everything. Left out: a part of a store by a longer
prefix, which a gateway, that serves one run, doesn't know; and illegal keys, which test_gateway_store.py tries.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from composer_prime.gateway.store import KEY_VARIABLE
from composer_prime.store import Store, open_store
from tests.contracts import test_store_contract as contract
from tests.gateway.guarded import KEYS, allow_everything, guarding, make_run

KINDS = [
    "memory",
    "file",
    pytest.param("seaweed", marks=pytest.mark.s3),
    pytest.param("seaweed, tickets only", marks=pytest.mark.s3),
]

test_absent_key_is_missing = contract.test_absent_key_is_missing
test_close_may_be_repeated = contract.test_close_may_be_repeated
test_create_after_delete_wins_again = contract.test_create_after_delete_wins_again
test_create_beyond_the_limit = contract.test_create_beyond_the_limit_is_refused_before_anything_is_written
test_create_met_by_its_own_bytes_is_true = contract.test_create_met_by_its_own_bytes_is_true
test_create_sees_what_put_wrote = contract.test_create_sees_what_put_wrote
test_delete_removes_only_what_it_names = contract.test_delete_removes_only_what_it_names_and_may_be_repeated
test_empty_bytes_are_an_object = contract.test_empty_bytes_are_an_object
test_first_writer_wins_and_its_bytes_stay = contract.test_first_writer_wins_and_its_bytes_stay
test_five_mebibytes_of_noise_come_back = contract.test_five_mebibytes_of_noise_come_back
test_list_is_sorted_and_complete = contract.test_list_is_sorted_and_complete
test_of_eight_racing_threads_one_wins = contract.test_of_eight_racing_threads_exactly_one_wins_and_its_bytes_stay
test_prefix_is_a_string_not_a_folder = contract.test_prefix_is_a_string_not_a_folder
test_probe_passes_and_leaves_nothing = contract.test_probe_passes_and_leaves_nothing
test_put_overwrites = contract.test_put_overwrites
test_races_for_a_new_run_pass_and_leave_nothing = contract.test_races_for_a_new_run_pass_and_leave_nothing
test_range_is_a_slice = contract.test_range_is_a_slice
test_store_opened_twice_is_one_store = contract.test_store_opened_twice_is_one_store


@pytest.fixture(params=KINDS)
def store(
    request: pytest.FixtureRequest,
    store_uri: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Store]:
    allow_everything(monkeypatch)
    kind, _, only = request.param.partition(", ")
    with ExitStack() as stack:
        run = stack.enter_context(closing(open_store(f"memory://gateway-{request.node.name}")))
        make_run(run)
        bucket = stack.enter_context(closing(open_store(store_uri(kind))))
        gateway = stack.enter_context(guarding(bucket, run=run))
        KEYS["alice"].save(tmp_path / "alice.key")
        monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "alice.key"))
        options = {"inline_bytes": 0} if only else {}
        store = stack.enter_context(closing(gateway.store("alice", **options)))
        store.introduce()
        yield store
