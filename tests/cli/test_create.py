"""`composer-prime create`: what it writes, from what, and what it refuses; the runs are joined by real sites' loops."""

import secrets
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from composer_prime.errors import BadInput, ProtocolError
from composer_prime.sites.prime_rl import create as create_module
from composer_prime.store import keys, open_store
from composer_prime.sync.creating import CREATOR, create_run, present_weights
from composer_prime.sync.founding import FoundingRecord, announce, check_founded, find_founding
from composer_prime.sync.run import load_run
from composer_prime.sync.runtime import ThreadRuntime
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.sync.start import Founding
from tests.cli.command_line import Answer, call
from tests.store.meeting import Meeting
from tests.sync.harness import make_net, make_terms

RECIPE = """
max_steps = 8
[run]
name = "first"
[model]
name = "{model}"
[outer]
store = "{store}"
inner_steps = 4
fragments = 2
[[orchestrator.train.source]]
name = "letters"
[orchestrator.train.source.env.taskset]
id = "letters"
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face folder with a model of two layers, in bf16 as they are published."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.servers.fake_inference import save_tokenizer

    folder = save_tokenizer(tmp_path / "model")
    torch.manual_seed(3)
    config = Qwen3Config.from_pretrained(folder)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> str:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(model=model, store=tmp_path / "bucket"))
    return str(path)


@pytest.fixture
def create(recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """`create(*further)` runs the command on the recipe."""
    return lambda *further: call(capsys, monkeypatch, "create", recipe, *further)


def weights_of(uri: Path) -> dict[str, Tensor]:
    with closing(open_store(str(uri))) as store:
        return present_weights(store)


def test_a_created_run_starts_from_the_models_weights(create, model, tmp_path):
    from transformers import AutoModelForCausalLM

    done = create()
    assert done.code == 0 and "created run first" in done.out, done.err
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    held = weights_of(tmp_path / "bucket" / "first")
    assert list(held) == [name for name, _ in loaded.named_parameters()]
    assert all(torch.equal(held[name], value) for name, value in loaded.named_parameters())
    with closing(open_store(str(tmp_path / "bucket" / "first"))) as store:
        run = load_run(store)
    assert (run.manifest.created_by, run.manifest.run, run.terms.rounds) == (CREATOR, "first", 2)


def test_creating_a_run_again_is_refused_and_other_settings_name_the_way(create, tmp_path):
    assert create().code == 0
    again, changed = create(), create("--outer.inner_steps", "8")
    assert again.code == 2 and "these settings already" in again.err
    assert changed.code == 2 and "outer.inner_steps: run 4, recipe 8" in changed.err
    assert f"--from {tmp_path / 'bucket' / 'first'}" in changed.err.replace("file://", "")
    assert changed.err.count("\n") == 1


def test_a_run_from_another_has_its_present_masters_and_its_own_settings_and_names_its_parent(create, tmp_path):
    assert create().code == 0
    old = tmp_path / "bucket" / "first"
    done = create("--from", str(old), "--run.name", "second", "--outer.fragments", "1")
    assert done.code == 0, done.err
    ours, theirs = weights_of(tmp_path / "bucket" / "second"), weights_of(old)
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    with closing(open_store(str(old))) as parent, closing(open_store(str(tmp_path / "bucket" / "second"))) as child:
        assert load_run(child).manifest.parent == load_run(parent).sha256


def test_a_run_that_its_first_site_founds_is_announced_with_the_recipes_settings(create, tmp_path):
    done = create("--weights", "first-site")
    assert done.code == 0 and "announced run first" in done.out, done.err
    with closing(open_store(str(tmp_path / "bucket" / "first"))) as store:
        announced = find_founding(store)
        assert announced is not None and announced.terms.inner_steps == 4
        assert keys.manifest() not in store.list("")
    other = create("--weights", "first-site", "--outer.inner_steps", "8")
    assert other.code == 2 and "outer.inner_steps: run 4, recipe 8" in other.err
    both = create("--weights", "first-site", "--from", str(tmp_path / "bucket"))
    assert both.code == 2 and "exclude each other" in both.err


@pytest.mark.parametrize("weights", ["now", "first-site"])
def test_a_run_is_not_created_where_two_of_racing_writers_win(weights, create, monkeypatch):
    bucket = Meeting(secrets.token_hex(8), num_meeting=2)
    monkeypatch.setattr(create_module, "open_store", lambda uri: bucket)
    refused = create("--weights", weights)
    assert refused.code == 2 and "(of 20 races of 16 writers, " in refused.err, refused.err
    assert bucket.list("") == []


def test_present_weights_follow_the_log_beyond_the_last_snapshot():
    store = open_store("memory://present")
    terms, net = make_terms(rounds=2, fragments=2, snapshot_rounds=100, momentum=0.5), make_net()
    outer = OuterLoop(store, terms, run="run", site="a")
    outer.join(net.named_parameters())
    while not outer.finished:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.01)
        outer.after_inner_step(tokens=4, samples=1)
    outer.close()
    held = present_weights(open_store("memory://present"))
    assert all(torch.equal(held[name], value) for name, value in net.named_parameters())


def test_a_site_joins_a_created_run_and_stands_on_its_masters():
    store, terms = open_store("memory://created"), make_terms()
    first, late = make_net(0), make_net(1)
    create_run(store, terms, "run", dict(first.named_parameters()), Founding(), ThreadRuntime())
    outer = OuterLoop(store, terms, run="run", site="a")
    outer.join(late.named_parameters())
    outer.close()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), late.parameters(), strict=True))


def test_a_manifest_that_is_not_the_announced_one_is_refused():
    store, terms = open_store("memory://founded"), make_terms()
    announce(store, FoundingRecord(run="run", terms=terms, keys={"a": "x"}))
    net: nn.Module = make_net()
    create_run(store, terms, "run", dict(net.named_parameters()), Founding(), ThreadRuntime())
    with pytest.raises(ProtocolError, match=r"differs from founding\.json in keys"):
        check_founded(load_run(store).manifest, find_founding(store))


def test_two_announcements_of_different_runs_do_not_mix():
    store = open_store("memory://announced")
    announce(store, FoundingRecord(run="run", terms=make_terms()))
    announce(store, FoundingRecord(run="run", terms=make_terms()))
    with pytest.raises(BadInput, match=r"already to hold another run \(outer\.fragments: run 2, recipe 1\)"):
        announce(store, FoundingRecord(run="run", terms=make_terms(fragments=1)))
