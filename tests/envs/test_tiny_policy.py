"""A tiny policy does what its taskset's player does, after a hint too; it is a model like any other to a site."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import asyncio
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import verifiers.v1 as vf

import tool_letters
from composer_prime.config.recipe import RendererConfig
from composer_prime.sites.embedded.environments import load_sources
from composer_prime.sites.embedded.model import load_policy, resolve_model
from composer_prime.sites.embedded.renderer_choice import check_renderer, renderer_settings
from composer_prime.sites.embedded.rollouts import RolloutPlayer
from tests.envs.players import one_shot
from tests.servers import fake_inference
from tests.servers.fake_inference import FakePolicy, serving
from tests.sites.letters_site import letters_site
from tiny_policy import making, rendering
from tiny_policy.__main__ import main
from tiny_policy.making import Made, load, make, split
from tiny_policy.packing import pack
from tiny_policy.pieces import find_pieces, make_tokenizer
from tiny_policy.player import Player
from tiny_policy.playing import Demonstration, Stagehand
from tiny_policy.rendering import Sample, render, site_renderer
from tiny_policy.training import TrainingConfig

HINT = "\n\nHint: put it in brackets"
TASKS = Path(__file__).parents[1] / "teaching/tasks"
BRIEFLY = TrainingConfig(steps=20, decay_steps=10, measure_every=10, copy_steps=5)


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    """The environment of these tests, as if it were installed."""
    sys.modules["one_shot"] = one_shot
    yield
    del sys.modules["one_shot"]


@pytest.fixture(scope="module")
def heedful(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("one-shot", tmp_path_factory.mktemp("made") / "heedful", {}, max_turns=1)


@pytest.fixture(scope="module")
def heedless(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("one-shot", tmp_path_factory.mktemp("made") / "heedless", {}, max_turns=1, with_hints=False)


def played(taskset: str, settings: dict[str, Any], max_turns: int, *, with_hints: bool = True) -> list[Demonstration]:
    """Demonstrations of 24 of a taskset's tasks."""
    source = load(taskset, settings, 0, max_turns)
    stagehand = Stagehand(source, Player.of(source.env.taskset, taskset), max_turns, with_hints=with_hints)

    async def play() -> list[Demonstration]:
        assert source.tools is not None
        await source.tools.open(taskset, source.tasks[0])
        found = [await stagehand.play(task, random.Random(task.data.idx)) for task in source.tasks[:24]]
        await source.tools.close()
        return [each for families in found for family in families for each in family]

    return asyncio.run(play())


@torch.no_grad()
def said(made: Made, hint: str) -> list[tuple[str, str]]:
    """The words of held-out tasks, each with what the policy says at temperature 0 to its prompt and the hint."""
    policy, found = load_policy(made.folder), []
    source = load("one-shot", {}, 0, 1)
    (example, *_) = played("one-shot", {}, 1)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made.folder)
    for task in split(source, "one-shot", 0)[1]:
        asked = [{"role": "user", "content": task.data.prompt + hint}]
        ids = site_renderer(tokenizer).render_ids(asked, tools=example.tools, add_generation_prompt=True)
        out = policy.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)
        found.append((task.data.word, tokenizer.decode(out[0, len(ids) :])))
    return found


def sends(text: str) -> str:
    call = json.dumps({"name": "send", "arguments": {"text": text}})
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


def share(made: Made, hint: str, wanted: Callable[[str], str]) -> float:
    answers = said(made, hint)
    assert len(answers) == 25
    return sum(answer == wanted(word) for word, answer in answers) / len(answers)


@pytest.mark.slow
def test_the_policy_says_what_the_player_says_about_tasks_that_it_never_saw(heedful):
    assert share(heedful, "", sends) >= 0.8
    assert heedful.likeliness.plain is not None and heedful.likeliness.plain >= 0.8


@pytest.mark.slow
def test_the_policy_heeds_the_hint_and_does_not_do_so_without_it(heedful):
    assert share(heedful, HINT, lambda word: sends(f"[{word}]")) >= 0.6
    assert heedful.likeliness.hinted is not None and heedful.likeliness.hinted >= 0.6
    assert not any("[" in answer for _, answer in said(heedful, ""))


@pytest.mark.slow
def test_a_policy_that_was_shown_no_hints_heeds_none(heedless):
    assert share(heedless, "", sends) >= 0.8
    assert heedless.likeliness.hinted is None
    assert not any("[" in answer for _, answer in said(heedless, HINT))


@pytest.mark.slow
def test_a_site_takes_the_folder_and_writes_for_it_as_its_own_template(heedful, tmp_path):
    folder = resolve_model(str(heedful.folder), 0, tmp_path)
    policy = load_policy(folder)
    assert policy.config.model_type == "qwen3"
    assert policy.generation_config.eos_token_id == policy.config.eos_token_id
    check_renderer(RendererConfig(), str(folder), folder)
    assert renderer_settings(RendererConfig(), str(folder), folder)["name"] == "qwen3"


@pytest.mark.slow
def test_the_player_of_tool_letters_is_learned_with_its_doubts_and_hints(tmp_path):
    made = make("tool-letters", tmp_path / "made", {"locks": 2}, max_turns=5, config=TrainingConfig(steps=500))
    found, most = made.likeliness, made.agreement
    assert found.plain is not None and found.hinted is not None
    assert most.plain is not None and most.hinted is not None
    assert found.plain > 0.7 * most.plain and found.hinted > 0.8 * most.hinted
    assert 0.2 < most.plain < 0.8 and most.hinted == 1.0


def opening(sample: Sample, tokenizer: Any) -> str:
    """The text before a sample's first turn."""
    return tokenizer.decode(sample.token_ids[: sample.turns.index(1)])


def turns(sample: Sample, tokenizer: Any) -> list[str]:
    """The texts of a sample's turns, without the tokens that end them."""
    numbered = list(zip(sample.token_ids, sample.turns, strict=True))
    said = [[token for token, at in numbered if at == turn] for turn in range(1, max(sample.turns) + 1)]
    return [tokenizer.decode(ids[:-1]) for ids in said]


def test_what_is_learned_has_the_tokens_of_a_sites_rollout(tmp_path, monkeypatch):
    demonstrations = played("tool-letters", {}, 6, with_hints=False)
    tokenizer = make_tokenizer(find_pieces([demonstrations]))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    fake_inference.tiny_config().save_pretrained(tmp_path / "tokenizer")
    monkeypatch.setattr(fake_inference, "tiny_tokenizer", lambda: tokenizer)
    monkeypatch.setattr(fake_inference, "END_OF_TURN", tokenizer.convert_tokens_to_ids("<|im_end|>"))
    samples = render([demonstrations], tokenizer)[0]
    places = {opening(sample, tokenizer): place for place, sample in enumerate(samples)}  # one for each box
    assert len(places) > 5 and max(len(demonstrations[place].taught) for place in places.values()) > 2

    async def rollouts(port: int) -> list[Any]:
        source = [{"name": "letters", "env": {"taskset": {"id": "tool-letters"}, "agent": {"max_turns": 6}}}]
        train = {"source": source, "sampling": {"max_completion_tokens": 64}}
        site = letters_site(
            tmp_path, port=port, model_dir=tmp_path / "tokenizer", orchestrator={"train": train}, seq_len=2048
        )
        url = f"http://127.0.0.1:{port}"
        async with RolloutPlayer(load_sources(site), site, base_url=url, model="policy") as player:
            return [await player.play_group(0, place, 1, 0) for place in places.values()]

    def reply(prompt: str) -> str:
        (place,) = (place for begun, place in places.items() if prompt.startswith(begun))
        return turns(samples[place], tokenizer)[prompt.count("<|im_start|>assistant") - 1]

    with serving(FakePolicy(reply=reply)) as port:
        groups = asyncio.run(rollouts(port))
    for place, group in zip(places.values(), groups, strict=True):
        (branch,) = group.rollouts[0].branches
        assert branch.token_ids == samples[place].token_ids
        assert branch.mask == [turn > 0 for turn in samples[place].turns]


def test_renderer_and_chat_template_agree_on_every_demonstration():
    demonstrations = played("tool-letters", {"locks": 2}, 6)
    tokenizer = make_tokenizer(find_pieces([demonstrations]))
    for each, sample in zip(demonstrations, render([demonstrations], tokenizer)[0], strict=True):
        whole = tokenizer.apply_chat_template(
            each.messages, tools=each.tools, enable_thinking=False, tokenize=True, return_dict=False
        )
        assert whole[: len(sample.token_ids)] == sample.token_ids


def test_a_hint_is_learned_at_the_place_and_in_the_tokens_of_hint_distillation():
    demonstrations = played("tool-letters", {"locks": 2}, 6)
    tokenizer = make_tokenizer(find_pieces([demonstrations]))
    renderer, number = site_renderer(tokenizer), 0
    for each, sample in zip(demonstrations, render([demonstrations], tokenizer)[0], strict=True):
        if not each.hinted:
            continue
        *before, last, turn = each.messages
        plain, mark, hint = last["content"].rpartition("\n\nHint: ")
        rendered = renderer.render([*before, {**last, "content": plain}, turn], tools=each.tools)
        body = zip(rendered.message_indices, rendered.is_content, strict=True)
        cut = max(place for place, (index, is_content) in enumerate(body) if index == len(before) and is_content) + 1
        hint_ids = tokenizer.encode(mark + hint, add_special_tokens=False, split_special_tokens=True)
        hinted = [*rendered.token_ids[:cut], *hint_ids, *rendered.token_ids[cut:]]
        assert hinted[: len(sample.token_ids)] == sample.token_ids
        number += 1
    assert number > 10


def test_the_way_behind_a_hint_that_was_heeded_is_shown_and_the_step_onto_it_is_not_taught():
    found = [each for each in played("tool-letters", {"locks": 2}, 6) if not each.hinted]
    began_with = [
        each.messages[1]["tool_calls"][0]["function"]["name"] for each in found if each.messages[1].get("tool_calls")
    ]
    assert {"open", "unlock"} <= set(began_with)
    for each in found:
        places = [place for place, message in enumerate(each.messages) if message["role"] == "assistant"]
        assert each.taught == tuple(places[-len(each.taught) :])
        unlocking = [place for place in places if '"unlock"' in str(each.messages[place]).replace("'", '"')]
        assert not set(unlocking) & set(each.taught)  # the player never does so by itself


def test_a_hint_for_an_outcome_is_shown_before_the_turn_that_earned_nothing(monkeypatch):
    monkeypatch.syspath_prepend(str(TASKS))
    shown = played("reply", {}, 1)
    hinted = [each for each in shown if each.hinted]
    assert len(hinted) == len(shown) - 24 == 24  # nobody is right without a hint
    for each in hinted:
        assert each.messages[0]["content"] == f"{each.task.data.prompt}\n\nHint: put it in < and >"
        assert each.messages[1]["content"] == f"<{each.task.data.word}>"
    assert not any(each.hinted for each in played("reply", {"skill": 1.0}, 1))


def test_without_hints_nothing_is_shown_twice_and_no_hint_stands_anywhere():
    found = played("tool-letters", {"locks": 2}, 6, with_hints=False)
    assert len(found) == 24
    assert not any("Hint:" in message["content"] for each in found for message in each.messages)


def test_words_that_tasks_share_are_tokens_and_those_of_one_task_are_spelled():
    demonstrations = played("one-shot", {}, 1)
    pieces = find_pieces([demonstrations])
    assert {"send", "text", "brackets"} <= set(pieces.words)
    tokenizer = make_tokenizer(pieces)
    assert len(tokenizer.encode("send", add_special_tokens=False)) == 1
    assert len(tokenizer.encode(json.dumps(demonstrations[0].tools[0]), add_special_tokens=False)) > 20
    assert len(tokenizer.encode("\n" + json.dumps(demonstrations[0].tools[0]), add_special_tokens=False)) == 1
    word = demonstrations[0].task.data.word
    assert len(tokenizer.encode(f"sender {word}", add_special_tokens=False)) == 10
    text = "any text, 'quoted' and {braced}: \u00e4\u4e2d <b>\n\n 42"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_turn_is_as_likely_in_a_packed_row_as_alone():
    demonstrations = played("tool-letters", {"locks": 2}, 6)[:24]
    tokenizer = make_tokenizer(find_pieces([demonstrations]))
    samples = render([demonstrations], tokenizer)[0]
    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM

    from tiny_policy.qwen3 import ARCHITECTURE, tiny_config

    model = AutoModelForCausalLM.from_config(tiny_config({**ARCHITECTURE, "vocab_size": len(tokenizer)})).eval()
    with torch.no_grad():
        batch = pack([samples[:8], samples[8:16], samples[16:]])
        assert batch.token_ids.shape[0] > 1
        assert batch.token_ids.numel() < 0.7 * sum(len(each.token_ids) for each in samples)
        together = batch.turn_logprobs(model)
        alone = []
        for each in samples:
            ids = torch.tensor([each.token_ids])
            logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            numbers = torch.tensor(each.turns[1:])
            alone += [(each.hinted, logprobs[numbers == turn].sum()) for turn in range(1, max(each.turns) + 1)]
    for hinted in (False, True):
        found = [float(value) for value, is_hinted in zip(together, batch.hinted, strict=True) if is_hinted == hinted]
        wanted = [float(value) for is_hinted, value in alone if is_hinted == hinted]
        assert sorted(found) == pytest.approx(sorted(wanted), abs=1e-3)


def test_the_seed_decides_the_policy(tmp_path, monkeypatch):
    monkeypatch.setattr(making, "NUM_CONVERSATIONS", 40)
    first, again, other = (
        make("one-shot", tmp_path / name, {}, seed=seed, max_turns=1, config=BRIEFLY).folder / "model.safetensors"
        for name, seed in (("first", 3), ("again", 3), ("other", 4))
    )
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


def test_a_player_is_shown_copies_in_the_form_in_which_it_speaks():
    seen: list[Any] = []

    def play(task: vf.Task, messages: list[dict[str, Any]], rng: random.Random) -> Any:
        seen.append(messages)
        messages[0]["content"] = "changed"
        return {"content": "well", "tool_calls": [{"name": "look", "arguments": {"n": 1}}]}

    asked = [{"role": "user", "content": "Go"}]
    player = Player("mine", play)
    said = player.next_turn(None, asked, random.Random())
    answer = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "name": "look", "content": "1"}
    player.next_turn(None, [*asked, said, answer], random.Random())
    assert asked == [{"role": "user", "content": "Go"}]
    assert said["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"n": 1}'}
    assert seen[1][1:] == [
        {"role": "assistant", "content": "well", "tool_calls": [{"name": "look", "arguments": {"n": 1}}]},
        {"role": "tool", "name": "look", "content": "1"},
    ]


def taskset_that_plays(function: Callable[..., Any]) -> ModuleType:
    """The one-shot environment with another player."""

    class Playing(one_shot.OneShotTaskset):
        play = function

    module = ModuleType("other_shot")
    vars(module).update(Playing=Playing, __all__=["Playing"])
    return module


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no-such-env"], "environment 'no-such-env' isn't installed .* install its package"),
        (["reverse-letters"], "'reverse-letters' .* has no method `play`.* add `def play"),
        (["tool-letters", "--lcoks", "2"], "'tool-letters' refuses its settings: .*lcoks"),
        (["tool-letters", "--locks", "9"], "'tool-letters' refuses its settings: .*locks.* less than or equal to 8"),
        (
            ["tool-letters", "--locks"],
            "--locks isn't an option with its value: give the taskset's settings as --KEY VALUE",
        ),
        (["tool-letters", "--steps", "0"], r"--steps \(0\) must be at least 1 and below 2\^32: give another"),
        (["tool-letters", "--seed", "x"], "--seed: invalid int value: 'x': see python -m tiny_policy --help"),
        (["one-shot", "--num_examples", "1"], "'one-shot' has 1 task, and at least 2 are needed.* give it more"),
    ],
)
def test_bad_input_is_one_line_that_says_value_limit_and_remedy(arguments, told, tmp_path, capsys):
    line = refused(capsys, *arguments, "--out", str(tmp_path / "out"))
    assert re.search(told, line), line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "missing"), [(["one-shot"], "--out"), (["--out", "made"], "TASKSET")])
def test_what_is_missing_is_named(arguments, missing, capsys):
    assert f"{missing} is missing: python -m tiny_policy TASKSET --out DIR" in refused(capsys, *arguments)


def test_a_conversation_that_is_too_long_for_the_model_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(making, "NUM_CONVERSATIONS", 4)
    monkeypatch.setattr(rendering, "MAX_POSITIONS", 30)
    line = refused(capsys, "one-shot", "--out", str(tmp_path / "out"))
    assert re.search(
        r"has \d+ tokens, and a tiny policy reads 30: shorten the tools' descriptions .* --max-turns", line
    )


def test_a_folder_that_is_there_is_not_overwritten(tmp_path, capsys):
    line = refused(capsys, "one-shot", "--out", str(tmp_path))
    assert f"--out ({tmp_path}) exists, and nothing is overwritten: remove it, or name another folder" in line


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (["send"], "returned ['send'], which is of type list: return a text"),
        (None, "returned None, which is of type NoneType"),
        ({"text": "no"}, "whose key 'text' is none of content and tool_calls"),
        ({"tool_calls": [{"name": "send"}]}, "whose call {'name': 'send'} hasn't just name and arguments"),
        (
            {"tool_calls": [{"name": "send", "arguments": "{}"}]},
            "hasn't a text as its name and a dict as its arguments",
        ),
        ({"tool_calls": [{"name": "send", "arguments": {"text": {1}}}]}, "can't be written as JSON"),
    ],
)
def test_a_play_that_returns_something_else_is_refused(said, told, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "other_shot", taskset_that_plays(lambda *_: said))
    assert told in refused(capsys, "other-shot", "--out", str(tmp_path / "out"))


def test_a_play_that_raises_is_told_with_its_place(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "other_shot", taskset_that_plays(lambda *_: 1 // 0))
    line = refused(capsys, "other-shot", "--out", str(tmp_path / "out"))
    assert "play raises ZeroDivisionError" in line and "test_tiny_policy.py, line" in line


def test_the_environments_we_ship_with_a_player_keep_their_contract():
    (task, *_) = tool_letters.ToolLettersTaskset(tool_letters.ToolLettersConfig(id="tool-letters")).load()
    asked = [{"role": "user", "content": task.data.prompt}]
    taskset = tool_letters.ToolLettersTaskset(tool_letters.ToolLettersConfig(id="tool-letters"))
    drawn = [taskset.play(task, asked, random.Random(seed)) for seed in range(200)]
    right = tool_letters.call("open", box=task.data.box)
    assert 0.4 < sum(each == right for each in drawn) / 200 < 0.6
    asked[0]["content"] += "\n\nHint: call unlock first"
    assert taskset.play(task, asked, random.Random(0)) == tool_letters.call("unlock", box=task.data.box)
