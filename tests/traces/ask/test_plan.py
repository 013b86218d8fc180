"""Which decision points are asked about, and how long they are, before anything is sent."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_prime.errors import BadInput
from composer_prime.traces.ask.plan import Choice, make_plan
from composer_prime.traces.states import TraceState
from tests.traces.ask.text_teacher import Listed, call, trace

STATES = [trace(number, "w" * 40 * number) for number in range(20)]


def chosen(choice: Choice, states: list[TraceState] = STATES) -> list[int]:
    return [state.turn for state in make_plan(Listed(states), choice).states(Listed(states))]


def test_a_sample_is_the_same_again_another_by_another_seed_and_stays_when_points_are_added() -> None:
    first = chosen(Choice(sample=6))
    assert len(first) == 6 == len(set(first)) and first == sorted(first) == chosen(Choice(sample=6))
    assert first != chosen(Choice(sample=6, seed=1))
    more = [*STATES, *(trace(number) for number in range(20, 40))]
    grown = chosen(Choice(sample=6), more)
    assert {number for number in grown if number < 20} <= set(first)


def test_choices_are_made_in_order_and_each_says_what_it_leaves_out() -> None:
    other = [trace(number, action=call("a", name="Bash")) for number in range(30, 35)]
    plan = make_plan(Listed([*STATES, *other, *other]), Choice("read_file", 100, sample=4, limit=3))
    assert len(plan.points) == 3 and all(point.num_tokens <= 100 for point in plan.points.values())
    left = dict(plan.left_out)
    assert left.pop("--only tool=read_file") == 5 and left.pop("--limit 3") == 1
    assert sum(left.values()) == 16 and set(left) == {"--max-prompt-tokens 100", "--sample 4"}


def test_long_points_and_their_share_of_tokens_are_counted() -> None:
    plan = make_plan(Listed(STATES))
    sizes = [point.num_tokens + point.action_bytes // 4 for point in plan.points.values()]
    told = plan.too_long(sorted(sizes)[14])
    tokens = [point.num_tokens for point in plan.points.values()]
    share = sum(n for n, size in zip(tokens, sizes, strict=True) if size > sorted(sizes)[14]) / sum(tokens)
    assert told.startswith("5 of 20 (25%) are longer than about ") and f"with {share:.0%} of all" in told
    with pytest.raises(BadInput, match="all 20 decision points are longer"):
        plan.too_long(3)


def test_a_tokenizer_counts_each_message_and_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"?": 0}, "?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = [trace(1), trace(1, "one two three")]
    plan = make_plan(Listed(words), model=str(tmp_path))
    short, long = (point.num_tokens for point in plan.points.values())
    assert long == short + 3 and plan.about == ""
    with pytest.raises(BadInput, match=r"--model \(/no/such\) has no tokenizer.json"):
        make_plan(Listed(words), model="/no/such")


class Growing:
    """One session of so many calls, made as it is read."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls

    def states(self) -> Iterator[TraceState]:
        messages: tuple[dict[str, str], ...] = ()
        for turn in range(self.num_calls):
            messages = (*messages, {"role": "user", "content": f"{turn} " * 2000})
            yield TraceState("s", turn, None, messages, (), call("a"))


def test_a_plan_holds_sizes_and_not_what_was_said() -> None:
    tracemalloc.start()
    plan = make_plan(Growing(400))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(plan.points) == 400 and sum(point.num_bytes for point in plan.points.values()) > 10 * held
