"""The recipe: from a taskset's id to a model folder that `model.name` takes."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from composer_prime.config import recipe_from_data
from composer_prime.config.settings import settle_site
from composer_prime.errors import BadInput, EnvError
from composer_prime.sites.embedded.environments import Source, load_sources
from tiny_policy.player import Player
from tiny_policy.playing import Demonstration, Stagehand
from tiny_policy.training import TRAINING, Likeliness, TrainingConfig

NUM_CONVERSATIONS = 600
"""Those that are learned from, their turns with hints aside: tasks are played again until there are so many."""
MAX_TASKS = 1200
HELD_OUT, MAX_HELD_OUT = 0.2, 48
"""Share of the tasks that are held out, and how many at most."""
ASKED_AGAIN = 8
"""Times that the player is asked for a held-out turn again, to see how far it agrees with itself."""

Say = Callable[[str], None]
Family = list[Demonstration]
"""A conversation, and its turns with hints."""


@dataclass(frozen=True)
class Made:
    """What a person wants to know of a policy that was made.

    likeliness    of the player's turns on held-out tasks by the policy
    agreement     of the player with itself: what a policy that learned all of it comes to
    longest_turn, longest  tokens of the longest taught turn and of the longest conversation
    """

    folder: Path
    steps: int
    likeliness: Likeliness
    agreement: Likeliness
    longest_turn: int
    longest: int


def make(
    taskset_id: str,
    out: Path,
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    max_turns: int = 8,
    with_hints: bool = True,
    config: TrainingConfig = TRAINING,
    say: Say = print,
) -> Made:
    """Make a policy for the taskset with these settings and save it as the folder `out`, which must not be there.

    Raises BadInput for what the person must change. The same arguments on the same machine give the same policy.
    """
    check_out(out)
    began = time.monotonic()
    source = load(taskset_id, settings, seed, max_turns)
    player = Player.of(source.env.taskset, taskset_id)
    stagehand = Stagehand(source, player, max_turns, with_hints=with_hints)
    learned_from, held_out = split(source, taskset_id, seed)
    shown, judged = asyncio.run(_play(source, stagehand, learned_from, held_out, seed))
    num_hinted = sum(each.hinted for family in shown for each in family)
    hinted = f", and {num_hinted} turns of theirs after a hint" if with_hints else ""
    tasks = f"{len(learned_from)} tasks; {len(held_out)} more are held out"
    say(f"{taskset_id}: {len(shown)} conversations{hinted}, of {tasks}")
    made = _train(shown, judged, player, out, seed, config, say)
    say(
        f"{out}: {made.steps} steps, {time.monotonic() - began:.0f} s; what the player says on held-out tasks is as "
        f"likely as {made.likeliness} (player with itself: {made.agreement})"
    )
    say(
        f'in a recipe: model.name = "{out}", orchestrator.train.sampling.max_completion_tokens of at least '
        f"{made.longest_turn}, seq_len above {made.longest}"
    )
    return made


def check_out(out: Path) -> None:
    """Raise BadInput for a folder that is there."""
    if out.exists() or out.is_symlink():
        raise BadInput(f"--out ({out}) exists, and nothing is overwritten: remove it, or name another folder")


def load(taskset_id: str, settings: Mapping[str, Any], seed: int, max_turns: int) -> Source:
    """The environment as an embedded site loads it, with all its tasks. Raises BadInput."""
    env = {"taskset": {**settings, "id": taskset_id}, "agent": {"max_turns": max_turns}}
    data = {
        "run": {"name": "tiny-policy", "seed": seed},
        "max_steps": 1,
        "sites": {"count": 1},
        "orchestrator": {"train": {"source": [{"name": "taskset", "env": env}]}},
    }
    site = settle_site(recipe_from_data(data), "a", inference_port=1, model_dir=Path(), resume=False)
    return load_sources(site)[0]


def split(source: Source, taskset_id: str, seed: int) -> tuple[list[vf.Task], list[vf.Task]]:
    """The tasks that are learned from, and those that are held out, in a seeded order."""
    tasks = random.Random(seed).sample(source.tasks, min(len(source.tasks), MAX_TASKS))
    if len(tasks) < 2:
        raise EnvError(
            f"taskset {taskset_id!r} has {len(tasks)} task, and at least 2 are needed, of which one is held out: give "
            "it more tasks"
        )
    held_out = min(MAX_HELD_OUT, max(1, int(HELD_OUT * len(tasks))))
    return tasks[held_out:], tasks[:held_out]


async def _play(
    source: Source, stagehand: Stagehand, learned_from: Sequence[vf.Task], held_out: Sequence[vf.Task], seed: int
) -> tuple[list[Family], list[Family]]:
    """Families of conversations about the tasks that are learned from, and about each that is held out."""
    assert source.tools is not None  # the "chat" harness has them
    await source.tools.open(source.env.taskset.config.id, source.tasks[0])
    try:
        shown, judged, number = list[Family](), list[Family](), 0
        while len(shown) < NUM_CONVERSATIONS:
            task = learned_from[number % len(learned_from)]
            shown += await stagehand.play(task, random.Random(f"{seed}/{number}"))
            number += 1
        for place, task in enumerate(held_out):
            judged += await stagehand.play(task, random.Random(f"{seed}/held out/{place}"))
        return shown, judged
    finally:
        await source.tools.close()


def _train(
    shown: Sequence[Family],
    judged: Sequence[Family],
    player: Player,
    out: Path,
    seed: int,
    config: TrainingConfig,
    say: Say,
) -> Made:
    from tiny_policy.pieces import find_pieces, make_tokenizer
    from tiny_policy.qwen3 import ARCHITECTURE, fresh_model, tiny_config
    from tiny_policy.rendering import render
    from tiny_policy.training import batches, measure, train

    tokenizer = make_tokenizer(find_pieces(shown))
    samples, held_out = render(shown, tokenizer), render(judged, tokenizer)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = fresh_model(tiny_config({**ARCHITECTURE, **ends, "vocab_size": len(tokenizer)}), seed)

    def progress(step: int, found: Likeliness) -> None:
        say(f"step {step}: what the player says is as likely as {found}")

    steps = train(model, samples, held_out, seed=seed, config=config, progress=progress)
    likeliness, _ = measure(model, batches(held_out))
    save(model, tokenizer, out)
    both = [each for family in (*samples, *held_out) for each in family]
    return Made(
        out,
        steps,
        likeliness,
        agreement(judged, player, seed),
        max(each.longest_turn for each in both),
        max(len(each.token_ids) for each in both),
    )


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write the model folder, whole or not at all. Raises BadInput where it can't be written."""
    scratch = out.with_name(f".making-{out.name}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.rename(out)
    except OSError as error:
        raise BadInput(f"--out ({out}) can't be written: {error.strerror or error}: name another folder") from error


def agreement(families: Sequence[Family], player: Player, seed: int) -> Likeliness:
    """How often the player says again what it said, asked anew: 1.0 where it draws nothing."""
    same: dict[bool, list[float]] = {False: [], True: []}
    for number, each in enumerate(itertools.chain.from_iterable(families)):
        for turn in each.taught:
            dice = random.Random(f"{seed}/again/{number}/{turn}")
            again = [player.next_turn(each.task, each.messages[:turn], dice) for _ in range(ASKED_AGAIN)]
            same[each.hinted].append(sum(one == each.messages[turn] for one in again) / ASKED_AGAIN)
    plain, hinted = (sum(found) / len(found) if found else None for found in same.values())
    return Likeliness(plain, hinted)
