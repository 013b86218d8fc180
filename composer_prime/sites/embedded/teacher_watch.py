"""Plays hints' teacher beside a step's rollouts, and ends the hint term of the site when the teacher collapses."""

import logging
from statistics import fmean
from typing import Any

from composer_prime.config.settings import SiteSettings
from composer_prime.hints.collapse import CollapseAlarm
from composer_prime.metrics import HINTS_PROBES, HINTS_TEACHER_FIRST_CALL, HINTS_TEACHER_REWARD, read_tape
from composer_prime.replay.served import held_name
from composer_prime.sites.embedded.rollouts import Rollout, RolloutPlayer

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
        self._alarm = CollapseAlarm.from_tape(read_tape(settings.paths.tape("orchestrator")))
        self._obey()

    async def probe(self) -> dict[str, float]:
        """Play the hinted tasks; what came of it by metric name, {} where none was played to its end."""
        if self._model is None or self._alarm.has_gone_off:
            return {}
        outcomes = await self._player.play_hinted(self._model)
        if failures := [each for each in outcomes if isinstance(each, str)]:
            logger.warning("hints' teacher: failed=%d of=%d last=%r", len(failures), len(outcomes), failures[-1])
        rollouts = [each for each in outcomes if isinstance(each, Rollout)]
        if not rollouts:
            return {}
        succeeded = [rollout.streams[HINTS_TEACHER_FIRST_CALL] for rollout in rollouts]
        self._alarm.add(int(sum(succeeded)), len(rollouts))
        self._obey()
        return {
            HINTS_PROBES: len(rollouts),
            HINTS_TEACHER_FIRST_CALL: fmean(succeeded),
            HINTS_TEACHER_REWARD: fmean(rollout.reward for rollout in rollouts),
        }

    def _obey(self) -> None:
        if self._alarm.has_gone_off:
            logger.warning("%s", self._alarm)
            for source in self._player.sources:
                env: Any = source.env  # the one that stamps: the recipe has hints
                env.is_hinting = False
