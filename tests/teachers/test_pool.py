"""Teachers behind real HTTP servers: asked at once, dropped one by one, refused before anything starts."""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.responses import Response

from composer_prime.config.teachers import TeacherConfig
from composer_prime.errors import TeacherRefused
from composer_prime.sites.embedded.ports import claim_port
from composer_prime.teachers import served
from composer_prime.teachers.candidates import EMPTY
from composer_prime.teachers.pool import Score, TeacherPool, TeacherTable
from composer_prime.teachers.sampled import usable
from composer_prime.teachers.wire import MOST_IDS
from tests.servers.fake_teacher import FIRST_OTHER, FakeTeacher, meeting, serving_teacher, told_logprob
from tiny_policy.qwen3 import tiny_tokenizer

TOKENS = [7, 3, 3, 250, 11]
TOLD = [told_logprob(place, token) for place, token in enumerate(TOKENS)]


@pytest.fixture
def serve() -> Iterator[Callable[..., list[TeacherConfig]]]:
    """`serve(teacher, ...)` starts servers and gives the tables that name them t0, t1, ..., with long time-outs."""
    with ExitStack() as stack:

        def start(*teachers: FakeTeacher, **settings: Any) -> list[TeacherConfig]:
            urls = [stack.enter_context(serving_teacher(teacher)) for teacher in teachers]
            defaults: dict[str, Any] = {"timeout_s": 30.0}
            return [TeacherConfig(name=f"t{i}", base_url=url, **(defaults | settings)) for i, url in enumerate(urls)]

        yield start


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "RETRY_WAIT_S", 0.0)


def score(configs: list[TeacherConfig], top_k: int = 0, num_ids: int = MOST_IDS) -> list[Score]:
    async def ask() -> list[Score]:
        pool = TeacherPool(configs, top_k, num_ids)
        try:
            return await pool.score(TOKENS)
        finally:
            await pool.close()

    return asyncio.run(ask())


def check(configs: list[TeacherConfig], top_k: int = 8, table: TeacherTable = "replay.teachers") -> None:
    async def ask() -> None:
        pool = TeacherPool(configs, top_k, table=table)
        try:
            await pool.check(tiny_tokenizer())
        finally:
            await pool.close()

    asyncio.run(ask())


@pytest.mark.parametrize("completions", [True, False])
def test_the_likeliest_tokens_are_read_with_the_largest_first_by_either_route(serve, completions: bool) -> None:
    teacher = FakeTeacher(completions=completions)
    (answer,) = score(serve(teacher), top_k=3)
    assert answer.scores is not None
    found = answer.scores.candidates
    assert found.has_teacher.tolist() == [False, *[True] * (len(TOKENS) - 1)]
    sampling = {"temperature": 1.0, "prompt_logprobs": 3}
    for place, entry in enumerate(teacher.entries(TOKENS, sampling)):
        if place:
            likeliest = sorted(((one["logprob"], token) for token, one in entry.items()), reverse=True)[:3]
            assert found.ids[place].tolist() == [int(token) for _, token in likeliest]
            assert found.logprobs[place].tolist() == pytest.approx([logprob for logprob, _ in likeliest])


def test_an_entry_that_is_no_distribution_is_left_out_alone(serve) -> None:
    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        entries = answer["choices"][0]["prompt_logprobs"]
        if len(entries) != len(TOKENS):  # the route is tried with two tokens
            return answer
        entries[1]["100"]["logprob"] = math.nan
        entries[2]["100"]["logprob"] = 0.5
        entries[3]["100"]["logprob"] = entries[3]["101"]["logprob"] = -0.01
        return answer

    (answer,) = score(serve(FakeTeacher(change=spoil)), top_k=3)
    assert answer.scores is not None
    assert answer.scores.candidates.has_teacher.tolist() == [False, False, False, False, True]


def test_a_candidate_outside_the_policys_vocabulary_is_left_out(serve) -> None:
    (answer,) = score(serve(FakeTeacher()), top_k=3, num_ids=FIRST_OTHER + 1)
    assert answer.scores is not None
    assert set(answer.scores.candidates.ids[1:].flatten()) == {3, 11, FIRST_OTHER, EMPTY}


@pytest.mark.parametrize("completions", [True, False])
def test_every_tokens_own_logprob_is_read_by_either_route(serve, completions: bool) -> None:
    teacher = FakeTeacher(completions=completions)
    (answer,) = score(serve(teacher))
    assert answer.failure is None and answer.scores is not None
    assert math.isnan(answer.scores.logprobs[0])
    assert answer.scores.logprobs[1:] == TOLD[1:]
    sent = teacher.bodies[-1]
    assert sent["prompt" if completions else "token_ids"] == TOKENS
    assert sent["model"] == "fake"


def test_all_teachers_are_asked_before_any_has_answered(serve) -> None:
    teachers = [FakeTeacher() for _ in range(4)]
    configs = serve(*teachers)
    check(configs)
    hold = meeting(4)
    for teacher in teachers:
        teacher.hold = hold
    # One at a time, the first would wait for the others for ever: a barrier of four opens only to four requests.
    found = asyncio.run(_score_known(configs))
    assert [answer.failure for answer in found] == [None] * 4


async def _score_known(configs: list[TeacherConfig]) -> list[Score]:
    """Score with servers whose routes are known, so that each sends exactly one request."""
    pool = TeacherPool(configs)
    for teacher in pool.teachers:
        teacher.served.route, teacher.served.model = "/v1/completions", "fake"
    try:
        return await pool.score(TOKENS)
    finally:
        await pool.close()


def test_a_teacher_that_hangs_drops_out_at_its_own_time_out_and_the_others_answers_stand(serve) -> None:
    quick, never = FakeTeacher(), FakeTeacher(hold=lambda: asyncio.sleep(30))
    good, bad = serve(quick, never)
    answers = score([good, bad.model_copy(update={"timeout_s": 0.2})])
    assert answers[0].scores is not None and answers[0].failure is None
    assert answers[1].scores is None and answers[1].failure == "late: no answer within 0.2 s"


def test_a_teacher_that_is_down_drops_out_with_the_reason(serve) -> None:
    down = TeacherConfig(name="gone", base_url=f"http://127.0.0.1:{claim_port(None, set())}")
    (answer,) = score([down])
    assert answer.scores is None and answer.failure is not None
    assert "can't be reached: ConnectError" in answer.failure


def test_a_passing_fault_is_tried_again_and_a_lasting_one_a_bounded_number_of_times(serve) -> None:
    teacher = FakeTeacher()
    (config,) = serve(teacher)
    check([config])
    teacher.requests.clear()

    def sent_until(statuses: list[int]) -> tuple[Score, int]:
        teacher.statuses, teacher.requests["/v1/completions"] = statuses, 0
        (answer,) = asyncio.run(_score_known([config]))
        return answer, teacher.requests["/v1/completions"]

    answer, sent = sent_until([503, 500])
    assert answer.failure is None and sent == 3
    answer, sent = sent_until([503, 500, 502, 503])
    assert sent == served.TRIES and "with 502: " in str(answer.failure)
    answer, sent = sent_until([400])
    assert sent == 1 and "refused /v1/completions with 400: " in str(answer.failure)


def drop_prompt_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"text": ""}]}


def drop_last_number(answer: dict[str, Any]) -> dict[str, Any]:
    """Where more than the two tokens of a first try are scored: the last one's own number is NaN, and its alone."""
    entries = answer["choices"][0]["prompt_logprobs"]
    if len(entries) > 2:
        next(iter(entries[-1].values()))["logprob"] = math.nan
    return answer


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop_prompt_logprobs, "has no prompt_logprobs"),
        (lambda answer: {"choices": [{"prompt_logprobs": [None]}]}, "has 1 prompt_logprobs for 5 tokens"),
        (lambda answer: {"choices": []}, "another shape than vLLM's"),
        (lambda answer: [answer], "with a list, not an object"),
        (lambda answer: Response(b"[" * 100_000), "with something that isn't JSON"),
        (lambda answer: Response(b'{"choices": ' + b"9" * 5000 + b"}"), "with something that isn't JSON"),
        (lambda answer: Response(b"none", headers={"content-encoding": "gzip"}), "can't be reached: DecodingError"),
    ],
)
def test_an_answer_of_another_shape_drops_its_teacher(serve, change, reason: str) -> None:
    teacher = FakeTeacher()
    (config,) = serve(teacher)
    teacher.change = change
    (answer,) = asyncio.run(_score_known([config]))
    assert answer.scores is None and reason in str(answer.failure)


def test_nan_and_missing_entries_are_no_numbers_and_the_other_tokens_stand(serve) -> None:
    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        entries = answer["choices"][0]["prompt_logprobs"]
        entries[1]["3"]["logprob"] = math.nan
        entries[2] = None
        entries[3] = {"7": {"logprob": -1.0}}
        return answer

    teacher = FakeTeacher()
    (config,) = serve(teacher)
    teacher.change = spoil
    (answer,) = asyncio.run(_score_known([config]))
    assert answer.scores is not None
    assert usable(answer.scores.logprobs).tolist() == [False, False, False, False, True]


def test_teachers_with_the_policys_tokenizer_pass_the_check(serve) -> None:
    check(serve(FakeTeacher(), FakeTeacher(completions=False)))
    check([])


@pytest.mark.parametrize(
    ("teacher", "reason"),
    [
        (
            FakeTeacher(decode=lambda text: text.replace("b", "B")),
            r"teacher t0 has another tokenizer than the policy \(fingerprint [0-9a-f]{12}, not [0-9a-f]{12}\): "
            "token ids 0 to 4095 mean something else; serve a model of the policy's own family",
        ),
        (FakeTeacher(decode=None), "teacher t0 can't be used: .* has no /detokenize .*; serve it with vLLM's"),
        (FakeTeacher(change=drop_prompt_logprobs), "teacher t0 can't be used: .* has no prompt_logprobs; serve it"),
        (FakeTeacher(completions=False, generate=False), "answers neither /v1/completions nor /inference/v1/generate"),
        (FakeTeacher(cards=7), "the answer of /v1/models has no data"),
        (FakeTeacher(cards=[{"id": ["fake"]}, "fake"]), "serves no model"),
        (FakeTeacher(key="Bearer secret"), "refused /v1/models with 401"),
        (FakeTeacher(max_logprobs=5), r"gives 6 logprobs a token, and top_k \(8\) are wanted: start its server with"),
        (
            FakeTeacher(is_scaled=True),
            r"change with the request's temperature \(by 0.611 nats a token between 1 and 2\)",
        ),
        (FakeTeacher(change=drop_last_number), "lack a number for some tried tokens: look for NaN"),
    ],
)
def test_a_teacher_that_can_not_work_is_refused_before_anything_starts(
    serve, teacher: FakeTeacher, reason: str
) -> None:
    with pytest.raises(TeacherRefused, match=reason) as refusal:
        check(serve(teacher))
    assert "\n" not in str(refusal.value)


def test_a_server_whose_rounding_moves_a_few_tokens_passes_the_check(serve) -> None:
    def round_off(answer: dict[str, Any]) -> dict[str, Any]:
        entries = answer["choices"][0]["prompt_logprobs"]
        for entry in entries[9::20]:
            for one in entry.values():
                one["logprob"] += noise.pop()
        return answer

    noise = [0.0, -0.25] * 1000
    check(serve(FakeTeacher(change=round_off)))


def test_a_teacher_that_serves_another_model_or_nothing_at_all_is_refused(serve) -> None:
    with pytest.raises(TeacherRefused, match="doesn't serve big, but fake"):
        check(serve(FakeTeacher(), model="big"))
    gone = TeacherConfig(name="gone", base_url=f"http://127.0.0.1:{claim_port(None, set())}")
    with pytest.raises(TeacherRefused, match=r"teacher gone can't be used: .* can't be reached"):
        check([gone])


def test_a_key_is_sent_and_one_that_is_not_set_is_refused(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    check(serve(FakeTeacher(key="Bearer secret"), api_key_var="TEACHER_KEY"))
    with pytest.raises(TeacherRefused, match=r"api_key_var \(NO_SUCH_KEY\) names no variable that is set"):
        check(serve(FakeTeacher(), api_key_var="NO_SUCH_KEY"))


def test_what_is_wrong_with_the_server_of_hints_is_said_of_hints(serve) -> None:
    configs = serve(FakeTeacher(decode=None))
    with pytest.raises(TeacherRefused, match=r"/tokenize allowed, or name another server in hints\.base_url$"):
        check(configs, table="hints")
    with pytest.raises(TeacherRefused, match=r"/tokenize allowed, or take it out of replay\.teachers$"):
        check(configs)
    with pytest.raises(TeacherRefused, match=r"hints\.api_key_var \(NO_SUCH_KEY\) names no variable that is set"):
        check(serve(FakeTeacher(), api_key_var="NO_SUCH_KEY"), table="hints")
