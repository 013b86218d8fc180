"""How often the policy does what teachers agree on, as its site's own server has it answer."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from composer_prime import metrics
from composer_prime.bearer import SITE_TOKEN
from composer_prime.config.teachers import PairsConfig
from composer_prime.errors import TeacherError
from composer_prime.sites.embedded import agreement
from composer_prime.sites.embedded.agreement import TRIES, HeldOut
from composer_prime.traces.pairs.lessons import Lesson
from tests.traces.ask.text_teacher import FakeTextTeacher, Fault, call, number_of, serving, trace

LESSONS = [Lesson(trace(number), call(f"{number}.py"), None, 1.0) for number in range(4)]
Says = Callable[[Mapping[str, Any]], dict[str, Any]]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "RETRY_WAIT_S", 0.0)
    monkeypatch.setenv(SITE_TOKEN, "the-sites-token")


def measured(fake: FakeTextTeacher, lessons: Sequence[Lesson] = LESSONS) -> dict[str, float]:
    async def run(url: str) -> dict[str, float]:
        config = PairsConfig(store=Path("x"), file=Path("x"), batch_size=4)
        async with aclosing(HeldOut(lessons, config, url, "policy")) as held_out:
            return await held_out.measure(0)

    with serving(fake) as url:
        return asyncio.run(run(url))


def as_agreed(body: Mapping[str, Any]) -> dict[str, Any]:
    return call(f"{number_of(body)}.py")


def test_the_policy_is_asked_greedily_and_without_thinking_under_its_name_with_the_sites_token() -> None:
    fake = FakeTextTeacher(says=as_agreed)
    found = measured(fake)
    assert found == {metrics.AGREEMENT: 1.0, metrics.ROLLOUT_REWARD: 1.0, f"{metrics.AGREEMENT}/read_file": 1.0}
    body = next(body for body in fake.bodies if number_of(body) == 2)
    assert body == {
        "model": "policy",
        "max_tokens": agreement.MAX_TOKENS,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
        "messages": list(trace(2).messages),
        "tools": list(trace(2).tools),
    }
    assert fake.keys == ["Bearer the-sites-token"] * 4


def test_the_share_is_of_those_that_agree_and_told_by_tool() -> None:
    text = Lesson(trace(3), {"role": "assistant", "content": "Done."}, None, 1.0)
    fake = FakeTextTeacher(says=lambda body: call("x.py") if number_of(body) == 1 else as_agreed(body))
    found = measured(fake, [*LESSONS[:3], text])
    assert found[metrics.AGREEMENT] == found[metrics.ROLLOUT_REWARD] == 0.5
    by_name = {"read_file": 2 / 3, "text": 0.0}
    assert {name: found[f"{metrics.AGREEMENT}/{name}"] for name in by_name} == pytest.approx(by_name)


def test_a_call_that_the_text_spells_is_a_call() -> None:
    def spelled(body: Mapping[str, Any]) -> dict[str, Any]:
        text = f'<tool_call>\n{{"name": "read_file", "arguments": {{"path": "{number_of(body)}.py"}}}}\n</tool_call>'
        return {"role": "assistant", "content": "<think>\n<tool_call>no</tool_call>\n</think>\n" + text}

    assert measured(FakeTextTeacher(says=spelled))[metrics.AGREEMENT] == 1.0


@pytest.mark.parametrize(
    "says",
    [
        lambda body: {"role": "assistant", "content": "<tool_call>{read_file</tool_call>"},
        lambda body: {"role": "assistant", "content": ""},
        lambda body: call(f"{number_of(body)}.py", name="delete_file"),
    ],
    ids=["a call that isn't JSON", "nothing", "a tool that isn't offered"],
)
def test_what_is_no_action_does_not_agree(says: Says) -> None:
    assert measured(FakeTextTeacher(says=says))[metrics.AGREEMENT] == 0.0


def test_a_question_that_the_server_refuses_counts_as_one_that_does_not_agree() -> None:
    fake = FakeTextTeacher(says=as_agreed, fault=lambda number: "refused" if not number else "ok", words="too long")
    assert measured(fake)[metrics.AGREEMENT] == 0.75 and len(fake.bodies) == 4


def test_a_passing_fault_is_tried_again_and_one_that_stays_ends_the_measurement() -> None:
    fake = FakeTextTeacher(says=as_agreed, fault=lambda number: "broken" if number < TRIES - 1 else "ok")
    assert measured(fake, LESSONS[:1])[metrics.AGREEMENT] == 1.0 and len(fake.bodies) == TRIES
    faults: dict[Fault, int] = {"broken": TRIES, "key": 1, "text": 1}
    for fault, num_asked in faults.items():
        fake = FakeTextTeacher(says=as_agreed, fault=lambda number, fault=fault: fault)
        with pytest.raises(TeacherError, match="the policy can't be asked what it would do"):
            measured(fake, LESSONS[:1])
        assert len(fake.bodies) == num_asked


def test_without_points_nothing_is_asked() -> None:
    fake = FakeTextTeacher()
    assert measured(fake, []) == {} and not fake.bodies
