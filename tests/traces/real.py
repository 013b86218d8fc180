"""Real logs read: `python -m tests.traces.real FOLDER [--truth FILE]`.

By format: files, decision points, turns that are none and records dropped, by reason, the share of record bytes used;
then the files of no known format. With a truth, a JSON line a decision point that was counted independently, also how
many were found, and whether their actions and what stands before agree.
"""

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_prime.errors import BadInput
from composer_prime.traces.ingest.context import IMAGE, NO_RESULT, stands_in
from composer_prime.traces.ingest.intake import find_files, read_file
from composer_prime.traces.ingest.reading import Reading
from composer_prime.traces.ingest.session import Node, arguments_of
from composer_prime.traces.states import TraceState, calls_of, text_of

HEAD, TAIL = 80, 60
"""Characters of an action's text, and of what stands before it, that a truth gives."""
COUNTS = ("same action", "same before", "extra", "doubtful")


@dataclass
class Sums:
    """Of the files of one format."""

    files: int = 0
    points: int = 0
    num_bytes: int = 0
    used_bytes: int = 0
    no_points: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, reading: Reading) -> None:
        self.files += 1
        self.num_bytes += reading.num_bytes
        self.used_bytes += reading.used_bytes
        self.dropped += reading.dropped
        for session in reading.sessions:
            for node in session.nodes:
                self.points += node.is_decision
                if node.is_turn and not node.is_decision:
                    self.no_points[why_none(node)] += 1


def why_none(node: Node) -> str:
    """Why an assistant's message is no decision point."""
    if node.is_copied:
        return "context that was written elsewhere"
    if node.is_synthetic:
        return "written by the harness"
    return "stands for what text can't say" if stands_in(node.message) else "neither text nor a call"


def action_of(state: TraceState) -> tuple[str, str]:
    """An action's calls and the head of its text, in a form that a truth's can be compared with."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in calls_of(state.action)]
    return _comparable(calls, text_of(state.action))


def true_action(point: Mapping[str, Any]) -> tuple[str, str]:
    return _comparable([(call["name"], call["arguments"]) for call in point["calls"]], point["text_head"])


def _comparable(calls: Sequence[tuple[str, Any]], text: str) -> tuple[str, str]:
    named = [(name, _arguments(given)) for name, given in calls]
    return json.dumps(named, sort_keys=True), _plain(text[:HEAD])


def _arguments(given: Any) -> Any:
    """A text that is no object is what Codex's free tools take as `input`."""
    found = arguments_of(given) if isinstance(given, str) else given or {}
    return found if found or not isinstance(given, str) or not given.strip(" {}") else {"input": given}


def _plain(text: str) -> str:
    return "".join(text.split())


def compare(states: Sequence[TraceState], points: Sequence[Mapping[str, Any]], sums: Counter[str]) -> list[str]:
    """Pair a file's decision points with a truth's: by the whole action first, then by its calls or its text alone.

    Gives a line for each that differs; those that the truth leaves out are `doubtful`.
    """
    left, differs = list(states), []
    waiting = sorted(points, key=lambda point: point.get("why_not") is not None)
    sums["true"] += sum(point.get("why_not") is None for point in points)
    for whole in (True, False):
        again = []
        for point in waiting:
            true = true_action(point)
            state = next((state for state in left if _is_same(action_of(state), true, whole)), None)
            if state is None:
                again.append(point)
                continue
            left.remove(state)
            if point.get("why_not") is not None:
                sums["doubtful"] += 1
                continue
            before = _stands_before(state, point)
            sums["found"] += 1
            sums["same action"] += whole
            sums["same before"] += before
            if not (whole and before):
                differs.append(f"differs: {true} after {point['last_before']}; here {action_of(state)}")
        waiting = again
    sums["extra"] += len(left)
    differs += [f"missing: {true_action(point)}" for point in waiting if point.get("why_not") is None]
    return differs + [f"extra: {action_of(state)}" for state in left]


def _is_same(ours: tuple[str, str], theirs: tuple[str, str], whole: bool) -> bool:
    calls, text = (_is_like(one, other) for one, other in zip(ours, theirs, strict=True))
    return calls and text if whole else (text and ours[1] != "") or (calls and ours[0] != "[]")


def _is_like(ours: str, theirs: str) -> bool:
    """Whether the texts are the same but for secrets that were cut from ours."""
    if "[redacted]" not in ours:
        return ours == theirs
    pieces = [re.escape(piece) for piece in ours.split("[redacted]")]
    return re.match(".*".join(pieces[: -1 if len(ours) > HEAD - 20 else None]), theirs) is not None


def _stands_before(state: TraceState, point: Mapping[str, Any]) -> bool:
    """Whether the last message before the action is the one that the truth names, as far as that gives its text."""
    last = point["last_before"]
    if last is None or not state.messages:
        return last is None and not state.messages
    shown = state.messages[-1]
    both = (text_of(shown), last["text_tail"] or "")
    text, tail = (_plain(given.replace(IMAGE, "").replace("</system-reminder>", "")) for given in both)
    if last.get("attachment") or not tail or text_of(shown) == NO_RESULT:
        return True
    roles = {"developer": ("system",), "tool": ("tool", "user")}.get(last["role"], (last["role"],))
    return shown["role"] in roles and (text.endswith(tail) or "[redacted]" in text[-2 * TAIL :])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print every point that differs")
    given = parser.parse_args()
    truth: dict[str, list[Any]] = defaultdict(list)
    for point in map(json.loads, given.truth.read_text().splitlines() if given.truth else ()):
        truth[point["file"]].append(point)
    sums: dict[str, Sums] = defaultdict(Sums)
    agreements: dict[str, Counter[str]] = defaultdict(Counter)
    unread: dict[str, str] = {}
    for path in find_files([given.folder]):
        name = str(path.relative_to(given.folder))
        states: list[TraceState] = []
        try:
            format, reading, _ = read_file(path)
        except BadInput as error:
            unread[name] = str(error)
        else:
            sums[format].add(reading)
            states = [state for session in reading.sessions for state in session.states()]
        if name not in truth:
            name = str(path.parent.relative_to(given.folder))  # a folder of events is one session
        if name in truth:
            points = truth.pop(name)
            differs = compare(states, points, agreements[points[0]["format"]])
            for line in differs if given.verbose else ():
                print(f"{name}: {line[:300]}")
    for file, points in truth.items():
        compare([], points, agreements[points[0]["format"]])
        print(f"{file}: the truth's {len(points)} points are of no file that is read")
    report(sums, agreements, unread)
    return 0


def report(sums: Mapping[str, Sums], agreements: Mapping[str, Counter[str]], unread: Mapping[str, str]) -> None:
    for format, of in sorted(sums.items()):
        share = of.used_bytes / max(of.num_bytes, 1)
        print(f"{format}: {of.files:,} files, {of.points:,} decision points, {share:.1%} of record bytes used")
        for reasons, what in ((of.no_points, "turns"), (of.dropped, "records")):
            for reason, count in reasons.most_common():
                print(f"    {count:6,} {what}: {reason}")
    for file, reason in unread.items():
        print(f"not read: {file}: {reason}")
    for format, num in sorted(agreements.items()):
        counts = ", ".join(f"{num[name]:,} {name}" for name in COUNTS)
        print(f"{format}: {num['found']:,} of {num['true']:,} found, {num['true'] - num['found']:,} missing, {counts}")


if __name__ == "__main__":
    sys.exit(main())
