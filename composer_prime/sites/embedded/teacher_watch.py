"""Plays the hinted teacher beside a step's rollouts, and ends the hint term of the site when the teacher collapses."""

import logging
from statistics import fmean
from typing import Any

from composer_prime.config.settings import SiteSettings
from composer_prime.hints.collapse import NUM_PROBES, CollapseAlarm
from composer_prime.metrics import HINTS_TEACHER_HEEDS, HINTS_TEACHER_REWARD
from composer_prime.replay.served import held_name
from composer_prime.sites.embedded.rollouts import RolloutPlayer

logger = logging.getLogger(__name__)


class TeacherWatch:
    """Of a teacher that moves; a frozen one can't collapse, and isn't played.

    model  the name under which the server has the policy
    """

    def __init__(self, settings: SiteSettings, player: RolloutPlayer, model: str) -> None:
        hints = settings.recipe.hints
        self._player = player
        self._model: str | None = None
        if hints is None or hints.teacher == "frozen":
            return
        self._model = held_name(model, hints.teacher) if hints.is_held else model
        self._alarm = CollapseAlarm.from_tape(settings.paths.tape("orchestrator"))
        self._obey()

    async def probe(self) -> dict[str, float]:
        """Play the last hinted tasks; what came of it by metric name, {} where none was played."""
        if self._model is None or self._alarm.has_gone_off:
            return {}
        rollouts = await self._player.play_hinted(self._model, NUM_PROBES)
        if not rollouts:
            return {}
        heeds = fmean(rollout.streams[HINTS_TEACHER_HEEDS] for rollout in rollouts)
        self._alarm.add(heeds)
        self._obey()
        return {HINTS_TEACHER_HEEDS: heeds, HINTS_TEACHER_REWARD: fmean(rollout.reward for rollout in rollouts)}

    def _obey(self) -> None:
        if self._alarm.has_gone_off:
            logger.warning("%s", self._alarm)
            for source in self._player.sources:
                env: Any = source.env  # the one that stamps: the recipe has hints
                env.is_hinting = False
