"""What a run's owner may do while it goes on: admit and revoke keys.

Each act is one create-once record under the next number; sites honour it from their next look at the members on.
"""

from collections.abc import Collection

from composer_prime.errors import BadInput
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Admission, Manifest
from composer_prime.sync.roster import Roster
from composer_prime.sync.signatures import SigningKey, check_public


class Owner:
    """The owner's hand on one run. `key` is the owner's, in a run that has an owner.

    Every act raises BadInput when the run doesn't allow it, or when another act took its number first.
    """

    def __init__(self, store: Store, key: SigningKey | None = None) -> None:
        """Raises BadInput when no run is there, or when it has an owner and this isn't the owner's key."""
        self._store = store
        self._manifest, sha = find_manifest(store)
        _check_key(self._manifest, key)
        self._roster = Roster(store, self._manifest, sha, key)
        self._roster.refresh()

    def admit(self, site: str, public: str, *, guest: bool = False) -> Admission:
        """Let `site` take part with the key `public` from now on; an earlier key of that name no longer counts.

        guest   it may offer, and never commit, merge a part or close the run
        """
        keys.check_site_name(site)
        admitted, guests = self._admitted(), self._roster.guests()
        if admitted.get(site) == check_public(public) and (site in guests) == guest:
            raise BadInput(f"site {site} is admitted with that key already: nothing is to be done")
        return self._change(admitted | {site: public}, guests | {site} if guest else guests - {site})

    def check_open(self, allowed: Collection[str], *, guest: bool) -> None:
        """Raise BadInput where it isn't safe to admit one site more: see `check_guarded` and `check_minority`."""
        check_guarded(self._manifest, allowed)
        if guest:
            check_minority(self._manifest, self._admitted(), self._roster.guests())

    def revoke(self, site: str) -> Admission:
        """From now on nothing that `site` signs counts; what commits took of it before stays merged."""
        admitted = self._admitted()
        if site not in admitted:
            raise BadInput(f"site {site} is not admitted; those that are: {', '.join(sorted(admitted)) or 'none'}")
        left = {name: key for name, key in admitted.items() if name != site}
        return self._change(left, self._roster.guests() - {site})

    def _admitted(self) -> dict[str, str]:
        """Public key by site, as the last sound admission record leaves it."""
        if self._manifest.owner is None:
            what = "has fixed keys" if self._manifest.keys else "asks for no keys"
            raise BadInput(
                f"run {self._manifest.run} {what} and no owner who could change that: "
                "create a run with outer.owner to admit and revoke"
            )
        for number in range(self._roster.newest, 0, -1):
            record = find_record(self._store, Admission, keys.admission(number))
            if record is not None and record.number == number and self._roster.owner_fault(record) is None:
                return dict(record.keys)
        return dict(self._manifest.keys)

    def _change(self, admitted: dict[str, str], guests: Collection[str]) -> Admission:
        record = self._roster.sign(
            Admission(number=self._roster.newest + 1, keys=admitted, guests=tuple(sorted(guests)))
        )
        key = keys.admission(record.number)
        if not self._store.create(key, record.to_bytes()):
            raise BadInput(
                f"{key} was written by someone else at the same moment, and stays: "
                "look at what it changed, then give the command again"
            )
        return record


def check_guarded(manifest: Manifest, allowed: Collection[str]) -> None:
    """Raise BadInput where one site alone could ruin the run, unless the owner allows each such term by its name."""
    terms = manifest.terms
    for name, value, is_open, safe in (
        ("aggregate", terms.aggregate, terms.aggregate == "mean", "clipped"),
        ("weighting", terms.weighting, terms.weighting != "equal", "equal"),
    ):
        if is_open and value not in allowed:
            why = "an offer is merged however large it is" if name == "aggregate" else "a site says itself how many"
            raise BadInput(
                f'run {manifest.run} has outer.{name} = "{value}", with which {why}, so that one site could ruin it: '
                f'create a run with "{safe}", or say --allow {value} if you trust everyone whom you let in'
            )


def check_minority(manifest: Manifest, admitted: Collection[str], guests: Collection[str]) -> None:
    """Raise BadInput where one guest more would make guests the majority of the run's sites."""
    num_guests = sum(site in guests for site in admitted)
    num_members = len(admitted) - num_guests
    if num_guests >= num_members:
        raise BadInput(
            f"run {manifest.run} has {num_guests} guests and {num_members} members, and one guest more would make "
            "guests its majority, whose offers the members' norms and weights could not bound: admit another site of "
            "yours first (`composer-prime admit`), or revoke a guest (`composer-prime revoke`)"
        )


def _check_key(manifest: Manifest, key: SigningKey | None) -> None:
    if manifest.owner is None:
        if key is not None and not manifest.keys:
            raise BadInput(f"run {manifest.run} has no owner, so a key means nothing to it: leave --key out")
        return
    if key is None:
        raise BadInput(f"run {manifest.run} has an owner, {manifest.owner}: give the owner's key file with --key")
    if key.public != manifest.owner:
        raise BadInput(
            f"run {manifest.run} is owned by {manifest.owner}, the key given is {key.public}: give the owner's key file"
        )
