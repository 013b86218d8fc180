"""Which records count: "A valid offer", "A commit follows" and "A part follows from its commit" of the document.

Each returns what is wrong in words, or None; none looks at anything but the arguments.
"""

import base64
import hashlib
import math
import re
from dataclasses import dataclass, field
from typing import Any

from tests.spec.arithmetic import multipliers, offer_norm
from tests.spec.codecs import MERGED, size_bounds
from tests.spec.layout import Slices
from tests.spec.signing import Admission, Members

Record = dict[str, Any]

_HASH_BYTES = 20
_COMPARED_FROM_BYTES = 64


@dataclass(frozen=True)
class Taken:
    """An offer that a sound commit took."""

    version: int
    offer: Record


@dataclass
class Log:
    """What the commits of one fragment have said so far."""

    fragment: int
    slices: Slices
    master_sha: str
    previous: str
    version: int = 0
    voids: list[int] = field(default_factory=list)
    floor: int = 0
    """The newest admission that a commit named which was signed under it."""
    taken: list[Taken] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Values of the fragment."""
        return self.slices.bounds[-1]

    def part_size(self, index: int, num_parts: int) -> int:
        """Values of one part."""
        return sum(self.slices.sizes()[each] for each in self.slices.part(index, num_parts))

    def window(self, terms: Record) -> range:
        """The last `max_stale_rounds` rounds."""
        return range(max(0, self.version - terms["max_stale_rounds"]), self.version)

    def recent_voids(self, terms: Record) -> list[int]:
        """Which of these were void."""
        return [void for void in self.voids if void in self.window(terms)]


def slice_hashes(offer: Record) -> list[bytes]:
    raw = base64.b64decode(offer["slices"])
    return [raw[at : at + _HASH_BYTES] for at in range(0, len(raw), _HASH_BYTES)]


def slice_hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_HASH_BYTES]


def compared(offer: Record) -> bool:
    """False where two equal payloads may be chance."""
    return offer["nbytes"] >= _COMPARED_FROM_BYTES and any(offer["norms"])


def offer_fault(offer: Record, log: Log, terms: Record) -> str | None:
    """What keeps an offer out of the round that is open in `log`; signatures and the round's others aside."""
    if (offer["fragment"], offer["version"]) != (log.fragment, log.version):
        return "is of another round"
    if offer["base_sha"] != log.master_sha:
        return "stands on another master"
    if offer["payload"] is None:
        return None
    if offer["codec"] != terms["codec"]:
        return "has another codec than the run"
    if not 0 < offer["tokens"] <= offer["trained_tokens"] or offer["steps"] < 1:
        return "has no tokens or steps, or more than were trained"
    if (fault := _claim_fault(offer, log, terms)) is not None:
        return fault
    bounds = [size_bounds(terms["codec"], size) for size in log.slices.sizes()]
    if not sum(least for least, _ in bounds) <= offer["nbytes"] <= sum(most for _, most in bounds):
        return "has another size than the fragment's"
    if any(norm < 0 for norm in offer["norms"]) or not math.isfinite(offer_norm(offer["norms"])):
        return "has norms that can't be"
    try:
        hashes = slice_hashes(offer)
    except ValueError:
        return "has slices that aren't base64"
    raw = b"".join(hashes)
    if base64.b64encode(raw).decode() != offer["slices"] or len(raw) != _HASH_BYTES * len(log.slices):
        return "has another number of slices than the fragment"
    if len(offer["norms"]) != len(log.slices):
        return "has another number of norms than the fragment"
    if hashlib.sha256(raw).hexdigest() != offer["sha256"]:
        return "has slices that don't make its sha256"
    return _payload_fault(offer, log, terms)


def _claim_fault(offer: Record, log: Log, terms: Record) -> str | None:
    if terms["step_tokens"] is None:
        return None
    window = [each.offer for each in log.taken if each.version in log.window(terms)]
    captured = [int(each["payload"].split("/")[2]) for each in window if each["site"] == offer["site"]]
    since, tokens = log.version - max(captured, default=0), 4 * terms["step_tokens"]
    if offer["tokens"] > tokens * _most_steps(since, terms) or offer["steps"] > _most_steps(since, terms):
        return "claims more than the rounds since its last offer have time for"
    if offer["trained_tokens"] > tokens * _most_steps(log.version, terms):
        return "claims to have trained more than the run had time for"
    return None


def _most_steps(rounds: int, terms: Record) -> int:
    turn = terms["inner_steps"] // terms["fragments"]
    return (rounds + 2) * terms["fragments"] * (turn + terms["sync_delay"])


def _payload_fault(offer: Record, log: Log, terms: Record) -> str | None:
    found = re.fullmatch(r"rounds/(\d{4,})/(\d{8,})/payload/([a-z0-9-]+)-([0-9a-f]{16})", offer["payload"])
    if found is None or (int(found[1]), found[3], found[4]) != (log.fragment, offer["site"], offer["sha256"][:16]):
        return "has a payload key of another fragment, site or hash"
    version = int(found[2])
    if offer["payload"] != f"rounds/{log.fragment:04}/{version:08}/payload/{found[3]}-{found[4]}":
        return "has a payload key that is spelled otherwise"
    if not log.version - terms["max_stale_rounds"] <= version <= log.version:
        return "has a payload of a round too far back"
    window = [each.offer for each in log.taken if each.version in log.window(terms)]
    if any(each["payload"] == offer["payload"] for each in window):
        return "has a payload that was taken before"
    theirs = [each["sha256"] for each in window if each["site"] != offer["site"]]
    if compared(offer) and offer["sha256"] in theirs:
        return "equals one of another site that was taken"
    return None


def honours(commit: Record, members: Members) -> Admission | None:
    """The admission that a commit names, where it is sound and lets this committer commit, and it has signed."""
    number = commit["admissions"]
    if number >= len(members.admissions):
        return None
    admission = members.admissions[number]
    if not admission.sound or admission.sha != commit["admission_sha"]:
        return None
    return admission if members.may_close(admission, commit["committer"], "Commit", commit) else None


def commit_fault(commit: Record, log: Log, terms: Record, members: Members) -> str | None:
    """Why the commit of the round that is open in `log` is void, as far as the records say."""
    if (commit["fragment"], commit["version"]) != (log.fragment, log.version):
        return "is of another round"
    if commit["previous"] != log.previous:
        return "names another commit before"
    if commit["base_sha"] != log.master_sha:
        return "stands on another master"
    if commit["voids"] != log.recent_voids(terms):
        return "names other void rounds"
    admission = honours(commit, members)
    if admission is None:
        return "isn't signed by a site that may commit under the admission it names"
    if admission.number < log.floor:
        return "names an older admission than a commit before"
    offers = [each["offer"] for each in commit["taken"]]
    sites = [offer["site"] for offer in offers]
    if sites != sorted(set(sites)):
        return "takes offers out of order, or two of one site"
    for offer in offers:
        fault = offer_fault(offer, log, terms)
        if offer["payload"] is None:
            fault = "has no payload"
        elif fault is None and not members.signed(admission, offer["site"], "Offer", offer):
            fault = "isn't signed"
        if fault is not None:
            return f"takes an offer of {offer['site']} that {fault}"
    shas = [offer["sha256"] for offer in offers if compared(offer)]
    if len(shas) != len(set(shas)):
        return "takes two equal offers"
    members_offers = [offer for offer in offers if offer["site"] not in admission.guests]
    if offers and len(members_offers) < terms["quorum"]:
        return "takes fewer members' offers than the quorum"
    if [each["multiplier"] for each in commit["taken"]] != multipliers(offers, terms, admission.guests):
        return "has other multipliers than the rule's"
    if commit["num_parts"] != parts_of(len(offers), log.slices, terms):
        return "has another number of parts than the rule's"
    return None


def parts_of(num_offers: int, slices: Slices, terms: Record) -> int:
    """Into how many parts a round is cut; 0 where everybody reads every payload."""
    if num_offers <= terms["gather_sites"] or len(slices) == 1:
        return 0
    return min(num_offers, len(slices))


def part_fault(
    part: Record, index: int, commit: Record, commit_sha: str, log: Log, terms: Record, members: Members
) -> str | None:
    """Why the record of part `index` of the commit that closes the round open in `log` counts as zeros."""
    if (part["fragment"], part["version"], part["part"]) != (log.fragment, log.version, index):
        return "is of another part"
    if part["commit_sha"] != commit_sha:
        return "is of another commit"
    admission = members.admissions[commit["admissions"]]
    if not members.may_close(admission, part["reducer"], "Part", part):
        return "isn't signed by a site that may merge"
    excluded = [each["site"] for each in part["excluded"]]
    taken = [each["offer"]["site"] for each in commit["taken"]]
    if excluded != sorted(set(excluded)) or not set(excluded) <= set(taken):
        return "leaves out sites out of order, or such that weren't taken"
    if len(excluded) == len(taken):
        return None if part["payload"] is None else "has a payload of nothing"
    if part["payload"] is None or part["sha256"] is None:
        return "has no payload"
    if part["payload"] != f"rounds/{log.fragment:04}/{log.version:08}/merged/{index:04}-{part['sha256'][:16]}":
        return "has a payload key of another part or hash"
    if part["nbytes"] != size_bounds(MERGED, log.part_size(index, commit["num_parts"]))[0]:
        return "has another size than its values"
    return None
