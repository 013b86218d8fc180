"""A site's captures on their way into rounds: coded, written ahead, uploaded, offered, settled."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from composer_prime.outer.pseudograd import pseudograd
from composer_prime.sync.protocol import Verdict
from composer_prime.sync.records import MAX_REASON, Offer
from composer_prime.sync.runtime import Task

Outcome = Literal["out", "taken", "missed", "void", "overtaken"]
"""What became of a capture: still out, merged by a commit, passed over (its movement is carried), in a round that took
nobody's (carried too, and no older than it was: the master stands where it stood), or overtaken: a commit took an offer
that an earlier process of this site's name made, which holds some of the same movement."""


@dataclass(frozen=True)
class Capture:
    """A fragment's movement, handed over by the training thread: where it stood and where it is now.

    base, local   fp32 [n]: values adopted, values now; nobody writes to them any more. None when there is nothing to
                  offer, or it was coded before
    residual      fp32 [n]: what coding took from the last merged offer; None: nothing
    tokens, steps, trained_tokens   as the offer states them
    """

    fragment: int
    base: Tensor | None
    local: Tensor | None
    residual: Tensor | None
    tokens: int
    steps: int
    trained_tokens: int

    def movement(self) -> Tensor | None:
        """The pseudo-gradient, with what is left of the last one: fp32 [n], new memory. None: there is nothing."""
        if self.base is None or self.local is None:
            return None
        movement = pseudograd(self.base, self.local)
        return movement if self.residual is None else movement.add_(self.residual)


@dataclass(frozen=True)
class Settled:
    """What became of a capture, and the residual that is left if it was taken."""

    outcome: Outcome
    residual: Tensor | None = None


@dataclass
class Errand:
    """One capture on its way."""

    capture: Capture
    version: int
    """The round that was open at the capture."""
    data: bytes | memoryview | None = None
    """The payload's bytes, once coded and until uploaded and written ahead."""
    stored: bool = False
    """Whether the payload is in the bucket; it may still have to be written ahead."""
    payload: str | None = None
    sha256: str | None = None
    slices: str = ""
    nbytes: int = 0
    norms: tuple[float, ...] = ()
    residual: Tensor | None = None
    """What remains of the movement if the payload is taken."""
    ready: bool = False
    offered_at: int | None = None
    outcome: Outcome = "out"
    upload: Task | None = None
    failure: BaseException | None = None

    @classmethod
    def of_offer(cls, offer: Offer, residual: Tensor | None) -> "Errand":
        """Rule 12: an own offer of an earlier incarnation that is still out."""
        capture = Capture(offer.fragment, None, None, None, offer.tokens, offer.steps, offer.trained_tokens)
        return cls(
            capture,
            offer.version,
            payload=offer.payload,
            sha256=offer.sha256,
            slices=offer.slices,
            nbytes=offer.nbytes,
            norms=offer.norms,
            residual=residual,
            ready=True,
            offered_at=offer.version,
        )


@dataclass
class OpenRound:
    """What this site has seen of one fragment's open round.

    offers    sound records in the order seen; `checked` are those whose payload was read and decoded, too
    bases     the masters' hashes on which all offers seen stand, sound or not
    """

    version: int
    offers: dict[str, Offer] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)
    bases: dict[str, str] = field(default_factory=dict)
    quorum_at: float | None = None
    all_at: float | None = None
    sound_at: float | None = None
    closable_at: float | None = None

    def refuse(self, site: str, why: str) -> None:
        """An offer isn't worth merging; the commit says why."""
        self.verdicts[site], self.faults[site] = "invalid", why[:MAX_REASON]
        self.offers.pop(site, None)

    def set_aside(self, site: str, why: str) -> None:
        """A sound offer of a process that was replaced: its site has nothing in this round, and can't offer again."""
        self.verdicts[site], self.faults[site] = "empty", why
