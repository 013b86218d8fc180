"""An exported folder is the masters: bit for bit, whole, and loadable by those who will load it."""

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from composer_prime.config import load_recipe
from composer_prime.config.toml import to_toml
from composer_prime.export.bits import as_bits, bits_sha256, rounded_bits
from composer_prime.export.model import made_whole
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.records import Commit
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import load_run
from composer_prime.sync.snapshots import Master, load_master, vouched_sha
from tests.architecture import REPOSITORY
from tests.export.runs import make_run
from tests.sites.tiny_folder import save_random_tiny

FROZEN = "model.layers.0.self_attn.q_norm.weight"


def freeze(model: PreTrainedModel) -> None:
    model.get_parameter(FROZEN).requires_grad = False


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Store:
    return make_run(tmp_path_factory.mktemp("bucket") / "run", base, prepare=freeze)


def masters(store: Store, version: int) -> list[Master]:
    run = load_run(store)
    roster = Roster(store, run.manifest, run.sha256)
    shas = [vouched_sha(store, run, roster, fragment, version) for fragment in range(len(run.fragments))]
    return [load_master(store, run, fragment, version, str(sha)) for fragment, sha in enumerate(shas)]


def expected(store: Store, version: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What every trained parameter must be, by name: its part of the master, rounded."""
    found = {}
    for fragment, master in zip(load_run(store).fragments, masters(store, version), strict=True):
        sizes = [torch.Size(shape).numel() for shape in fragment.shapes]
        for name, shape, piece in zip(fragment.names, fragment.shapes, master.weights.split(sizes), strict=True):
            found[name] = piece.view(shape).to(dtype)
    return found


@pytest.mark.parametrize(("dtype", "version"), [("bfloat16", None), ("float32", None), ("float16", 2), ("float32", 0)])
def test_an_exported_folder_holds_the_masters_rounded_bit_for_bit(cli, run, base, tmp_path, dtype, version):
    chosen = [] if version is None else ["--version", str(version)]
    answer = cli("export", run.uri, "--to", str(tmp_path / "out"), "--model", str(base), "--dtype", dtype, *chosen)
    assert (answer.code, answer.err) == (0, "")
    at = 4 if version is None else version
    assert answer.out == f"exported run version {at} in {dtype} to {tmp_path / 'out'}\n"
    assert len({stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()}) == 1  # the umask's
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    wanted = expected(run, at, getattr(torch, dtype))
    held = dict(policy.named_parameters())
    assert held.keys() - wanted.keys() == {FROZEN}
    for name, value in wanted.items():
        assert held[name].dtype == value.dtype and torch.equal(held[name], value), name
    with safe_open(base / "model.safetensors", "pt") as opened:
        assert torch.equal(held[FROZEN], opened.get_tensor(FROZEN).to(held[FROZEN].dtype))
    assert policy.lm_head.weight is policy.model.embed_tokens.weight


def test_its_logits_are_those_of_the_base_model_with_the_masters_in_it(cli, run, base, tmp_path):
    out = tmp_path / "out"
    assert cli("export", run.uri, "--to", str(out), "--model", str(base), "--dtype", "float32").code == 0
    policy = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokens = torch.arange(40)[None]
    before = policy(input_ids=tokens).logits
    policy.load_state_dict(expected(run, 4, torch.float32), strict=False)
    after = AutoModelForCausalLM.from_pretrained(out)(input_ids=tokens).logits
    assert torch.equal(after, policy(input_ids=tokens).logits) and not torch.equal(after, before)
    text = "Reverse: abcd"
    assert AutoTokenizer.from_pretrained(out).encode(text) == AutoTokenizer.from_pretrained(base).encode(text)


def test_a_recipes_renderer_that_wrote_otherwise_than_the_exported_template_is_refused(cli, run, base, tmp_path):
    def exported(**renderer: object) -> tuple[int, str]:
        recipe = REPOSITORY / "recipes/local/one_site.toml"
        data: dict[str, Any] = load_recipe(recipe).to_data() | {"model": {"name": str(model)}}
        data["orchestrator"]["renderer"] = renderer
        (tmp_path / "recipe.toml").write_text(to_toml(data))
        asked = ("--to", str(tmp_path / "out"), "--model", str(model), "--recipe", str(tmp_path / "recipe.toml"))
        answer = cli("export", run.uri, *asked)
        return answer.code, answer.err

    model = shutil.copytree(base, tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text("{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}" + template.read_text())
    code, said = exported(name="qwen3")
    assert code == 2 and "doesn't write what this model's own chat template writes" in said and "Be ki" in said
    assert not (tmp_path / "out").exists()
    assert exported(name="auto") == (0, "")
    shutil.rmtree(tmp_path / "out")
    assert exported(name="qwen3", accept_template_difference=True) == (0, "")


def test_card_and_record_say_which_masters_these_are_and_what_was_merged(cli, run, base, tmp_path):
    assert cli("export", run.uri, "--to", str(tmp_path / "out"), "--model", str(base)).code == 0
    record = json.loads((tmp_path / "out" / "composer-prime.json").read_text())
    found = masters(run, 4)
    assert record["manifest_sha256"] == sha256_hex(run.get(keys.manifest()))
    assert [one["master_sha256"] for one in record["fragments"]] == [master.sha256 for master in found]
    assert [one["bits_sha256"] for one in record["fragments"]] == [
        bits_sha256(rounded_bits(master.weights, torch.bfloat16)) for master in found
    ]
    card = (tmp_path / "out" / "README.md").read_text()
    commits = [Commit.from_bytes(run.get(keys.commit(f, v)), "") for f in range(2) for v in range(4)]
    for site in "ab":
        tokens = sum(taken.tokens for commit in commits for taken in commit.taken if taken.site == site)
        assert tokens > 0 and f"| {site} | {tokens / 2:,.0f} |" in card
    assert (
        "after 3 of 3 rounds of each fragment, closed," in card and base.name in card and str(base.parent) not in card
    )  # of no one's business
    assert all(master.sha256 in card for master in found) and "| `codec` | int8 |" in card


def test_a_version_without_a_snapshot_is_made_from_the_log(cli, run, base, tmp_path):
    copy = open_store(str(tmp_path / "copy"))
    for key in run.list(""):
        if not (keys.is_master(key) and keys.parse_master(key)[1] == 3):
            copy.put(key, run.get(key))
    for store, name in ((run, "stored"), (copy, "rebuilt")):
        assert cli("export", store.uri, "--to", str(tmp_path / name), "--model", str(base), "--version", "3").code == 0
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("stored", "rebuilt")]
    assert files[0] == files[1]


def test_a_snapshot_whose_bytes_changed_is_not_exported(cli, run, base, tmp_path):
    copy = open_store(str(tmp_path / "copy"))
    for key in run.list(""):
        copy.put(key, run.get(key))
    for key in copy.list(keys.masters_prefix(0)):
        if keys.parse_master(key)[1] in (0, 4):
            copy.put(key, bytes([copy.get(key)[0] ^ 1]) + copy.get(key)[1:])
    answer = cli("export", copy.uri, "--to", str(tmp_path / "out"), "--model", str(base), "--version", "4")
    assert answer.code == 0  # from version 3 and the log
    sound = expected(run, 4, torch.bfloat16)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert all(torch.equal(policy.get_parameter(name), value) for name, value in sound.items())
    answer = cli("export", copy.uri, "--to", str(tmp_path / "none"), "--model", str(base), "--version", "0")
    assert answer.code == 1 and answer.err.count("\n") == 1 and "fragment 0" in answer.err
    assert not (tmp_path / "none").exists()


def test_a_version_that_was_collected_is_refused_with_the_one_that_can_be_had(cli, run, base, tmp_path):
    copy = open_store(str(tmp_path / "copy"))
    for key in run.list(""):
        if not (keys.is_master(key) and keys.parse_master(key)[1] < 3):
            copy.put(key, run.get(key))
    answer = cli("export", copy.uri, "--to", str(tmp_path / "out"), "--model", str(base), "--version", "2")
    assert answer.code == 1 and answer.err.count("\n") == 1 and "take a newer one, all have stored 4" in answer.err


def test_a_folder_in_a_bucket_is_the_one_that_is_written_here(cli, run, base, tmp_path):
    for to in (str(tmp_path / "out"), f"file://{tmp_path}/bucket/policy"):
        answer = cli("export", run.uri, "--to", to, "--model", str(base))
        assert (answer.code, answer.err) == (0, "") and answer.out.endswith(f" to {to}\n")
    files = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "bucket" / "policy").iterdir()} == files
    again = cli("export", run.uri, "--to", to, "--model", str(base))
    assert again.code == 2 and again.err.count("\n") == 1 and "isn't empty: name a new prefix" in again.err


def test_a_folder_whose_making_fails_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), made_whole(tmp_path / "out") as making:
        (making / "config.json").write_text("{}")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_rounding_to_bf16_is_torchs_own_for_long_vectors():
    values = torch.randn(5 * 2**20 + 3, generator=torch.Generator().manual_seed(0))
    values[0] = -0.0
    assert (rounded_bits(values, torch.bfloat16) == as_bits(values.to(torch.bfloat16))).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--version": "9"}, "version (9) isn't there yet: fragment 0 of run run hasn't had so many rounds"),
        ({"--model": "/no/such/model"}, "model.name (/no/such/model) doesn't exist"),
        ({"--to": "hf://only-a-name"}, "must be hf://namespace/name"),
        ({"--to": "hf://buckets/me/there"}, "must be hf://namespace/name"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(cli, run, base, tmp_path, changes, said):
    options = {"--to": str(tmp_path / "out"), "--model": str(base)} | changes
    answer = cli("export", run.uri, *(word for option in options.items() for word in option))
    assert answer.code == 2 and answer.err.count("\n") == 1 and said in answer.err, answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_and_a_bucket_without_a_run_are_refused(cli, run, base, tmp_path):
    (tmp_path / "mine").write_text("kept")
    answer = cli("export", run.uri, "--to", str(tmp_path), "--model", str(base))
    assert answer.code == 2 and "exists and isn't empty" in answer.err and (tmp_path / "mine").read_text() == "kept"
    answer = cli("export", str(tmp_path / "nothing"), "--to", str(tmp_path / "out"), "--model", str(base))
    assert answer.code == 2 and "holds no run" in answer.err


def test_a_model_other_than_the_runs_is_refused_by_the_first_parameter_that_differs(cli, run, tmp_path):
    other = save_random_tiny(tmp_path / "other", intermediate_size=128)
    answer = cli("export", run.uri, "--to", str(tmp_path / "out"), "--model", str(other))
    assert answer.code == 2 and "the model given has it in shape" in answer.err and "--model" in answer.err
