"""What the tapes of a run's honest sites say of other sites' offers, put together: an auditor's list of names."""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.watch.tapes import WHOLE, is_against

Place = tuple[int, int, str]
"""(fragment, version, site) of an offer."""


@dataclass
class Named:
    """Offers that at least one honest tape names.

    refused       by a commit, as who read it tells
    excluded      from a part, by the part's number, as who merged it tells
    clipped       taken and cut by the norm clip
    equivocated   taken, and then another one was put over it
    agreement     of the taken with the others, by part; under WHOLE where all was merged at once
    told          what tapes say of rounds that may not be: void ones, refusals of honest offers
    """

    refused: set[Place] = field(default_factory=set)
    excluded: set[tuple[Place, int]] = field(default_factory=set)
    clipped: set[Place] = field(default_factory=set)
    equivocated: set[Place] = field(default_factory=set)
    agreement: defaultdict[Place, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    told: set[str] = field(default_factory=set)

    def stood_against(self, place: Place) -> bool:
        """Whether an offer pointed away from where the others went, on the whole."""
        return is_against(self.agreement.get(place, {}))

    def add(self, event: Mapping[str, Any], honest: Collection[str]) -> None:
        """Take one event in."""
        if event["event"] not in ("round", "part", "equivocated"):
            return
        round_ = int(event["fragment"]), int(event["version"])
        if event["event"] == "equivocated":
            self.equivocated.add((*round_, event["by"]))
            return
        self.clipped.update((*round_, site) for site in event.get("clipped", ()))
        self.refused.update((*round_, site) for site in event.get("refused", ()))
        self.excluded.update(((*round_, site), event["part"]) for site in event.get("excluded", ()))
        for site, cosine in event["agreement"].items():
            self.agreement[(*round_, site)][event.get("part", WHOLE)] = cosine
        if event.get("fault") is not None:
            self.told.add(f"round {round_[0]}/{round_[1]} void: {event['fault']}")
        for site, why in event.get("refused", {}).items():
            if site in honest:
                self.told.add(f"{site} in round {round_[0]}/{round_[1]}: {why}")


def read_names(store: Store, honest: Collection[str]) -> Named:
    """What stands on the honest sites' tapes in the bucket."""
    found = Named()
    for reader in honest:
        for key in store.list(keys.tape_prefix(reader)):
            for event in map(json.loads, store.get(key).splitlines()):
                found.add(event, honest)
    return found
