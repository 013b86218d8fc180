"""What pairs bring, and what they cost: an agent that works well but for locked boxes, and teachers that know locks.

    python -m tests.bench.pairs --out outputs/pairs

The commands of docs/traces.md one after the other, on `recipes/local/hints.toml` without its hints. The agent learned
on boxes without locks; its log has those and boxes that are locked twice, which it never opens. Two cheap teachers, of
which one has never seen a lock either, and a dear one are asked in two ways: everyone everywhere, and by tiers. Then
`ablate` trains the agent on locked boxes: with the rewards alone, with each way's pairs, and with shuffled ones. A
command that was done is left out when the same call is given again.
"""

import argparse
import itertools
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_prime.config.paths import models_cache
from composer_prime.sites.embedded.model import resolve_model
from composer_prime.traces.ask.folder import AnswerFolder
from composer_prime.traces.ingest.store import TraceStore
from composer_prime.traces.pairs.file import Decision, read_decisions, write_decisions
from tests.traces.ask.text_teacher import FakeTextTeacher, serving
from tiny_policy.built_in.conversations import tools_json

RECIPE = Path(__file__).parents[2] / "recipes/local/hints.toml"
CLI = (sys.executable, "-m", "composer_prime.cli.main")
CALL = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
ENV = "orchestrator.train.source.0.env"

AGENT_SEED, AGENT_STEPS = 1000, 24
LOG_STEPS = 16
"""Steps of the agent's log for each kind of box, at a learning rate of 0: four conversations of each are kept."""

LOCKED = ["--hints", "None", f"--{ENV}.agent.max_turns", 7]
"""Of all runs: turns for one `open` that fails, two that unlock, open, code, reply, and one to spare."""
SURE = ["--max_steps", 32, "--orchestrator.train.sampling.temperature", 0.5]
"""Of the runs that are compared: an agent that is so sure of itself finds no lock's way by chance."""

Message = dict[str, Any]


TOOLS = tools_json()


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
        yield {"messages": messages, "tools": TOOLS, "reward": given["reward"], "model": "the-agent"}


def knows(body: Mapping[str, Any]) -> Message:
    """What who knows locks does next: open, and if that fails unlock until it says so; ask for the code, say it."""
    messages: Sequence[Message] = body["messages"]
    is_locked = "call unlock first" in messages[-1]["content"] or messages[-1]["content"] == "locked"
    return call("unlock", box=box_of(body)) if is_locked else opens(body)


def opens(body: Mapping[str, Any]) -> Message:
    """What who has never seen a lock does next."""
    told: dict[str, str] = {}
    for before, after in itertools.pairwise(body["messages"]):
        if after["role"] == "tool" and not after["content"].startswith(("{", "error", "Error")):
            told[before["tool_calls"][0]["function"]["name"]] = after["content"]
    if "code" in told:
        return {"role": "assistant", "content": told["code"]}
    return call("code", letter=told["open"]) if "open" in told else call("open", box=box_of(body))


def box_of(body: Mapping[str, Any]) -> str:
    return body["messages"][0]["content"].split()[-1]


def shuffled(decisions: Sequence[Decision], did: Mapping[str, Message]) -> list[Decision]:
    """The same states, each with what the agent did at another one as the agreed action: with the teachers' actions
    among each other they would still teach to unlock, wherever that is.

    did  by state, the agent's action
    """
    dice = random.Random(0)
    otherwise = [one for one in decisions if one.chosen is not None]

    def elsewhere(own: Message) -> Message:
        return dice.choice([did[one.state] for one in otherwise if spoken(did[one.state]) != spoken(own)])

    return [one.model_copy(update={"chosen": elsewhere(did[one.state])}) for one in otherwise]


def spoken(message: Message) -> tuple[Any, ...]:
    """What tells two actions apart: not the ids of calls."""
    return message["content"], [each["function"] for each in message.get("tool_calls") or ()]


@dataclass(frozen=True)
class Way:
    """Whom to ask, and where."""

    name: str
    has_tiers: bool


EVERYONE = Way("everyone", has_tiers=False)
WAYS = (EVERYONE, Way("tiers", has_tiers=True))


@dataclass(frozen=True)
class Price:
    """Dollars for a million tokens, read and written."""

    prompt: float
    completion: float


CHEAP, DEAR = Price(0.1, 0.4), Price(3.0, 15.0)


class Chain:
    """The commands, and what they leave behind in a folder."""

    def __init__(self, out: Path) -> None:
        self.out = out.absolute()
        self.agent, self.store = self.out / "agent", self.out / "traces"
        self.shuffled = self.out / "shuffled.jsonl"

    def pairs(self, way: Way) -> Path:
        return self.out / f"pairs-{way.name}.jsonl"

    def answers(self, way: Way) -> Path:
        return self.out / f"answers-{way.name}"

    def make_log(self) -> None:
        """The agent, and what it did with boxes of both kinds, as a store of traces."""
        self._run("learning", 0, "--max_steps", AGENT_STEPS, "--run.seed", AGENT_SEED)
        if not self.agent.exists():
            shutil.copytree(resolve_model("tiny-tools", AGENT_SEED, models_cache()), self.agent)
            (newest,) = (self.out / f"learning/sites/a/broadcasts/step_{AGENT_STEPS}").glob("*.safetensors")
            shutil.copyfile(newest, self.agent / "model.safetensors")
        still = ["--model.name", self.agent, "--trainer.optim.lr", 0, "--max_steps", LOG_STEPS]
        sessions = self.out / "sessions.jsonl"
        with sessions.open("w") as file:
            for name, locks in (("works", 0), ("stuck", 2)):
                self._run(name, locks, *still, "--orchestrator.train.filter_zero_advantages", "false")
                for chat in chats(self.out / name / "sites/a/conversations.jsonl"):
                    file.write(f"{json.dumps(chat)}\n")
        composer_prime("replay", "ingest", sessions, "--to", self.store)

    def make_pairs(self) -> None:
        """The pairs of each way, and shuffled ones. Not again: the teachers would be other servers."""
        if self.shuffled.exists():
            return
        with ExitStack() as stack:
            urls = [stack.enter_context(serving(FakeTextTeacher(says=says))) for says in (knows, opens, knows)]
            for way in WAYS:
                to = ["--teachers", self._teachers(way, urls), "--to", self.answers(way), "--ceiling-usd", 50]
                composer_prime("replay", "ask", self.store, *to)
                composer_prime("replay", "pairs", self.store, self.answers(way), "--to", self.pairs(way))
        did = {state.id: dict(state.action) for state in TraceStore(self.store).states()}
        write_decisions(self.shuffled, shuffled(list(read_decisions(self.pairs(EVERYONE))), did))

    def ablate(self, seeds: int, further: Sequence[str]) -> None:
        """Runs with the rewards alone, with each way's pairs, and with shuffled ones."""
        settings = [*LOCKED, *SURE, "--model.name", self.agent, "--output_dir", self.out]
        settings += ["--replay.pairs.store", self.store, "--replay.pairs.file", self.pairs(EVERYONE)]
        files = {way.name: self.pairs(way) for way in WAYS[1:]} | {"shuffled": self.shuffled}
        arms = [word for name, file in files.items() for word in ("--arm", f"{name} replay.pairs.file={file}")]
        composer_prime("ablate", RECIPE, "--no-harm", "--seeds", seeds, *arms, *settings, *further)

    def say_cost(self) -> None:
        """A line for each way: calls and dollars, and the share of asking everyone."""
        ledgers = {way: AnswerFolder(self.answers(way)).ledger() for way in WAYS}
        has_answer = ("answered", "unusable")
        records = {way: [each for each in ledger if each.outcome in has_answer] for way, ledger in ledgers.items()}
        dollars = {way: sum(each.usd_settled or 0.0 for each in found) for way, found in records.items()}
        for way in WAYS:
            share = dollars[way] / dollars[EVERYONE]
            print(f"{way.name:10} {len(records[way]):5} calls  ${dollars[way]:.4f}  {share:6.1%} of asking everyone")

    def _run(self, name: str, locks: int, *settings: object) -> None:
        if not (self.out / name / "summary.json").exists():
            kind = [*LOCKED, f"--{ENV}.taskset.locks", locks, "--run.name", name, "--output_dir", self.out]
            composer_prime("run", RECIPE, *kind, *settings)

    def _teachers(self, way: Way, urls: Sequence[str]) -> Path:
        tables = []
        for name, price, url in zip(("alpha", "beta", "gamma"), (CHEAP, CHEAP, DEAR), urls, strict=True):
            tables.append(
                f'[[teachers]]\nname = "{name}"\nmodel = "{name}"\nbase_url = "{url}"\n'
                f"usd_per_million_prompt_tokens = {price.prompt}\n"
                f"usd_per_million_completion_tokens = {price.completion}\n"
                f"tier = {int(way.has_tiers and price == DEAR)}\n"
            )
        path = self.out / f"teachers-{way.name}.toml"
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
    chain.make_log()
    chain.make_pairs()
    chain.say_cost()
    chain.ablate(args.seeds, further)


if __name__ == "__main__":
    main(sys.argv[1:])
