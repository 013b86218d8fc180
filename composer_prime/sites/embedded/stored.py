"""What teachers agree on, and stored turns, as samples of a step's batch, which the loss learns from as from rollouts.

An action with advantage 1 has cross entropy's gradient under the policy-gradient loss. Beside it, a pair's two actions
have the advantages under which the loss has DPO's gradient (or SimPO's) at the policy that scores them. The site's own
server scores both, so ratios and trust regions act on them as on what was sampled.
"""

import asyncio
import logging
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from composer_prime import metrics
from composer_prime.bearer import headers, site_token
from composer_prime.config.distill import is_off, weight_at
from composer_prime.config.settings import SiteSettings
from composer_prime.config.teachers import PairsConfig, StoredTracesConfig
from composer_prime.errors import BadInput, SiteError, TeacherError
from composer_prime.losses.preferences import Formed, Scored, lead, margin, pair_advantages
from composer_prime.sites.embedded.batches import TrainingSample
from composer_prime.sites.embedded.renderer_choice import made_renderer, renderer_settings
from composer_prime.teachers.served import ServedModel, held_name
from composer_prime.traces.pairs.encoding import Action, Encoder, scores
from composer_prime.traces.pairs.lessons import Lesson, read_lessons, step_advantages

logger = logging.getLogger(__name__)

MAX_UNSCORED_DRAWS = 3
"""Steps in a row of which nothing is scored before the site ends."""

SAID_EVERY = 1000
"""Lessons that are fitted to a sample between two lines of the log."""

SPLITS = 10_000
"""Parts that decision points fall into by their ids: those of the first are held out."""


@dataclass(frozen=True)
class EncodedPair:
    """The agreed action, the author's where that is another, and the teachers' share that agrees, in (0, 1]."""

    chosen: Action
    rejected: Action | None
    weight: float


@dataclass(frozen=True)
class EncodedTurn:
    """advantage: in [-1, 1]."""

    action: Action
    advantage: float


@dataclass(frozen=True)
class ScoredPair:
    """A pair under the policy of the moment.

    samples     those that have something to teach
    logprob     nats a token of the agreed action
    margin      as losses.preferences has it; None: the author's action is the agreed one, or the policy can't form
                the agreed one yet
    is_learned  whether its preference term rests, since the policy has it
    """

    samples: tuple[TrainingSample, ...]
    logprob: float
    margin: float | None = None
    is_learned: bool = False


class StoredSamples:
    """Draws a step's pairs and stored turns and has them scored. `aclose` it in the end.

    policy, first  the policy of the moment, and the run's first, which DPO compares it with
    """

    def __init__(
        self,
        settings: SiteSettings,
        pairs: Sequence[EncodedPair],
        turns: Sequence[EncodedTurn],
        policy: ServedModel,
        first: ServedModel,
    ) -> None:
        replay = settings.recipe.replay
        self._pairs_config, self._traces_config = replay.pairs, replay.traces
        self._pairs, self._turns = pairs, turns
        self._policy, self._first = policy, first
        self._seed = settings.sampling_seed
        self._reference: dict[int, tuple[float, ...]] = {}
        self._formed = Formed(-math.inf if replay.pairs is None else replay.pairs.min_logprob)
        self._num_unscored_draws = 0
        self._has_learned_all = False
        self._last_error: TeacherError | None = None

    def teaches(self, step: int) -> bool:
        """Whether a batch without a rollout that teaches still teaches something; as far as the last draw can tell."""
        has_pairs = bool(self._pairs) and self._has_pairs(step) and not self._has_learned_all
        return has_pairs or (bool(self._turns) and self._has_turns(step))

    def _has_pairs(self, step: int) -> bool:
        config = self._pairs_config
        return config is not None and bool(weight_at(config.sft_tau, step) or weight_at(config.tau, step))

    def _has_turns(self, step: int) -> bool:
        return self._traces_config is not None and bool(weight_at(self._traces_config.tau, step))

    async def draw(self, step: int, version: int) -> tuple[list[TrainingSample], dict[str, float]]:
        """The samples of a training step, under the policy of `version`, and their metrics.

        Raises SiteError when the server has scored none for `MAX_UNSCORED_DRAWS` steps in a row.
        """
        pairs = await asyncio.gather(*self._scored_pairs(step, version))
        turns = await asyncio.gather(*self._scored_turns(step, version))
        scored = [pair for pair in pairs if pair is not None]
        samples = [sample for pair in scored for sample in pair.samples]
        self._has_learned_all = bool(scored) and not samples
        samples += [turn for turn in turns if turn]
        self._num_unscored_draws = 0 if scored or samples or not (pairs or turns) else self._num_unscored_draws + 1
        if self._num_unscored_draws == MAX_UNSCORED_DRAWS:
            raise SiteError(
                f"nothing of replay.pairs and replay.traces was scored, {MAX_UNSCORED_DRAWS} times in a row; the last "
                f"with: {self._last_error}"
            )
        found: dict[str, float] = {}
        if pairs:
            found[metrics.PAIRS_COUNT] = len(scored)
            found[metrics.PAIRS_LEARNED] = sum(pair.is_learned for pair in scored)
            found[metrics.PAIRS_FAILED] = len(pairs) - len(scored)
            found[metrics.PAIRS_PREFERRED] = sum(pair.margin is not None for pair in scored)
        if scored:
            found[metrics.PAIRS_LOGPROB] = fmean(pair.logprob for pair in scored)
        if margins := [pair.margin for pair in scored if pair.margin is not None]:
            found[metrics.PAIRS_MARGIN] = fmean(margins)
            found[metrics.PAIRS_ACCURACY] = fmean(margin > 0 for margin in margins)
        if turns:
            found[metrics.TRACES_COUNT] = sum(turn is not None for turn in turns)
            found[metrics.TRACES_FAILED] = sum(turn is None for turn in turns)
        return samples, found

    async def aclose(self) -> None:
        """Close the connections."""
        await self._policy.close()
        await self._first.close()

    def _scored_pairs(self, step: int, version: int) -> Iterable[Any]:
        config = self._pairs_config
        if config is None or not self._has_pairs(step):
            return []
        places = drawn(len(self._pairs), config.batch_size, step, f"{self._seed}/pairs")
        return [self._pair(config, place, step, version) for place in places]

    def _scored_turns(self, step: int, version: int) -> Iterable[Any]:
        config = self._traces_config
        if config is None or not self._has_turns(step):
            return []
        places = drawn(len(self._turns), config.batch_size, step, f"{self._seed}/traces")
        return [self._turn(config, self._turns[place], step, version) for place in places]

    async def _pair(self, config: PairsConfig, place: int, step: int, version: int) -> ScoredPair | None:
        """None where the server gave no score."""
        pair = self._pairs[place]
        tau, sft = weight_at(config.tau, step) * pair.weight, weight_at(config.sft_tau, step) * pair.weight
        try:
            own = await scores(self._policy, pair.chosen)
            logprob = fmean(own)
            is_formed = self._formed.saw(place, logprob)
            if pair.rejected is None or not tau or not is_formed:
                return ScoredPair(_samples([(pair.chosen, own, sft)], "pairs", version), logprob)
            others = await scores(self._policy, pair.rejected)
            references = await self._referenced(config, place, pair.chosen, pair.rejected)
        except TeacherError as error:
            return self._left_out(error)
        chosen = Scored(sum(own), pair.chosen.num_tokens, references[0])
        rejected = Scored(sum(others), pair.rejected.num_tokens, references[1])
        settings = {"beta": config.scale, "gamma": config.gamma}
        is_learned = lead(chosen, rejected) >= config.max_lead
        pulls = (0.0, 0.0) if is_learned else pair_advantages(config.loss, chosen, rejected, **settings)
        weighed = [(pair.chosen, own, tau * pulls[0] + sft), (pair.rejected, others, tau * pulls[1])]
        at = margin(config.loss, chosen, rejected, **settings)
        return ScoredPair(_samples(weighed, "pairs", version), logprob, at, is_learned)

    async def _referenced(self, config: PairsConfig, place: int, chosen: Action, rejected: Action) -> tuple[float, ...]:
        """Both actions' logprobs in nats under the run's first policy; zeros where it isn't compared with."""
        if config.loss != "dpo":
            return 0.0, 0.0
        if place not in self._reference:
            both = await asyncio.gather(*(scores(self._first, action) for action in (chosen, rejected)))
            self._reference[place] = tuple(map(sum, both))
        return self._reference[place]

    def _left_out(self, error: TeacherError) -> None:
        logger.warning("unscored: %s", error)
        self._last_error = error

    async def _turn(
        self, config: StoredTracesConfig, turn: EncodedTurn, step: int, version: int
    ) -> TrainingSample | None:
        try:
            logprobs = await scores(self._policy, turn.action)
        except TeacherError as error:
            return self._left_out(error)
        found = _samples([(turn.action, logprobs, weight_at(config.tau, step) * turn.advantage)], "traces", version)
        return found[0] if found else None


def drawn(count: int, size: int, step: int, seed: str) -> list[int]:
    """The places that a step draws out of `count`, `size` of them; each comes once before any comes again."""
    places: list[int] = []
    while count and len(places) < size:
        epoch, start = divmod(step * size + len(places), count)
        places += random.Random(f"{seed}/{epoch}").sample(range(count), count)[start : start + size - len(places)]
    return places


def _samples(
    weighed: Iterable[tuple[Action, Sequence[float], float]], name: str, version: int
) -> tuple[TrainingSample, ...]:
    """Actions with their logprobs and advantages as samples; those with advantage 0 teach nothing."""
    return tuple(_sample(*each, name, version) for each in weighed if each[2])


def _sample(action: Action, logprobs: Sequence[float], advantage: float, name: str, version: int) -> TrainingSample:
    own = iter(logprobs)
    return TrainingSample(
        token_ids=action.token_ids,
        mask=action.mask,
        logprobs=[next(own) if is_ours else 0.0 for is_ours in action.mask],
        temperatures=[1.0] * len(action.token_ids),
        advantages=[advantage if is_ours else 0.0 for is_ours in action.mask],
        env_name=name,
        reward=0.0,
        policy_version=version,
    )


def load_stored(settings: SiteSettings, lessons: Sequence[Lesson], base_url: str, model: str) -> StoredSamples:
    """What the recipe's files hold, in the policy's tokens; nothing without `[replay.pairs]` and `[replay.traces]`.

    lessons          of `[replay.pairs]`, those to be learned from
    base_url, model  of the site's own server, and the name under which it has the policy

    Raises BadInput when a file can't be read, or holds nothing that fits a sample.
    """
    replay = settings.recipe.replay
    pairs: list[EncodedPair] = []
    turns: list[EncodedTurn] = []
    if replay.pairs or replay.traces:
        encoder = Encoder(_renderer(settings), settings.recipe.seq_len)
        pairs = encode_lessons(encoder, lessons, replay.pairs) if replay.pairs else []
        turns = encode_turns(encoder, replay.traces) if replay.traces else []
    first = held_name(model, "frozen") if settings.recipe.holds_first_policy else model
    served = [ServedModel(base_url, model=name, headers=headers(site_token())) for name in (model, first)]
    return StoredSamples(settings, pairs, turns, *served)


def _renderer(settings: SiteSettings) -> Any:
    """The one that the site's rollouts are written with."""
    recipe, folder = settings.recipe, settings.model_dir
    return made_renderer(renderer_settings(recipe.orchestrator.renderer, recipe.model.name, folder), folder)


def split_lessons(settings: SiteSettings) -> tuple[list[Lesson], list[Lesson]]:
    """The lessons of `[replay.pairs]` to learn from; and, in a run without an environment, those to measure at."""
    config = settings.recipe.replay.pairs
    if config is None:
        return [], []
    from composer_prime.traces.ingest.store import TraceStore

    found = list(read_lessons(TraceStore(config.store), config.file))
    share = 0.0 if settings.recipe.orchestrator.train.source else config.held_out
    is_held_out = [int(lesson.state.id, 16) % SPLITS < share * SPLITS for lesson in found]
    learned, held = ([one for one, held in zip(found, is_held_out, strict=True) if held is of] for of in (False, True))
    if share and not (learned and held):
        raise BadInput(
            f"replay.pairs.held_out ({share:g}) leaves {len(learned)} of the {len(found)} lessons of {config.file} to "
            f"learn from, and {len(held)} to measure at: change it, or set 0"
        )
    return learned, held


def encode_lessons(encoder: Encoder, lessons: Sequence[Lesson], config: PairsConfig) -> list[EncodedPair]:
    """The lessons that fit, the same results cut for both actions of one. Raises BadInput when none fits."""
    found = []
    num_cut = 0
    has_preference = not is_off(config.tau)
    for number, lesson in enumerate(lessons):
        if number % SAID_EVERY == 0:
            logger.info("fitting lesson=%d of=%d file=%s", number, len(lessons), config.file)
        messages, tools = lesson.state.messages, lesson.state.tools
        said = [lesson.chosen, *([lesson.rejected] if has_preference and lesson.rejected else [])]
        actions, count = encoder.fit_all(messages, tools, said, may_cut=config.too_long == "cut")
        if actions is not None:
            found.append(EncodedPair(actions[0], actions[1] if len(actions) > 1 else None, lesson.weight))
            num_cut += bool(count)
    logger.info("cut=%d of=%d file=%s", num_cut, len(lessons), config.file)
    _say(str(config.file), "lessons", len(found), len(lessons))
    return found


def encode_turns(encoder: Encoder, config: StoredTracesConfig) -> list[EncodedTurn]:
    """The turns of a store that have an advantage other than 0. Raises BadInput when none fits."""
    from composer_prime.traces.ingest.store import TraceStore

    advantages = None if config.scores is None else step_advantages(config.scores)
    states = list(TraceStore(config.store).states())
    weighed = [
        (state, 1.0 if advantages is None else advantages.get((state.session, state.turn), 0.0)) for state in states
    ]
    if config.scores is not None and not any(advantage for _, advantage in weighed):
        raise BadInput(
            f"{config.scores} says nothing for or against a turn of {config.store} ({len(states)} in all): leave "
            "replay.traces.scores out, or ask more teachers"
        )
    found = [
        EncodedTurn(action, advantage)
        for state, advantage in weighed
        if advantage and (action := encoder.encode(state.messages, state.tools, state.action)) is not None
    ]
    _say(str(config.store), "turns", len(found), len(states))
    return found


def _say(path: str, what: str, num_found: int, total: int) -> None:
    if not num_found:
        raise BadInput(f"{path} has no {what} that fit a sample ({total} in all): raise seq_len, or give another file")
    logger.info("%s=%d of=%d file=%s", what, num_found, total, path)
