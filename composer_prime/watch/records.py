"""What a look at a run's bucket found, as frozen records: tables are drawn from them, and `--json` prints them."""

from dataclasses import dataclass

from composer_prime.waiting import Waiting


@dataclass(frozen=True)
class SiteStatus:
    """One site's part in the run.

    guest               whether its tokens are claims, which count up to the median of the members' in the same rounds
    state               as its newest beat says: joining, live, done or leaving; "silent" before the first beat, and
                        "revoked" from when the run's owner has taken its key out
    beating             whether its beat changed between two looks; None: one look, or too short a time between
    contributing        whether the newest closed round of some fragment took its offer
    waits               the newest incarnation's last wait of 30 s or more, as it told on its tape
    versions            the open round of each fragment, as the site knows it
    trained_tokens      all it trained, as its newest beat or offer states
    merged_tokens       of those, as the mean over fragments, since a step trains all of them; `carried_tokens` wait for
                        a commit, `dropped_tokens` are lost; what a revoked site carried is
    rounds_taken        rounds that merged an offer of it; `rounds_missed` closed without the one it had made
    bytes_up, bytes_down  that its processes moved up to their last merged offers, as its tape says
    rounds_clipped      of the taken, those in which the norm clip shortened its offer; `least_clip` is the smallest
                        factor, None where there was no such round
    """

    site: str
    guest: bool
    incarnation: int
    incarnations: int
    state: str
    beating: bool | None
    contributing: bool
    beat_counter: int
    inner_step: int
    versions: tuple[int, ...]
    trained_tokens: int
    merged_tokens: int
    carried_tokens: int
    dropped_tokens: int
    rounds_taken: int
    rounds_missed: int
    bytes_up: int
    bytes_down: int
    rounds_clipped: int
    least_clip: float | None
    waits: Waiting | None = None


@dataclass(frozen=True)
class FragmentStatus:
    """One fragment's rounds.

    version          of its newest master: rounds closed so far
    void             of those that merged nothing; `faulty` of them because their commit was unsound
    participation    mean share of the run's sites that a closed round took; None before the first
    open_offers      offers that stand in the open round
    snapshots        versions whose master is stored
    """

    fragment: int
    parameters: int
    version: int
    void: int
    faulty: int
    participation: float | None
    open_offers: int
    snapshots: tuple[int, ...]


@dataclass(frozen=True)
class Bytes:
    """Bytes that sites wrote: payloads of offers, merged parts, and the masters that are stored now."""

    payloads: int
    merged: int
    masters: int


@dataclass(frozen=True)
class RunStatus:
    """A run as one look at its bucket shows it.

    rounds_done   training rounds that every fragment has had, of `rounds`
    quorum        least number of valid offers that a round merges
    contributing  sites of which the newest closed round of some fragment took an offer
    live          sites in state live that were seen to beat; None: not known of every one, as after a single look
    liveness_s    silence after which the sites themselves give one up
    watched_s     seconds between the two looks; 0: there was one
    refused       offers that commits left out, counted by reason
    problems      objects that couldn't be read, and what is wrong with them
    """

    uri: str
    run: str
    created_by: str
    inner_steps: int
    fragments: int
    sync_delay: int
    codec: str
    rounds_done: int
    rounds: int
    closed: bool
    signed: bool
    owner: str | None
    quorum: int
    contributing: int
    live: int | None
    liveness_s: float
    watched_s: float
    sites: tuple[SiteStatus, ...]
    by_fragment: tuple[FragmentStatus, ...]
    refused: dict[str, int]
    bytes: Bytes
    problems: tuple[str, ...]
