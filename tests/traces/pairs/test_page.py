"""The page of what each teacher would have done: whole, escaped, and not endless."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from composer_prime.errors import BadInput
from composer_prime.traces.pairs import page
from composer_prime.traces.pairs.making import Rules, make_pairs
from tests.traces.pairs.building import Listed, answer, call, calls, says, state

HOSTILE = "<script>alert('x')</script>&amp;\x1b[2J\u202e\"><img src=x onerror=1>"


class Elements(HTMLParser):
    """The names of a page's elements, its attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_shows_the_authors_action_and_each_teachers(tmp_path: Path) -> None:
    one = state("Which file?", calls(call("read", {"path": "a"}), content="Let me see."), author="gpt-4o", turn=7)
    quiet = state("And now?", says("bye"), turn=8)
    said = [answer(one, "ann", "I stop."), answer(one, "bob", "i stop."), answer(one, "eve", "I go on.")]
    make_pairs(Listed([one, quiet]), said, Rules(), page=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    shown = Elements(text)
    for expected in (
        "Which file?",
        'Let me see.\nread {"path": "a"}',
        "the author, gpt-4o",
        "I go on.",
        "eve, model-of",
    ):
        assert expected in shown.text
    assert "s · turn 7 · 67% agree on another action, 0% agree with the author" in shown.text
    assert "s · turn 8 · no answers" in shown.text and "States: 2." in shown.text
    green = re.findall(r'<tr class="chosen"><th>(\w+)', text)
    assert green == ["ann", "bob"]


def test_an_authors_action_that_the_teachers_agree_on_is_the_green_one(tmp_path: Path) -> None:
    one, torn = state("1", says("yes")), state("2", says("yes"))
    said = [answer(one, "ann", "Yes"), answer(one, "bob", "YES"), answer(torn, "ann", "yes"), answer(torn, "bob", "no")]
    make_pairs(Listed([one, torn]), said, Rules(), page=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert re.findall(r'<tr class="chosen"><th>([\w ]+)', text) == ["the author", "ann", "bob"]
    assert "turn 0 · 100% agree with the author" in text and "no consensus, 50% agree with the author" in text


def test_a_consensus_that_makes_no_pair_says_why(tmp_path: Path) -> None:
    one = state("1", says("yes"), author="claude-opus-4")
    said = [answer(one, name, "no", model="claude-sonnet-4") for name in ("ann", "bob")]
    make_pairs(Listed([one]), said, Rules(), page=tmp_path / "page.html")
    told = "100% agree on another action, but only of the student's or the author's family, 0% agree"
    assert told in Elements((tmp_path / "page.html").read_text("utf-8")).text


def test_whatever_texts_hold_stays_text(tmp_path: Path) -> None:
    one = state(HOSTILE, calls(call(HOSTILE, HOSTILE), content=HOSTILE), session=HOSTILE, author=HOSTILE)
    said = [answer(one, HOSTILE, says(HOSTILE), model=HOSTILE), answer(one, "b", "\ud800")]
    make_pairs(Listed([one]), said, Rules(), page=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    shown = Elements(text)
    names = {"html", "meta", "title", "style", "h1", "p", "h2", "table", "tr", "th", "td", "pre"}
    assert shown.names <= names and shown.attributes <= {"lang", "charset", "class"}
    assert "\x1b" not in text and "\u202e" not in text
    assert shown.text.count("<script>alert('x')</script>&amp;\\x1b[2J\\u202e") >= 6


def test_of_more_states_than_a_page_holds_the_first_are_shown_and_it_says_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(page, "MAX_STATES", 3)
    states = [state(str(number), says("x"), turn=number) for number in range(5)]
    make_pairs(Listed(states), [answer(states[4], "ann", "y")], Rules(), page=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "States: 5, of which the first 3 are shown." in text and text.count("<table>") == 3
    assert "turn 2" in text and "turn 3" not in text


def test_a_long_text_is_cut_and_its_length_is_said(tmp_path: Path) -> None:
    one = state("x" * 10_000, says("y"))
    make_pairs(Listed([one]), [answer(one, "ann", "y")], Rules(), page=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "x" * page.MAX_SHOWN + "... (10,000 characters)" in text and "x" * (page.MAX_SHOWN + 1) not in text


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    one = state("1", says("y"))
    with pytest.raises(BadInput, match=r"gone/page.html can't be written: .* name a file in a folder that is there"):
        make_pairs(Listed([one]), [answer(one, "ann", "y")], Rules(), page=tmp_path / "gone" / "page.html")
