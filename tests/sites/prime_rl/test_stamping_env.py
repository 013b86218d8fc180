"""Stamping through real verifiers environments, with our inference server as the policy and as its teachers."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import verifiers.v1 as vf
from transformers import PreTrainedModel
from verifiers.v1.graph import MessageNode

from composer_prime.config.teachers import HintTeacher
from composer_prime.errors import BadInput, TeacherRefused
from composer_prime.hints.contexts import TEMPLATES
from composer_prime.sites.embedded.environments import load_sources
from composer_prime.sites.embedded.model import load_policy
from composer_prime.sites.embedded.ports import claim_port
from composer_prime.sites.embedded.rollouts import RolloutPlayer, read_episode
from composer_prime.sites.prime_rl import stamping_env
from composer_prime.teachers.candidates import Candidates
from composer_prime.teachers.carrier import unpack
from composer_prime.teachers.gate import Gate
from composer_prime.teachers.sampled import log_mixture
from composer_prime.teachers.served import ServedModel
from tests.servers.fake_chat import FakeChat, serving_chat
from tests.servers.fake_teacher import FIRST_OTHER, FakeTeacher, serving_teacher
from tests.sites.letters_site import letters_site
from tests.sites.served_policy import serving_policy
from tests.sites.tiny_folder import save_random_tiny, score
from tiny_policy.qwen3 import tiny_tokenizer

CONTEXT = 512
CLOSE = 1e-4
"""Nats between a decoder's logprob, token by token over a cache, and that of one forward over all tokens."""

Play = Callable[..., list[vf.Episode]]


class Models:
    """A policy, the one that it was at first, and a teacher, with random weights: served, and at hand to be asked."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.policy_dir = save_random_tiny(root / "policy")
        teacher_dir, first_dir = (
            save_random_tiny(root / name, seed=seed) for seed, name in ((1, "teacher"), (2, "first"))
        )
        self.policy, self.teacher, self.first = map(load_policy, (self.policy_dir, teacher_dir, first_dir))
        held: dict[HintTeacher, Path] = {"frozen": first_dir, "ema": teacher_dir}
        self.policy_port = stack.enter_context(serving_policy(self.policy_dir, max_model_len=CONTEXT, held=held))
        self.teacher_port = stack.enter_context(serving_policy(teacher_dir, name="teacher", max_model_len=CONTEXT))

    def table(self, name: str, port: int, **settings: Any) -> dict[str, Any]:
        return {"name": name, "base_url": f"http://127.0.0.1:{port}/v1", **settings}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with ExitStack() as stack:
        yield Models(tmp_path_factory.mktemp("models"), stack)


@pytest.fixture
def play(models: Models, tmp_path: Path, run_async: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Play:
    """`play(taskset, replay=..., hints=...)` plays every task of a taskset, two at most, by the embedded site's way."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))

    async def episodes(settings: Any) -> list[vf.Episode]:
        (source,) = load_sources(settings)
        url = f"http://127.0.0.1:{models.policy_port}"
        async with RolloutPlayer([source], settings, base_url=url, model="policy") as player:
            slots = [source.env.slots(task)[0] for task in source.tasks[:2]]
            return list(await asyncio.gather(*(source.env.run_slot(slot, player._context) for slot in slots)))

    def run(taskset: dict[str, Any], *, top_k: int = 8, **tables: Any) -> list[vf.Episode]:
        tables = {"max_steps": 2, **tables}  # too few rollouts to compare teachers: all are heard
        loss = {"loss": {"kwargs": {} if top_k else {"replay_tau": 0.1}}, "distill": {"top_k": top_k}}
        settings = letters_site(
            tmp_path, port=models.policy_port, model_dir=models.policy_dir, taskset=taskset, trainer=loss, **tables
        )
        return run_async(episodes(settings))

    return run


def sampled_node(episode: vf.Episode) -> Any:
    (node,) = [node for node in episode.traces[0].nodes if any(node.mask)]
    return node


def scored(model: PreTrainedModel, episode: vf.Episode) -> list[float]:
    """The sampled tokens' logprobs from one plain forward over the conversation."""
    branch = episode.traces[0].branches[0]
    first = list(branch.sampled_mask).index(True)
    return score(model, branch.token_ids[:first], branch.token_ids[first:])


def test_the_policy_as_its_own_teacher_gives_its_own_logprobs(play: Play, models: Models) -> None:
    episodes = play({"id": "reverse-letters"}, top_k=0, replay={"teachers": [models.table("self", models.policy_port)]})
    for episode in episodes:
        assert episode.ok, episode.errors
        node = sampled_node(episode)
        assert len(node.reference_logprobs) == sum(node.mask) > 1
        assert node.reference_logprobs == pytest.approx(node.logprobs, abs=CLOSE)
        assert node.loss_weights is None
        (branch,) = read_episode(episode).branches  # pyright: ignore[reportAttributeAccessIssue]
        assert branch.ref_logprobs is not None
        assert list(branch.ref_logprobs[-len(node.logprobs) :]) == list(node.reference_logprobs)


def test_two_teachers_are_the_log_of_their_weighted_mixture(play: Play, models: Models) -> None:
    tables = [models.table("a", models.policy_port, weight=3.0), models.table("b", models.teacher_port, weight=1.0)]
    for episode in play({"id": "reverse-letters"}, top_k=0, replay={"teachers": tables}):
        told = [(3.0, scored(models.policy, episode)), (1.0, scored(models.teacher, episode))]
        expected = log_mixture(told, len(told[0][1]))
        assert sampled_node(episode).reference_logprobs == pytest.approx(expected, abs=CLOSE)
        assert expected != pytest.approx(told[0][1], abs=10 * CLOSE)
        rollout = read_episode(episode)
        assert rollout.streams == {  # pyright: ignore[reportAttributeAccessIssue]
            "replay/tokens": len(expected),
            "replay/unanswered_tokens": 0,
            "replay/dropped_tokens": 0,
            "replay/dropped_tokens/a": 0,
            "replay/dropped_tokens/b": 0,
            "teacher/a/weight": 1,
            "teacher/b/weight": 1,
        }


def test_a_teacher_that_fails_in_the_run_drops_out_and_is_counted(
    play: Play, models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    failing = FakeTeacher()

    def fail_after_the_check(answer: dict[str, Any]) -> dict[str, Any]:
        return answer if len(failing.bodies) <= 3 else {}

    failing.change = fail_after_the_check
    with serving_teacher(failing) as url, caplog.at_level(logging.WARNING, "composer_prime.teachers"):
        tables = [models.table("self", models.policy_port), {"name": "bad", "base_url": url}]
        episodes = play({"id": "reverse-letters"}, top_k=0, replay={"teachers": tables})
    for episode in episodes:
        assert episode.ok
        node = sampled_node(episode)
        assert node.reference_logprobs == pytest.approx(node.logprobs, abs=CLOSE)
        assert episode.traces[0].metrics["replay/dropped_tokens/bad"] == sum(node.mask)
    assert "teacher=bad" in caplog.text and "another shape than vLLM's" in caplog.text


def told(node: Any) -> tuple[Candidates, Candidates]:
    """What replay's and hints' teachers say to a node's sampled tokens."""
    replay, hint = unpack(node.routed_experts)
    sampled = np.flatnonzero(node.mask)
    for stream in (replay, hint):
        assert not np.delete(stream.has_teacher, sampled).any(), "nothing is said to what wasn't sampled"
    return replay[sampled], hint[sampled]


def assert_said(found: Candidates, model: PreTrainedModel, prompt: list[int], sampled: list[int], k: int = 8) -> None:
    """The candidates are the k likeliest of one plain forward."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.float().log_softmax(-1).topk(k)
    assert found.logprobs == pytest.approx(expected.values.numpy(), abs=CLOSE)
    gathered = logits.float().log_softmax(-1).gather(1, torch.from_numpy(found.ids).long())
    assert found.logprobs == pytest.approx(gathered.numpy(), abs=CLOSE), "ids and numbers belong together"


def hinted(failed: vf.Episode, hint: str) -> tuple[list[int], list[int]]:
    """The tokens before the failed call with that hint in them, and the call's."""
    tokenizer, branch, node = tiny_tokenizer(), failed.traces[0].branches[0], sampled_node(failed)
    before = str(tokenizer.decode(branch.token_ids[: list(branch.sampled_mask).index(True)]))
    asked = "What is the name?"
    assert before.count(asked) == 1
    prompt = tokenizer.encode(before.replace(asked, f"{asked}\n\n{hint}"), add_special_tokens=False)
    return prompt, [token for token, is_sampled in zip(node.token_ids, node.mask, strict=True) if is_sampled]


HINT = TEMPLATES["traceback"].format(error="KeyError: 'name'", tool="lookup")


def test_a_hint_stands_before_the_call_that_failed_and_the_first_policy_is_asked_under_it(
    play: Play, models: Models
) -> None:
    failed, fine = play({"id": "failing-tool"}, hints={})
    replay, hint = told(sampled_node(failed))
    prompt, sampled = hinted(failed, HINT)
    assert_said(hint, models.first, prompt, sampled)
    assert not replay.has_teacher.any()
    metrics = failed.traces[0].metrics
    assert metrics["hints/error_sites"] == 1 and metrics["hints/tokens"] == len(sampled)
    assert not any(stream.has_teacher.any() for stream in told(sampled_node(fine)))
    assert fine.traces[0].metrics["hints/error_sites"] == 0
    (branch,) = read_episode(failed).branches  # pyright: ignore[reportAttributeAccessIssue]
    assert branch.is_taught and branch.candidates is not None
    assert branch.candidates.shape == (len(branch.token_ids), 2, 8)
    assert not any(one.is_taught for one in read_episode(fine).branches)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("hints", "asked"),
    [
        ({"teacher": "live", "allow_live": True}, "policy"),
        ({"teacher": "ema", "ema_decay": 0.9}, "teacher"),
        ({"base_url": "http://127.0.0.1:{teacher_port}"}, "teacher"),
    ],
    ids=["the policy of the moment", "the average beside it", "a server of its own"],
)
def test_whom_the_recipe_names_is_asked_for_hints(play: Play, models: Models, hints: Any, asked: str) -> None:
    if "base_url" in hints:
        hints = {"base_url": hints["base_url"].format(teacher_port=models.teacher_port)}
    failed, _ = play({"id": "failing-tool"}, hints=hints)
    assert_said(told(sampled_node(failed))[1], getattr(models, asked), *hinted(failed, HINT))


@pytest.mark.parametrize("is_same", [True, False])
def test_a_server_of_hints_is_given_its_key_and_its_connections_are_closed_also_when_it_is_refused(
    play: Play, monkeypatch: pytest.MonkeyPatch, is_same: bool
) -> None:
    closed, close = [], ServedModel.close

    async def noted(served: ServedModel) -> None:
        closed.append(served.base_url)
        await close(served)

    monkeypatch.setattr(ServedModel, "close", noted)
    monkeypatch.setenv("TEACHER_KEY", "sesame")
    teacher = FakeTeacher(decode=lambda text: text if is_same else text.upper(), key="Bearer sesame")
    with serving_teacher(teacher) as url:
        hints = {"base_url": url, "api_key_var": "TEACHER_KEY"}
        if is_same:
            failed, _ = play({"id": "failing-tool"}, hints=hints)
            assert failed.traces[0].metrics["hints/tokens"] == sum(sampled_node(failed).mask)
        else:
            with pytest.raises(TeacherRefused, match="teacher hints has another tokenizer than the policy"):
                play({"id": "failing-tool"}, hints=hints)
    assert closed == [url]


def test_teachers_and_hints_are_streams_of_their_own(play: Play, models: Models) -> None:
    teachers = {"teachers": [models.table("b", models.teacher_port)]}
    failed, fine = play({"id": "failing-tool"}, replay=teachers, hints={})
    for episode in (failed, fine):
        branch = episode.traces[0].branches[0]
        start = list(branch.sampled_mask).index(True)
        prompt, sampled = branch.token_ids[:start], sum(branch.sampled_mask)
        assert_said(told(sampled_node(episode))[0], models.teacher, prompt, branch.token_ids[start : start + sampled])
    assert_said(told(sampled_node(failed))[1], models.first, *hinted(failed, HINT))
    assert not told(sampled_node(fine))[1].has_teacher.any()


def test_two_teachers_distributions_are_mixed(play: Play, models: Models) -> None:
    tables = [models.table("a", models.policy_port, weight=3.0), models.table("b", models.teacher_port, weight=1.0)]
    for episode in play({"id": "reverse-letters"}, replay={"teachers": tables}, top_k=64):
        branch = episode.traces[0].branches[0]
        start = list(branch.sampled_mask).index(True)
        with torch.no_grad():
            logits = [
                model(torch.tensor([list(branch.token_ids)])).logits[0, start - 1 : -1].float()
                for model in (models.policy, models.teacher)
            ]
        mixture = (0.75 * logits[0].softmax(-1) + 0.25 * logits[1].softmax(-1)).log()
        replay, _ = told(sampled_node(episode))
        ids = torch.from_numpy(replay.ids).long().clamp(min=0)
        expected = mixture.gather(1, ids).numpy()
        listed = [
            torch.zeros_like(one).scatter(1, one.topk(64).indices, 1.0).gather(1, ids).bool().numpy() for one in logits
        ]
        both = (replay.ids >= 0) & listed[0] & listed[1]
        assert both.sum() > 10 * len(both)
        assert replay.logprobs[both] == pytest.approx(expected[both], abs=CLOSE)


def test_teachers_that_name_tokens_which_the_policy_lacks_are_stamped_without_them(play: Play) -> None:
    lacking = {str(FIRST_OTHER): "265", str(FIRST_OTHER + 1): "2147483646"}

    def rename(answer: dict[str, Any]) -> dict[str, Any]:
        entries = answer["choices"][0]["prompt_logprobs"]
        entries[1:] = [{lacking.get(token, token): one for token, one in entry.items()} for entry in entries[1:]]
        return answer

    with serving_teacher(FakeTeacher(change=rename)) as url:
        teachers = [{"name": "odd", "base_url": url}]
        failed, _ = play({"id": "failing-tool"}, replay={"teachers": teachers}, hints={"base_url": url})
    assert failed.ok, failed.errors
    for node in failed.traces[0].nodes:
        for stream in told(node):
            assert stream.ids.max(initial=0) < 265
    metrics = failed.traces[0].metrics
    assert all((metrics[name] or 0) > 0 for name in ("replay/tokens", "hints/tokens"))


def test_a_hint_that_does_not_fit_the_context_is_left_out_and_counted(
    play: Play, models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "composer_prime.sites.prime_rl"):
        failed, _ = play({"id": "failing-tool"}, hints={"templates": {"traceback": "x" * CONTEXT}})
    assert failed.ok and not told(sampled_node(failed))[1].has_teacher.any()
    metrics = failed.traces[0].metrics
    assert (metrics["hints/error_sites"], metrics["hints/too_long"], metrics["hints/tokens"]) == (1, 1, 0)
    assert f"must be below the teacher's context={CONTEXT}: left out" in caplog.text


def test_a_model_writes_the_hint_where_neither_recipe_nor_environment_says_one(
    play: Play, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRITER_KEY", "sesame")
    chat = FakeChat(says=" Ask for\nthe name first. ", key="sesame")
    with serving_chat(chat) as port:
        writer = {"base_url": f"http://127.0.0.1:{port}/v1", "model": "big", "api_key_var": "WRITER_KEY"}
        failed, fine = play({"id": "failing-tool"}, hints={"writer": writer})
        request = chat.bodies[-1]["messages"][1]["content"]
        assert "What is the name?" in request and "KeyError: 'name'" in request
        own = {"templates": {"traceback": "Hint: think"}, "writer": writer}
        templated, _ = play({"id": "failing-tool"}, hints=own)
    asked = [body["messages"][1]["content"] for body in chat.bodies if "KeyError" in str(body)]
    assert len(asked) == 1, "of the two runs the one without a template of its own asked, and once"
    assert_said(told(sampled_node(failed))[1], models.first, *hinted(failed, "Hint: Ask for the name first."))
    assert (failed.traces[0].metrics["hints/written"], fine.traces[0].metrics["hints/written"]) == (1, 0)
    assert_said(told(sampled_node(templated))[1], models.first, *hinted(templated, "Hint: think"))


def test_a_writer_is_not_asked_while_hints_are_not_heard_and_no_probe_is_due(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "wants_hints", lambda gate: False)
    with serving_chat(chat := FakeChat(says="Ask.")) as port:
        failed, _ = play(
            {"id": "failing-tool"}, hints={"writer": {"base_url": f"http://127.0.0.1:{port}", "model": "b"}}
        )
    assert len(chat.bodies) == 1, "the trial before the first rollout"
    metrics = failed.traces[0].metrics
    assert (metrics["hints/written"], metrics["hints/unwritten"], metrics["hints/error_sites"]) == (0, 0, 1)


def test_a_writer_that_fails_in_the_run_leaves_our_template_and_is_counted(play: Play, models: Models) -> None:
    chat = FakeChat()

    def refuses_after_the_trial(body: dict[str, Any]) -> None:
        chat.status = 404

    chat.bodies = Noticing(refuses_after_the_trial)
    with serving_chat(chat) as port:
        writer = {"base_url": f"http://127.0.0.1:{port}", "model": "big"}
        failed, _ = play({"id": "failing-tool"}, hints={"writer": writer})
    metrics = failed.traces[0].metrics
    assert (metrics["hints/written"], metrics["hints/unwritten"], metrics["hints/error_sites"]) == (0, 1, 1)
    assert_said(told(sampled_node(failed))[1], models.first, *hinted(failed, HINT))


class Noticing(list):
    """A list that says what is appended."""

    def __init__(self, notice: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._notice = notice

    def append(self, item: dict[str, Any]) -> None:
        super().append(item)
        self._notice(item)


def test_a_writer_that_can_not_be_used_is_refused_before_a_rollout(play: Play) -> None:
    with serving_chat(FakeChat(status=404)) as port, pytest.raises(TeacherRefused, match=r"hints.writer can't be used"):
        play({"id": "failing-tool"}, hints={"writer": {"base_url": f"http://127.0.0.1:{port}", "model": "big"}})


@pytest.mark.parametrize(
    ("hint", "answer", "leaked"),
    [
        ("the vault holds Sesame", "sesame", True),
        ("the vault holds sesames", "sesame", False),
        ("ask for the name first", "name", False),  # the prompt says so, too
        ("use pin c", "c", False),
        ("take route 12 first", "12", False),
        ("the answer is c", "c", True),
        ("say: c", "c", True),
        ("Reply with pin c", "c", True),
        ("x = 12", "12", True),
        ("use pin c", "", False),
    ],
)
def test_a_hint_that_gives_the_tasks_answer_away_is_not_taught_and_counted(
    play: Play, hint: str, answer: str, leaked: bool
) -> None:
    text = json.dumps({"error": "no such field", "error_kind": "error", "hint": hint})
    failed, _ = play({"id": "failing-tool", "error": text, "solution": answer}, hints={})
    metrics = failed.traces[0].metrics
    assert (metrics["hints/leaks"], metrics["hints/error_sites"]) == (leaked, not leaked)
    assert told(sampled_node(failed))[1].has_teacher.any() == (not leaked)


def test_what_can_not_work_is_refused_before_a_rollout(play: Play, models: Models) -> None:
    with serving_teacher(FakeTeacher(decode=lambda text: text.upper())) as url:
        teachers = [models.table("self", models.policy_port), {"name": "odd", "base_url": url}]
        with pytest.raises(TeacherRefused, match="teacher odd has another tokenizer than the policy"):
            play({"id": "reverse-letters"}, replay={"teachers": teachers})
    gone = {"name": "gone", "base_url": f"http://127.0.0.1:{claim_port(None, set())}"}
    with pytest.raises(TeacherRefused, match="teacher gone can't be used"):
        play({"id": "reverse-letters"}, replay={"teachers": [gone]})


DATA: dict[str, Any] = {"id": "composer-prime", "taskset": {"id": "reverse-letters"}, "tokenizer": "x"}
EMBEDDED = {"top_k": 8, "hints": {}, "embedded": True}


def test_the_environment_is_found_by_its_id_and_gives_distributions_only_where_it_is_asked_for_them(
    models: Models,
) -> None:
    data = {**DATA, "teachers": [models.table("self", models.policy_port)], "embedded": True}
    config = vf.resolve_env_config(data)
    assert vf.resolve_env_config(config.model_dump(mode="json")) == config
    assert type(vf.load_environment(config)).__name__ == "StampingEnv"
    assert config.top_k == 0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"needs env.teachers or env.hints"):
        vf.resolve_env_config({**data, "teachers": []})
    with pytest.raises(ValueError, match=r"env.stamp_ref_kl is for teachers that give one number a token"):
        vf.resolve_env_config({**data, "top_k": 8, "stamp_ref_kl": True})


def test_a_teacher_that_nobody_serves_is_refused_by_what_to_set() -> None:
    vf.resolve_env_config({**DATA, **EMBEDDED})
    live = {"teacher": "live", "allow_live": True}
    for hints in ({"base_url": "http://10.0.0.6:8000"}, live):
        vf.resolve_env_config({**DATA, "top_k": 8, "hints": hints})
    for hints in ({}, {"teacher": "ema"}):
        with pytest.raises(ValueError, match=r"env.hints.base_url must be given.*a server of its own"):
            vf.resolve_env_config({**DATA, "top_k": 8, "hints": hints})


def test_a_taskset_with_an_environment_of_its_own_is_refused(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_env_letters.py").write_text(
        "from reverse_letters import ReverseLettersTaskset\n"
        "from verifiers.v1.envs.best_of_n import BestOfNEnv\n"
        '__all__ = ["ReverseLettersTaskset", "BestOfNEnv"]\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    data = {**DATA, "taskset": {"id": "own-env-letters"}, **EMBEDDED}
    with pytest.raises(BadInput, match=r"taskset own-env-letters brings its own environment \(BestOfNEnv\)"):
        vf.load_environment(vf.resolve_env_config(data))


def test_a_verifiers_that_has_no_place_for_the_numbers_is_refused(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vf.resolve_env_config({**DATA, **EMBEDDED})
    monkeypatch.delitem(MessageNode.__pydantic_fields__, "reference_logprobs")
    with pytest.raises(BadInput, match=r"verifiers .* has no reference_logprobs on its message nodes"):
        vf.load_environment(config)


@pytest.mark.parametrize("streams", [True, False])
def test_a_verifiers_whose_server_sends_messages_before_they_are_stamped_is_refused(
    models: Models, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    monkeypatch.setattr(stamping_env, "find_spec", lambda name: object() if streams else None)
    config = vf.resolve_env_config({**DATA, "teachers": [models.table("self", models.policy_port)]})
    refused = pytest.raises(BadInput, match=r"verifiers .* sends a rollout's messages as they come.*below 0\.4")
    with refused if streams else nullcontext():
        vf.load_environment(config)
