"""Do logs and teachers teach? `python -m tests.traces.learning --out outputs/learning --seeds 5`.

A policy that was warmed up on boxes without locks can't form `unlock`. A bad agent's log is on boxes that are locked
twice: it knows what to do at every other turn. Of three text teachers two know the task, and one of these dies on the
way; the third always calls a tool of another schema.
The commands of docs/traces.md make a policy of that, by recipes/local/logs.toml. It is judged greedily on boxes
that no log has. Beside it: the preference term alone, teachers whose votes are shuffled among the decision points,
and one wrong teacher whose voice alone is enough. What is done isn't made again.
"""

import argparse
import asyncio
import json
import random
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from safetensors.torch import load_file

from composer_prime.ablate.held_out import held_out_reward
from composer_prime.config.load import load_any
from composer_prime.config.paths import SitePaths
from composer_prime.config.recipe import Recipe
from composer_prime.sites.embedded.inference_client import newest_broadcast
from composer_prime.traces.ask.folder import AnswerFolder
from composer_prime.traces.ingest.store import TraceStore
from composer_prime.traces.pairs.making import make_pairs
from composer_prime.traces.pairs.votes import Rules
from tests.traces.ask.text_teacher import FakeTextTeacher, serving
from tiny_policy.making import load, make
from tiny_policy.player import Player
from tiny_policy.playing import Demonstration, Stagehand

RECIPE = Path("recipes/local/logs.toml")
CLI = (sys.executable, "-m", "composer_prime.cli.main")
LOCKED = {"locks": 2}
MAX_TURNS, NUM_PLAYS, NUM_BEFORE_DEATH, PROMPTS = 9, 6, 2000, 128
ARMS: Mapping[str, Sequence[str]] = {
    "documented": (),
    "dpo-alone": ("--replay.pairs.sft_tau=0", "--replay.pairs.min_logprob=-1e9"),
    "shuffled-votes": (),
    "wrong-teacher": (),
}
Message = dict[str, Any]


def right(messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """What to call next, and with what; "" as the name: what to say. Messages as a chat completion has them."""
    box = messages[0]["content"].split()[-1]
    told: dict[str, str] = {}
    calls: dict[str, str] = {}
    for message in messages:
        calls |= {each["id"]: each["function"]["name"] for each in message.get("tool_calls") or ()}
        if message["role"] == "tool" and len(message["content"]) == 1:
            told[calls[message["tool_call_id"]]] = message["content"]
    last = messages[-1]["content"]
    if "call unlock first" in last or last == "locked":
        return "unlock", box
    if "code" in told:
        return "", told["code"]
    return ("code", told["open"]) if "open" in told else ("open", box)


def said(name: str, value: str) -> Message:
    """The assistant's message."""
    if not name:
        return {"role": "assistant", "content": value}
    arguments = json.dumps({"letter" if name == "code" else "box": value})
    made = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [made]}


def of_another_schema(body: Mapping[str, Any]) -> Message:
    return said("open_box", body["messages"][0]["content"].split()[-1])


def wrong(body: Mapping[str, Any]) -> Message:
    """Always says the box's name, which ends the rollout."""
    return said("", body["messages"][0]["content"].split()[-1])


def bad_agent(task: vf.Task, messages: list[Message], rng: random.Random) -> Message | str:
    """Knows what to do at every other turn, and guesses at the others."""
    box = messages[0]["content"].split()[-1]
    guesses = [("open", "z"), ("code", box), ("unlock", box), ("open", box)]
    name, value = right(_with_ids(messages)) if rng.random() < 0.5 else rng.choice(guesses)
    if not name:
        return value
    return {"content": "", "tool_calls": [{"name": name, "arguments": {"letter" if name == "code" else "box": value}}]}


def _with_ids(messages: Sequence[Message]) -> list[Message]:
    """A player's messages as a chat completion has them: each answer follows its one call."""
    shown = []
    for number, message in enumerate(messages):
        calls = [{"id": str(number), "function": {"name": each["name"]}} for each in message.get("tool_calls") or ()]
        shown.append({**message, "tool_calls": calls, "tool_call_id": str(number - 1)})
    return shown


async def play(seed: int) -> list[Demonstration]:
    """The bad agent's conversations about boxes of a run's first shard."""
    source = load("tool-letters", LOCKED, seed, MAX_TURNS)
    assert source.tools is not None
    await source.tools.open("tool-letters", source.tasks[0])
    try:
        stagehand = Stagehand(source, Player("tool-letters", bad_agent), MAX_TURNS, with_hints=False)
        tasks = enumerate([*source.tasks] * NUM_PLAYS)
        played = [await stagehand.play(task, random.Random(f"{seed}/{number}")) for number, task in tasks]
    finally:
        await source.tools.close()
    return [family[0] for families in played for family in families]


class Chain:
    """The commands for one seed, in a folder of its own."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.seed = out.absolute() / f"s{seed}", seed
        self.policy, self.store, self.answers = self.out / "policy", self.out / "traces", self.out / "answers"
        self.out.mkdir(parents=True, exist_ok=True)

    def make_log(self) -> None:
        """The policy, and the bad agent's log as a store."""
        if not self.policy.exists():
            make("tool-letters", self.policy, {"locks": 0}, seed=self.seed, max_turns=5, with_hints=False)
        if self.store.exists():
            return
        played = asyncio.run(play(self.seed))
        log = self.out / "log.jsonl"
        rows = [{"messages": each.messages, "tools": each.tools, "model": "the-agent"} for each in played]
        log.write_text("".join(json.dumps(row) + "\n" for row in rows))
        composer_prime("replay", "ingest", log, "--to", self.store)

    def ask(self) -> None:
        """The pairs of each arm."""
        if (self.out / "wrong-teacher.jsonl").exists():
            return
        knows = [FakeTextTeacher(says=lambda body: said(*right(body["messages"]))) for _ in range(2)]
        knows[1].fault = lambda number: "dead" if number >= NUM_BEFORE_DEATH else "ok"
        self._asked(
            {"first": knows[0], "dying": knows[1], "other": FakeTextTeacher(says=of_another_schema)}, self.answers
        )
        self._asked({"wrong": FakeTextTeacher(says=wrong)}, self.out / "answers-wrong")
        pairs = ["replay", "pairs", self.store]
        for name in ("documented", "dpo-alone"):
            composer_prime(*pairs, self.answers, "--to", self.out / f"{name}.jsonl")
        given = list(AnswerFolder(self.answers).answers())
        states = sorted({answer.state for answer in given})
        elsewhere = dict(zip(states, random.Random(self.seed).sample(states, len(states)), strict=True))
        shuffled = [replace(answer, state=elsewhere[answer.state]) for answer in given]
        make_pairs(TraceStore(self.store), shuffled, Rules(), to=self.out / "shuffled-votes.jsonl")
        wrong_alone = [self.out / "answers-wrong", "--min-votes", 1, "--to", self.out / "wrong-teacher.jsonl"]
        composer_prime(*pairs, *wrong_alone)

    def _asked(self, teachers: Mapping[str, FakeTextTeacher], to: Path) -> None:
        with ExitStack() as stack:
            tables = ""
            for name, teacher in teachers.items():
                tables += f'[[teachers]]\nname = "{name}"\nmodel = "{name}"\n'
                tables += f'base_url = "{stack.enter_context(serving(teacher))}"\n'
                tables += "usd_per_million_prompt_tokens = 1\nusd_per_million_completion_tokens = 1\n"
            (to.parent / f"{to.name}.toml").write_text(tables)
            words = ["--teachers", to.parent / f"{to.name}.toml", "--to", to, "--ceiling-usd", 50]
            composer_prime("replay", "ask", self.store, *words, codes=(0, 1))

    def train(self, arm: str, further: Sequence[str]) -> float:
        """The greedy reward of an arm's policy on boxes that no log has."""
        file = self.out / f"{arm}.json"
        if file.exists():
            return json.loads(file.read_text())
        words = [f"--run.name={arm}", f"--run.seed={self.seed}", f"--output_dir={self.out}"]
        words += [f"--model.name={self.policy}", f"--replay.pairs.store={self.store}"]
        words += [f"--replay.pairs.file={self.out / f'{arm}.jsonl'}", *further]
        composer_prime("run", RECIPE, *words)
        found = newest_broadcast(SitePaths(self.out / arm / "sites/a"))
        assert found is not None
        (weights,) = found[1].glob("*.safetensors")
        reward = held_out_reward(self.judge(), load_file(weights), prompts=PROMPTS, temperature=0.0)
        file.write_text(json.dumps(reward))
        return reward

    def judge(self) -> Recipe:
        """A recipe with the environment, whose held-out boxes are judged on."""
        source = f'[{{name="boxes",env={{taskset={{id="tool-letters",locks=2}},agent={{max_turns={MAX_TURNS}}}}}}}]'
        words = [f"--run.seed={self.seed}", f"--model.name={self.policy}", "--replay.pairs=None"]
        recipe = load_any(None, ["@", str(RECIPE), *words, f"--orchestrator.train.source={source}"])
        assert isinstance(recipe, Recipe)
        return recipe


def composer_prime(*arguments: object, codes: Sequence[int] = (0,)) -> None:
    """Run a command of ours. Raises SystemExit with another exit code than these."""
    words = [str(argument) for argument in arguments]
    print(f"composer-prime {shlex.join(words)}", flush=True)
    code = subprocess.run([*CLI, *words], stdout=subprocess.DEVNULL).returncode
    if code not in codes:
        raise SystemExit(code)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m tests.traces.learning", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    given, further = parser.parse_known_args(arguments)
    for seed in range(given.first, given.first + given.seeds):
        chain = Chain(given.out, seed)
        chain.make_log()
        chain.ask()
        for arm in given.arms:
            print(f"seed {seed} {arm:15} {chain.train(arm, [*ARMS[arm], *further]):.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
