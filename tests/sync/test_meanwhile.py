"""What other threads of a site do while a pass is under way."""

from composer_prime.sync.errands import Capture, Errand
from tests.sync.harness import HandSite, make_terms


def test_a_capture_that_is_handed_over_in_the_midst_of_a_pass_stops_nobody(store, clock):
    a = HandSite(store, make_terms(), "a", clock)

    class Turning(Errand):
        """While it is looked at, the training thread takes its turn with the other fragment."""

        @property
        def offered_at(self) -> int | None:
            if 1 not in a.courier._errands:
                a.hand_over(1, 1.0)
            return None

        @offered_at.setter
        def offered_at(self, version: int | None) -> None:
            pass

    a.courier._errands[0] = Turning(Capture(0, None, None, None, 0, 0, 0), 0)
    assert a.courier._served() == [] and set(a.courier._errands) == {0, 1}
    a.courier.tick()
