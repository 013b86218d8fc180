"""What pairs bring: the traces of a policy that fails, three text teachers, and runs with pairs and with shuffled ones.

    python -m tests.bench.pairs --out outputs/pairs

The commands of docs/traces.md one after the other, on `recipes/local/hints.toml` without its hints: a box is locked
twice, and the policy never unlocks it. Two of the teachers know that; the third opens the box at once, as the policy
does. A command that was done is left out when the same call is given again.
"""

import argparse
import json
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from composer_prime.replay.pairs.file import Pair, read_pairs, write_pairs
from tests.replay.ask.text_teacher import FakeTextTeacher, serving

RECIPE = Path(__file__).parents[2] / "recipes/local/hints.toml"
CLI = (sys.executable, "-m", "composer_prime.cli.main")
BAD_STEPS = 16
"""Steps of the policy that fails, at a learning rate of 0: four conversations of each are kept."""
BAD_SEED = 1000
CALL = re.compile(r"(\w+)\((.*)\)", re.DOTALL)

Message = dict[str, Any]


def tool(name: str, argument: str, description: str) -> dict[str, Any]:
    """A tool's schema, as the policy is shown it."""
    properties = {argument: {"title": argument.title(), "type": "string"}}
    parameters = {"properties": properties, "required": [argument], "title": f"{name}Arguments", "type": "object"}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("code", "letter", "Code of a letter."),
    tool("open", "box", "Letter in a box."),
    tool("unlock", "box", "Unlock a box."),
]


def call(name: str, number: int = 0, **arguments: str) -> Message:
    """An assistant's message that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    made = {"id": f"call-{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [made]}


def chats(conversations: Path) -> Iterator[dict[str, Any]]:
    """A site's conversations as OpenAI's."""
    for line in conversations.read_text().splitlines():
        given = json.loads(line)
        messages: list[Message] = []
        for shown in given["messages"]:
            match [shown["role"], *shown["calls"]]:
                case ["assistant", made, *_] if found := CALL.fullmatch(made):
                    messages.append(call(found[1], len(messages), **json.loads(found[2])))
                case ["tool", *_]:
                    made = messages[-1].get("tool_calls") or [{"id": "call-0"}]
                    messages.append({"role": "tool", "tool_call_id": made[0]["id"], "content": shown["text"]})
                case [role, *_]:
                    messages.append({"role": role, "content": shown["text"]})
        yield {"messages": messages, "tools": TOOLS, "reward": given["reward"], "model": "a-policy-that-fails"}


def knows(body: Mapping[str, Any]) -> Message:
    """What who knows the task does next: unlock until it says so, open, ask for the code, say it."""
    messages: Sequence[Message] = body["messages"]
    box = messages[0]["content"].split()[-1]
    told: dict[str, str] = {}
    for before, after in zip(messages, messages[1:], strict=False):
        if after["role"] == "tool" and not after["content"].startswith(("{", "error")):
            told[before["tool_calls"][0]["function"]["name"]] = after["content"]
    if "code" in told:
        return {"role": "assistant", "content": told["code"]}
    if "open" in told:
        return call("code", letter=told["open"])
    return call("open" if told.get("unlock") == "unlocked" else "unlock", box=box)


def opens(body: Mapping[str, Any]) -> Message:
    """What who has never seen a lock does."""
    return call("open", box=body["messages"][0]["content"].split()[-1])


def shuffled(pairs: Sequence[Pair]) -> list[Pair]:
    """The same pairs, each with the chosen action of another."""
    order = random.Random(0).sample(range(len(pairs)), len(pairs))
    return [
        pair.model_copy(update={"chosen": pairs[other].chosen}) for pair, other in zip(pairs, order, strict=True)
    ]


class Chain:
    """The commands and what they leave behind in a folder."""

    def __init__(self, out: Path) -> None:
        self.out = out.absolute()
        self.sessions, self.store, self.answers = self.out / "sessions.jsonl", self.out / "traces", self.out / "answers"
        self.pairs, self.shuffled = self.out / "pairs.jsonl", self.out / "shuffled.jsonl"

    def make_pairs(self) -> None:
        """From a policy that fails to pairs, and shuffled ones."""
        bad = self.out / "bad"
        if not bad.exists():
            still = ["--trainer.optim.lr", "0", "--orchestrator.train.filter_zero_advantages", "false"]
            named = ["--run.name", bad.name, "--output_dir", str(self.out), "--run.seed", str(BAD_SEED)]
            composer_prime("run", RECIPE, "--hints", "None", "--max_steps", BAD_STEPS, *still, *named)
        found = chats(bad / "sites/a/conversations.jsonl")
        self.sessions.write_text("".join(f"{json.dumps(chat)}\n" for chat in found))
        composer_prime("replay", "ingest", self.sessions, "--to", self.store)
        with ExitStack() as stack:
            teachers = self._serve(stack)
            composer_prime(
                "replay", "ask", self.store, "--teachers", teachers, "--to", self.answers, "--ceiling-usd", 5
            )
        composer_prime("replay", "pairs", self.store, self.answers, "--to", self.pairs)
        write_pairs(self.shuffled, shuffled([each for each in read_pairs(self.pairs) if isinstance(each, Pair)]))

    def ablate(self, seeds: int, further: Sequence[str]) -> None:
        """Runs with the rewards alone, with pairs, and with shuffled ones."""
        settings = ["--hints", "None", "--replay.pairs.file", self.pairs, "--output_dir", self.out]
        control = f"shuffled replay.pairs.file={self.shuffled}"
        composer_prime("ablate", RECIPE, "--seeds", seeds, "--arm", control, *settings, *further)

    def _serve(self, stack: ExitStack) -> Path:
        tables = []
        for name, says in (("first", knows), ("second", knows), ("third", opens)):
            url = stack.enter_context(serving(FakeTextTeacher(says=says)))
            tables.append(
                f'[[teachers]]\nname = "{name}"\nmodel = "model-{name}"\nbase_url = "{url}"\n'
                "usd_per_million_prompt_tokens = 3.0\nusd_per_million_completion_tokens = 15.0\n"
            )
        path = self.out / "teachers.toml"
        path.write_text("\n".join(tables))
        return path


def composer_prime(*arguments: object) -> None:
    """Run a command of ours. Raises SystemExit with its exit code where that isn't 0."""
    words = [str(argument) for argument in arguments]
    print(f"composer-prime {shlex.join(words)}", flush=True)
    code = subprocess.run([*CLI, *words]).returncode
    if code:
        raise SystemExit(code)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m tests.bench.pairs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of all that is left behind")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each arm")
    args, further = parser.parse_known_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    chain = Chain(args.out)
    chain.make_pairs()
    chain.ablate(args.seeds, further)


if __name__ == "__main__":
    main(sys.argv[1:])
