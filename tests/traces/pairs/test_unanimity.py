"""Unanimous teachers never push an agreed action down, however each of them spells it."""

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.traces.pairs.actions import same_action
from composer_prime.traces.pairs.file import read_decisions
from composer_prime.traces.pairs.lessons import read_lessons, step_advantages
from composer_prime.traces.pairs.making import make_pairs
from composer_prime.traces.pairs.votes import Rules
from composer_prime.traces.states import Message
from tests.traces.pairs.building import Listed, answer, call, calls, says, state, tool

CWD = "/home/a/p"
TOOLS = (
    tool("Bash", command={"type": "string"}, description={"type": "string"}, timeout={"type": "integer"}),
    tool("Read", file_path={"type": "string"}, limit={"type": "integer", "default": 9}),
    tool("Edit", file_path={"type": "string"}, old_string={"type": "string"}, new_string={"type": "string"}),
    tool("python", code={"type": "string"}),
)
SPELLED: list[list[Message]] = [
    [calls(call("Bash", one)) for one in (
        {"command": "ls -la src"},
        {"command": "ls -a -l ./src/", "description": "List"},
        {"command": f"cd {CWD} && ls  -al 'src'", "timeout": 120000},
        {"command": "bash -lc 'ls -la src'", "description": "Look"},
    )],
    [calls(call("Bash", {"command": one})) for one in ("ls -lA src", "ls  -lA  src", "ls '-lA' src", "ls -lA src;")],
    [calls(call("Read", one), content="I read.") for one in (
        {"file_path": "a.py"}, {"file_path": f"{CWD}/a.py", "limit": "9"}, {"limit": None, "file_path": "./a.py"}
    )],
    [calls(call("Read", {"file_path": one}, id=one)) for one in ("b.py", f"{CWD}//b.py", "x/../b.py")],
    [calls(call("Edit", {"file_path": one, "old_string": " x", "new_string": "y\n"})) for one in ("a", f"{CWD}/a")],
    [calls(call("python", {"code": one})) for one in ("f( 1 )", "f(1)", "f(1)  # once")],
    [says(one) for one in ("It is done.", "**it is** done.", "It  is\n`done`.")],
    [says(one) for one in ('{"a": 1}', '```json\n{ "a": 1 }\n```')],
]  # fmt: skip
actions = st.integers(0, len(SPELLED) - 1)


def spelled(data: st.DataObject, action: int) -> Message:
    return data.draw(st.sampled_from(SPELLED[action]))


def test_the_spellings_are_those_of_as_many_actions() -> None:
    for number, these in enumerate(SPELLED):
        for other, those in enumerate(SPELLED):
            for one in these:
                assert {same_action(one, that, TOOLS, CWD) for that in those} == {number == other}, json.dumps(one)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(actions, actions, st.integers(1, 4)), min_size=1, max_size=5),
    st.sampled_from(["plurality", "weighted", "variance"]),
    st.sampled_from([1, 2, 3]),
    st.data(),
)
def test_no_pair_rejects_and_no_advantage_lowers_what_all_teachers_agree_on(points, vote: Any, min_votes, data) -> None:
    states, answers, agreed = [], [], {}
    for turn, (did, said, num_teachers) in enumerate(points):
        one = state(f"turn {turn}", spelled(data, did), turn=turn, tools=TOOLS, cwd=CWD, author="claude-opus-4-5")
        model = data.draw(st.sampled_from(["claude-sonnet-4", "gpt-5", "kimi-k2"]))
        teachers = range(num_teachers)
        answers += [answer(one, f"t{n}", spelled(data, said), model=model, weight=1.0 + n) for n in teachers]
        states.append(one)
        agreed[one.id] = (SPELLED[said][0], did == said)
    with tempfile.TemporaryDirectory() as folder:
        make_pairs(Listed(states), answers, Rules(vote, min_votes=min_votes), to=Path(folder) / "pairs")
        decisions = list(read_decisions(Path(folder) / "pairs"))
        advantages = step_advantages(Path(folder) / "pairs")
        has_agreement = any(one.support is not None for one in decisions)
        lessons = list(read_lessons(Listed(states), Path(folder) / "pairs")) if has_agreement else []
    for lesson in lessons:
        action, is_agreed = agreed[lesson.state.id]
        assert same_action(lesson.chosen, action, TOOLS, CWD)
        assert (lesson.rejected is None) is is_agreed
        assert lesson.rejected is None or not same_action(lesson.rejected, action, TOOLS, CWD)
    for one in states:
        assert not agreed[one.id][1] or advantages.get(("s", one.turn), 0.0) >= 0
