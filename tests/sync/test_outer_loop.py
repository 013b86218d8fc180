"""Whole sites on threads: the outer loop as a trainer meets it."""

import contextlib
import json
import threading

import pytest
import torch

from composer_prime.config import settle_site
from composer_prime.errors import ConfigError, CorruptObject, FingerprintMismatch, ProtocolError, Superseded
from composer_prime.outer.fragments import trainable
from composer_prime.store import keys
from composer_prime.sync.canonical import MAX_RECORD_BYTES, PROTOCOL
from composer_prime.sync.parameters import LocalParameters
from composer_prime.sync.records import Manifest
from composer_prime.sync.runtime import ThreadRuntime
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.sync.start import Founding, create_or_join
from tests.config.recipes import recipe
from tests.patience import PATIENCE_S
from tests.sync.harness import (
    HandSite,
    SpoilingStore,
    ThreadSite,
    assert_fates_add_up,
    make_net,
    make_terms,
    run_sites,
    shas,
    train_step,
)


def versions(site: ThreadSite) -> list[int]:
    return [master["version"] for master in site.summary["masters"]]


def events(store, site: str, name: str) -> list[dict]:
    lines = [line for key in store.list(keys.tape_prefix(site)) for line in store.get(key).decode().splitlines()]
    return [event for event in map(json.loads, lines) if event["event"] == name]


@pytest.mark.parametrize("sync_delay", [0, 1])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_two_sites_end_with_the_same_masters_in_their_parameters(store, sync_delay, codec):
    terms = make_terms(sync_delay=sync_delay, codec=codec, momentum=0.5)
    sites = [ThreadSite(store, terms, name, seed=index, data_seed=index) for index, name in enumerate("ab")]
    run_sites(*sites)
    assert shas(sites[0]) == shas(sites[1]) and versions(sites[0]) == [4, 4]
    for left, right in zip(sites[0].net.parameters(), sites[1].net.parameters(), strict=True):
        assert torch.equal(left, right)
    for site in sites:
        assert_fates_add_up(site)


@pytest.mark.parametrize(("inner_steps", "fragments", "sync_delay"), [(1, 1, 0), (4, 1, 0), (4, 2, 0), (4, 2, 1)])
def test_one_site_with_outer_lr_1_and_no_momentum_is_plain_training(store, inner_steps, fragments, sync_delay):
    terms = make_terms(inner_steps=inner_steps, fragments=fragments, sync_delay=sync_delay, rounds=12 // inner_steps)
    site = ThreadSite(store, terms, "a")
    run_sites(site)
    assert site.steps == 12
    plain, data = make_net(), torch.Generator().manual_seed(0)
    for _ in range(12):
        train_step(plain, data, 0.05)
    for ours, theirs in zip(site.net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert all(ledger["merged"] == 120 and ledger["dropped"] == 0 for ledger in site.summary["tokens"])


@pytest.mark.parametrize("num_sites", [2, 3])
def test_sites_at_h_1_are_data_parallel_sgd(store, num_sites):
    terms = make_terms(inner_steps=1, fragments=1, rounds=6, weighting="equal", grace_s=60.0)
    sites = [ThreadSite(store, terms, name, data_seed=index) for index, name in enumerate("abc"[:num_sites])]
    run_sites(*sites)
    assert {site.steps for site in sites} == {6}
    net, data = make_net(), [torch.Generator().manual_seed(index) for index in range(num_sites)]
    for _ in range(6):
        steps = []
        for generator in data:
            copy = make_net()
            copy.load_state_dict(net.state_dict())
            train_step(copy, generator, 0.05)
            steps.append(copy.state_dict())
        net.load_state_dict({name: sum(step[name] for step in steps) / num_sites for name in steps[0]})
    for ours, theirs in zip(sites[0].net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_work_that_met_only_void_rounds_is_not_stale_and_is_merged_in_the_first_one_that_takes_any(store):
    terms = make_terms(rounds=8, quorum=2, max_stale_rounds=1, grace_s=0.2)
    site, idle = ThreadSite(store, terms, "a"), ThreadSite(store, terms, "b")
    train, count = idle.step, idle.outer.after_inner_step

    def rests() -> bool:
        return idle.steps <= 16  # four rounds of each fragment

    def step() -> None:
        if rests():
            idle.steps += 1
        else:
            train()

    idle.step = step  # type: ignore[method-assign]
    idle.outer.after_inner_step = lambda tokens, samples: count(0 if rests() else tokens, samples)  # type: ignore
    run_sites(site, idle)
    assert len([event for event in events(store, "a", "carried") if event["fragment"] == 0]) > terms.max_stale_rounds
    assert not events(store, "a", "dropped")
    assert [(ledger["merged"], ledger["dropped"]) for ledger in site.summary["tokens"]] == [(site.steps * 10, 0)] * 2
    assert shas(site) == shas(idle)


def test_work_is_carried_over_as_many_missed_rounds_as_it_may_and_dropped_after_one_more(store):
    terms = make_terms(fragments=1, rounds=5, max_stale_rounds=2, grace_s=60.0)
    spoiling = SpoilingStore(store)
    site, other = ThreadSite(spoiling, terms, "a"), ThreadSite(store, terms, "b", data_seed=1)
    gate, count, seen = threading.Barrier(2), site.outer.after_inner_step, []
    for one in (site, other):  # both are members before either trains
        one.after_join = lambda: gate.wait(PATIENCE_S)
    spoiling.spoils = True

    def after_inner_step(tokens: int, samples: int):
        report = count(tokens, samples)
        if report.adopted:
            ledger, master = site.outer._stands[0].ledger, site.outer._courier.master(0)
            held = site.outer._params.read(site.outer._fragments[0])
            seen.append((master.version, ledger.carried, ledger.dropped, torch.equal(held, master.weights)))
            spoiling.spoils = ledger.dropped == 0
        return report

    site.outer.after_inner_step = after_inner_step  # type: ignore[method-assign]
    run_sites(site, other)
    assert seen[:4] == [(1, 40, 0, False), (2, 80, 0, False), (3, 0, 120, True), (4, 0, 120, True)]
    (dropped,) = events(store, "a", "dropped")
    assert (dropped["why"], dropped["fragment"], dropped["version"], dropped["tokens"]) == ("stale", 0, 3, 120)
    assert [event["tokens"] for event in events(store, "a", "carried")] == [40, 80]
    assert next(event["tokens"] for event in events(store, "a", "merged")) == 40
    assert_fates_add_up(site)
    assert shas(site) == shas(other)


def test_interrupt_frees_a_site_that_waits_for_a_quorum_that_never_comes(store):
    site = ThreadSite(store, make_terms(quorum=2), "a")
    site.start()
    while not site.outer._in_flight:
        site.join(0.01)
        assert site.error is None
    site._stop_after = site.steps + 1
    site.outer.interrupt()
    site.join(PATIENCE_S)
    assert not site.is_alive() and site.error is None
    assert site.saved["outer"]["fragments"][0]["captured"] is not None


def test_a_model_of_other_shapes_is_refused_with_the_difference_shown(store):
    run_sites(ThreadSite(store, make_terms(), "a", stop_after=1))
    wide = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    outer = OuterLoop(store, make_terms(), run="run", site="b")
    with pytest.raises(FingerprintMismatch, match=r"parameter 0\.weight: run 12x4, model 16x4"):
        outer.join(wide.named_parameters())


def test_other_outer_settings_than_the_runs_are_refused_with_the_difference_shown(store):
    run_sites(ThreadSite(store, make_terms(), "a", stop_after=1))
    outer = OuterLoop(store, make_terms(lr=0.5), run="run", site="b")
    with pytest.raises(FingerprintMismatch, match=r"outer\.lr: run 1\.0, recipe 0\.5.*another run\.name"):
        outer.join(make_net().named_parameters())
    assert store.list(keys.site_prefix("b")) == []


def test_a_machine_that_computes_differently_is_refused_before_it_takes_part(store):
    run_sites(ThreadSite(store, make_terms(), "a", stop_after=1))
    manifest = Manifest.from_bytes(store.get(keys.manifest()), "manifest")
    store.put(keys.manifest(), manifest.model_copy(update={"test_vector": "0" * 64}).to_bytes())
    with pytest.raises(ProtocolError, match="test vector"):
        OuterLoop(store, make_terms(), run="run", site="b").join(make_net().named_parameters())


def test_a_run_of_an_older_protocol_is_refused_by_both_numbers_and_left_as_it_is(store):
    store.create(keys.manifest(), b'{"protocol":12,"whatever":true}')
    with pytest.raises(ProtocolError, match=f"json speaks protocol 12, this composer-prime speaks {PROTOCOL}"):
        OuterLoop(store, make_terms(), run="run", site="b").join(make_net().named_parameters())
    assert store.list("") == [keys.manifest()]


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda data: data[: len(data) // 2], "Invalid JSON"),
        (lambda data: b"\xff" + data, "Invalid JSON"),
        (lambda data: data.replace(b'"fingerprint"', b'"fingerprinz"'), "Field required"),
        (lambda data: b"null", "Input should be an object"),
        (lambda data: b"[" * 200_000, "Invalid JSON"),
        (lambda data: data + b" " * MAX_RECORD_BYTES, f"a record at most {MAX_RECORD_BYTES}"),
    ],
    ids=["cut", "flipped", "renamed", "null", "nested", "oversized"],
)
def test_a_corrupt_manifest_stops_who_joins_with_one_line_that_names_it(store, damage, word):
    HandSite(store, make_terms(), "a", [0.0])
    store.put(keys.manifest(), damage(store.get(keys.manifest())))
    before = store.list("")
    with pytest.raises(CorruptObject, match=rf"^manifest\.json .*{word}") as raised:
        OuterLoop(store, make_terms(), run="run", site="b").join(make_net().named_parameters())
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 200
    assert store.list("") == before


def test_of_many_sites_that_start_at_once_one_creates_the_run(store):
    found: list[tuple[str, str]] = []
    gate = threading.Barrier(6)

    def start(index: int) -> None:
        params = LocalParameters(dict(trainable(make_net(index).named_parameters())))
        gate.wait()
        run = create_or_join(store, make_terms(), "run", f"s{index}", params, ThreadRuntime(), Founding())
        found.append((run.manifest.created_by, run.sha256))

    threads = [threading.Thread(target=start, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == 6 and len(set(found)) == 1


@pytest.mark.parametrize("same_name", ["refuse", "replace"])
def test_a_recipe_says_whether_a_second_process_of_a_name_is_refused_or_takes_over(tmp_path, same_name):
    outer = {"inner_steps": 4, "sync_delay": 0, "liveness_s": 5.0, "store": f"memory://{tmp_path.name}"}
    asked = recipe(outer=outer, site={"same_name": same_name}, output_dir=str(tmp_path))
    settings = settle_site(asked, "a", inference_port=1, model_dir=tmp_path / "model", resume=False)
    first, second = OuterLoop.from_settings(settings), OuterLoop.from_settings(settings)
    first.join(make_net().named_parameters())
    try:
        if same_name == "refuse":
            with pytest.raises(ConfigError, match=r"site a already runs as incarnation 0: .*site\.same_name"):
                second.join(make_net().named_parameters())
            first.after_inner_step(10, 1)
        else:
            second.join(make_net().named_parameters())
            second.close()
        claims = [key for key in first._store.list(keys.site_prefix("a")) if keys.is_claim(key)]
        assert claims == [keys.claim("a", number) for number in range(1 if same_name == "refuse" else 2)]
    finally:
        with contextlib.suppress(Superseded):
            first.close()
