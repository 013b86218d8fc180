"""The orchestrator of an embedded site: plays rollouts with the newest policy and hands them to the trainer in batches.

    python -m composer_prime.sites.embedded.orchestrator <site_dir>

Batch n is what training step n takes. Batch n + 1 is begun as soon as batch n stands, while n trains; how far it may
run ahead is `orchestrator.max_off_policy_steps`, and not at all from max_steps on, which few sites come to train. Ends
when the trainer's result is there, or on SIGTERM. No torch.
"""

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from composer_prime import metrics
from composer_prime.config.settings import SiteSettings
from composer_prime.errors import ComposerPrimeError, SiteError, last_words
from composer_prime.metrics import TOOLS_CALL_S, TOOLS_CALLS, MetricsTape
from composer_prime.sites.embedded import conversations
from composer_prime.sites.embedded.agreement import HeldOut
from composer_prime.sites.embedded.batches import TrainingSample, drop_batches, write_batch
from composer_prime.sites.embedded.checkpoints import tasks_drawn
from composer_prime.sites.embedded.conversations import SHOWN_A_STEP, Conversation
from composer_prime.sites.embedded.environments import gates_of, load_gates, load_sources, save_gates
from composer_prime.sites.embedded.inference_client import InferenceClient, WeightsWatcher
from composer_prime.sites.embedded.ports import HOST
from composer_prime.sites.embedded.rollouts import Group, RolloutPlayer
from composer_prime.sites.embedded.samples import TaskOrder, make_samples
from composer_prime.sites.embedded.start import import_tokenizers, imported
from composer_prime.sites.embedded.stored import StoredSamples, load_stored, split_lessons
from composer_prime.sites.embedded.tools.in_process import num_abandoned
from composer_prime.sites.embedded.tools.stage import TOOLS_SECONDS
from composer_prime.sites.embedded.whole_folder import numbered_steps
from composer_prime.visible import log_handler
from composer_prime.waiting import Waits

MAX_DRAWS = 4
"""Draws of batch_size rollouts a step may take until one has a group that teaches something. After them the batch
stays empty: a policy that solves everything must not end the run (upstream's, after 10, does)."""

MAX_FAILED_DRAWS = 3
"""Draws in a row in which every rollout fails before the site ends."""

WAITS_POLL_S = 1.0
_STOP_POLL_S = 0.1

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """One step's rollouts: `samples` are for the trainer, `groups` are all that was played for them."""

    groups: list[Group]
    samples: list[TrainingSample]
    began: float
    ended: float


class Orchestrator:
    """What one site's batches are made of."""

    def __init__(
        self,
        settings: SiteSettings,
        player: RolloutPlayer,
        weights: WeightsWatcher,
        inference: InferenceClient,
        stored: StoredSamples,
        held_out: HeldOut,
    ) -> None:
        self.settings = settings
        self.config = settings.recipe.orchestrator
        self.player = player
        self.weights = weights
        self.inference = inference
        self.gates = gates_of(player.sources)
        self.stored = stored
        self.held_out = held_out
        self.start_step = first_step(settings)
        sizes = [len(source.tasks) for source in player.sources]
        begin = tasks_drawn(settings.paths.checkpoints, self.start_step)
        self.order = TaskOrder(sizes, seed=f"{settings.sampling_seed}/0", begin=begin)

    async def make_batches(self) -> None:
        """Write one batch after another. Without an outer loop the run has max_steps of them; with one, the outer
        loop decides how many the trainer needs."""
        with MetricsTape(self.settings.paths.tape("orchestrator")) as tape:
            for step in itertools.count(self.start_step):
                if self.settings.recipe.outer is None and step >= self.settings.recipe.max_steps:
                    return
                # Beyond max_steps the trainer goes on only while a round is missing.
                ahead = self.config.max_off_policy_steps if step < self.settings.recipe.max_steps else 0
                await self.weights.at_least(max(self.start_step, step - ahead))
                batch, found = await self.make_batch(step)
                tape.log(step, **{**measure(batch, step), **found})
                save_gates(self.gates, self.settings.paths.gates)

    async def make_batch(self, step: int) -> tuple[Batch, dict[str, float]]:
        """Play a step's batch and write it for the trainer, with what stored samples it takes and their metrics."""
        batch = await self.play_batch(step)
        agreement = await self.held_out.measure(step)
        stored, found = await self.stored.draw(step, self.weights.version)
        write_batch(self.settings.paths.rollouts, step, [*batch.samples, *stored], self.order.num_drawn)
        conversations.append(self.settings.paths.conversations, shown(batch, step))
        return batch, {**found, **agreement}

    async def play_batch(self, step: int) -> Batch:
        """Draw tasks and play them until a draw teaches something, or stored samples do. Raises SiteError when all
        rollouts keep failing."""
        began, groups, num_failed_draws = time.time(), list[Group](), 0
        if not self.player.sources:
            return Batch([], [], began, began)
        for _ in range(MAX_DRAWS):
            drawn = await self.play_draw()
            num_failed_draws = 0 if any(group.rollouts for group in drawn) else num_failed_draws + 1
            if num_failed_draws == MAX_FAILED_DRAWS:
                raise SiteError(all_failed(drawn))
            groups += drawn
            samples = make_samples(
                drawn,
                temperature=self.config.train.sampling.temperature,
                filter_zero_advantages=self.config.train.filter_zero_advantages,
            )
            if samples or self.stored.teaches(step):
                return Batch(groups, samples, began, time.time())
        logger.warning("draws=%d taught nothing: the batch stays empty", MAX_DRAWS)
        return Batch(groups, [], began, time.time())

    async def play_draw(self) -> list[Group]:
        """batch_size rollouts at once, in groups, with the policy that the server holds now."""
        size = self.config.group_size
        tasks = self.order.draw(self.config.batch_size // size)
        version = self.weights.version
        groups = await asyncio.gather(*(self.player.play_group(*task, size, version) for task in tasks))
        failures = [failure for group in groups for failure in group.failures]
        if failures:
            logger.warning("failed=%d of=%d last=%r", len(failures), self.config.batch_size, failures[-1])
            await self.inference.wait_ready()
        return groups


def first_step(settings: SiteSettings) -> int:
    """The training step the trainer starts with: 0, or on resume the number of steps in its newest checkpoint."""
    if not settings.resume:
        return 0
    return max(numbered_steps(settings.paths.checkpoints), default=0)


def publishes_first(settings: SiteSettings) -> bool:
    """Whether the trainer publishes weights before its first step: a checkpoint's, or the run's masters."""
    return settings.recipe.outer is not None or first_step(settings) > 0


def all_failed(groups: list[Group]) -> str:
    """The error of a draw in which no rollout went through."""
    failures = [failure for group in groups for failure in group.failures]
    return (
        f"all {len(failures)} rollouts failed, {MAX_FAILED_DRAWS} times in a row; the last one with {failures[-1]}: "
        "repair the environment, or see the inference server's log"
    )


def measure(batch: Batch, step: int) -> dict[str, float]:
    """The batch in numbers. The reward is the mean over all rollouts that went through, also the filtered ones.

    What rollouts failed with is counted by the name before the colon: verifiers' error classes, and ours of tools.
    """
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    lags = [step - group.policy_version for group in batch.groups for _ in group.rollouts]
    count = len(rollouts)
    failed = Counter(failure.partition(":")[0] for group in batch.groups for failure in group.failures)
    streams = Counter[str]()
    for rollout in rollouts:
        streams.update(rollout.streams)
    for name in streams:
        if name.startswith("teacher/") and not name.endswith("/probes"):
            streams[name] /= sum(name in rollout.streams for rollout in rollouts)  # type: ignore[assignment]
    if TOOLS_CALLS in streams:
        streams[TOOLS_CALL_S] = streams.pop(TOOLS_SECONDS) / streams[TOOLS_CALLS]  # type: ignore[assignment]
    return {
        metrics.ROLLOUT_REWARD: sum(rollout.reward for rollout in rollouts) / count if count else float("nan"),
        metrics.ROLLOUT_PER_S: count / max(batch.ended - batch.began, 1e-9),
        metrics.ROLLOUT_TOKENS: sum(sum(branch.mask) for rollout in rollouts for branch in rollout.branches),
        metrics.ROLLOUT_OFF_POLICY_STEPS: sum(lags) / count if count else float("nan"),
        metrics.ROLLOUT_COUNT: count,
        metrics.ROLLOUT_FAILED: sum(len(group.failures) for group in batch.groups),
        metrics.ROLLOUT_TURNS: sum(rollout.turns for rollout in rollouts) / count if count else float("nan"),
        metrics.ROLLOUT_SAMPLES: len(batch.samples),
        metrics.ROLLOUT_BEGAN: batch.began,
        metrics.ROLLOUT_ENDED: batch.ended,
        **{f"{metrics.ROLLOUT_FAILED}/{kind}": number for kind, number in failed.items()},
        **streams,
    }


def shown(batch: Batch, step: int) -> list[Conversation]:
    """Some of the batch's rollouts for people to read: the first of each group."""
    firsts = [(group.source, group.rollouts[0]) for group in batch.groups if group.rollouts][:SHOWN_A_STEP]
    return [
        Conversation(step, source, rollout.reward, rollout.messages, dict(rollout.streams))
        for source, rollout in firsts
    ]


async def say_waits(waits: Waits, inference: InferenceClient, player: RolloutPlayer | None = None) -> None:
    """Say, for ever, that the engine lets nobody through, or that rollouts are under way, until one ends."""
    while True:
        waits.say("engine", await inference.trouble())
        if player is not None and player.num_playing:
            waits.say("rollouts", f"{player.num_playing} rollouts, none ends: see the environment and its tools")
        await asyncio.sleep(WAITS_POLL_S)


async def run_site(settings: SiteSettings) -> None:
    """Make batches until the site's result is there or a signal asks to stop. Raises what ended the work otherwise."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    work = asyncio.create_task(serve(settings))
    stop = asyncio.create_task(wait_for_stop(settings.paths.result, stopped))
    await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
    for task in (work, stop):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


async def serve(settings: SiteSettings) -> None:
    """The work itself, without an end: take the trainer's weights to the inference server, and make batches."""
    drop_batches(settings.paths.rollouts, first_step(settings))
    conversations.drop(settings.paths.conversations, first_step(settings))
    sources = load_sources(settings)
    import_tokenizers()
    imported()
    async with InferenceClient(f"http://{HOST}:{settings.inference_port}") as inference:
        waits = Waits(settings.paths.waiting("orchestrator"))
        starting = asyncio.create_task(say_waits(waits, inference))
        await inference.wait_ready()
        starting.cancel()
        weights = WeightsWatcher(settings.paths, inference, version=-1 if publishes_first(settings) else 0)
        model = await inference.model_name()
        learned, held = split_lessons(settings)
        stored = load_stored(settings, learned, inference.base_url, model)
        held_out = HeldOut(held, settings.recipe.replay.pairs, inference.base_url, model)
        async with (
            contextlib.aclosing(stored),
            contextlib.aclosing(held_out),
            RolloutPlayer(sources, settings, base_url=inference.base_url, model=model) as player,
        ):
            player.waits = waits
            orchestrator = Orchestrator(settings, player, weights, inference, stored, held_out)
            if settings.resume:
                load_gates(orchestrator.gates, settings.paths.gates)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(weights.follow())
                    group.create_task(say_waits(waits, inference, player))
                    group.create_task(orchestrator.make_batches())
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None  # the one that ended the other


async def wait_for_stop(result: Path, stopped: asyncio.Event) -> None:
    """Return once the file `result` exists or `stopped` is set."""
    while not result.exists() and not stopped.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), _STOP_POLL_S)


def configure_process() -> None:
    """Log to stderr, one line an event; call our own machine directly; and take what was imported out of garbage
    collection, whose last pass costs the exit 0.6 s."""
    logging.basicConfig(level=logging.INFO, handlers=[log_handler()])
    for name in ("httpx", "verifiers", "aiohttp.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
    leave_proxies_out()
    gc.freeze()


def leave_proxies_out() -> None:
    """Keep calls to our own machine away from proxies, which verifiers' client takes from the environment."""
    named = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    if HOST not in named.split(","):
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, (named, HOST)))


def main() -> None:
    """Run the orchestrator of the site in the folder given; one line and an exit code for an expected error."""
    configure_process()
    code = 0
    try:
        asyncio.run(run_site(SiteSettings.load(sys.argv[1])))
    except (ComposerPrimeError, OSError) as error:
        code = last_words(error, folder=Path(sys.argv[1]))
    if num_abandoned():
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)  # Python would wait for threads that a tool blocks
    sys.exit(code)


if __name__ == "__main__":
    main()
