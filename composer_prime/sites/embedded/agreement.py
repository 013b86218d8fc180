"""How often the policy does what teachers agree on, at decision points that it doesn't learn from.

Its answers are greedy and without thinking, as text teachers' student is read (traces/ask/gate.py).
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from composer_prime import metrics
from composer_prime.bearer import SITE_TOKEN, site_token
from composer_prime.config.stored import PairsConfig
from composer_prime.sites.embedded.stored import drawn
from composer_prime.traces.ask.gate import Student
from composer_prime.traces.ask.questions import Wording
from composer_prime.traces.pairs.actions import same_action
from composer_prime.traces.pairs.lessons import Lesson
from composer_prime.traces.states import calls_of


class HeldOut:
    """The points, and the policy behind its site's own server. `aclose` it in the end."""

    def __init__(self, lessons: Sequence[Lesson], config: PairsConfig | None, base_url: str, model: str) -> None:
        self._lessons = lessons
        self._size = 0 if config is None else min(config.batch_size, len(lessons))
        site_token()  # in the variable, also where nobody handed one down
        self._student = Student(base_url, Wording(), model=model, key_var=SITE_TOKEN)

    async def measure(self, step: int) -> dict[str, float]:
        """The agreement at a step's share of the points, which is also the step's reward; nothing without points."""
        places = drawn(len(self._lessons), self._size, step, "held out")
        found = await asyncio.gather(*(self._agrees(self._lessons[place]) for place in places))
        if not found:
            return {}
        by_name: dict[str, list[bool]] = defaultdict(list)
        for place, agrees in zip(places, found, strict=True):
            calls = calls_of(self._lessons[place].chosen)
            by_name[calls[0]["function"]["name"] if calls else "text"].append(agrees)
        shares = {f"{metrics.AGREEMENT}/{name}": fmean(agreeing) for name, agreeing in by_name.items()}
        return {metrics.AGREEMENT: fmean(found), metrics.ROLLOUT_REWARD: fmean(found), **shares}

    async def _agrees(self, lesson: Lesson) -> bool:
        reading = await self._student.read(lesson.state)
        if reading is None or reading.action is None:
            return False
        return same_action(reading.action, lesson.chosen, lesson.state.tools, lesson.state.cwd)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._student.close()
