"""What a run's owner may do while it goes on or after: reopen it, admit and revoke keys, hand the commits over.

Each act is one create-once record under the next number; sites honour it from their next look at the members on. In a
run without an owner, whoever can write to its bucket may reopen it and hand the commits over.
"""

from collections.abc import Collection

from composer_prime.errors import BadInput, CorruptObject, KeyMissing
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.lifetime import find_manifest, prolonged
from composer_prime.sync.protocol import Authority
from composer_prime.sync.reading import find_record, read_record
from composer_prime.sync.records import Admission, Close, Manifest, Reopening
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

    def reopen(self, rounds: int) -> Reopening:
        """Let a closed run go on to `rounds` training rounds; sites that join it then train on."""
        terms, ends = prolonged(self._store, self._roster, self._manifest.terms)
        number = len(ends) - 1
        try:
            read_record(self._store, Close, keys.close(number))
        except KeyMissing as error:
            raise BadInput(
                f"run {self._manifest.run} isn't closed yet, it goes on to {terms.rounds} rounds: "
                f"wait until its sites have ended it ({error})"
            ) from None
        except CorruptObject as error:
            raise BadInput(
                f"{error}: it can't be told how run {self._manifest.run} ended. Restore that object from a backup, or "
                "delete it and start one site, which writes it again"
            ) from None
        if rounds <= terms.final_version:
            raise BadInput(
                f"rounds ({rounds}) must be more than the {terms.final_version} that run {self._manifest.run} has had, "
                "its closing round among them: name the number after which it shall end, all rounds counted"
            )
        record = self._roster.sign(Reopening(number=number + 1, rounds=rounds))
        self._create(keys.reopening(record.number), record.to_bytes())
        return record

    def admit(self, site: str, public: str, *, guest: bool = False) -> Admission:
        """Let `site` take part with the key `public` from now on; an earlier key of that name no longer counts.

        guest   it may offer, and never commit, merge a part or close the run
        """
        keys.check_site_name(site)
        admitted, authority = self._admitted(), self._authority
        if admitted.get(site) == check_public(public) and (site in authority.guests) == guest:
            raise BadInput(f"site {site} is admitted with that key already: nothing is to be done")
        if guest and site == authority.committer:
            raise BadInput(f"site {site} is the only one that commits: hand that over first, then make it a guest")
        guests = authority.guests | {site} if guest else authority.guests - {site}
        return self._change(admitted | {site: public}, Authority(authority.committer, guests))

    def check_open(self, allowed: Collection[str], *, guest: bool) -> None:
        """Raise BadInput where it isn't safe to admit one site more: see `check_guarded` and `check_minority`."""
        check_guarded(self._manifest, allowed)
        if guest:
            check_minority(self._manifest, self._admitted(), self._authority.guests)

    def revoke(self, site: str) -> Admission:
        """From now on nothing that `site` signs counts; what commits took of it before stays merged."""
        admitted = self._admitted()
        if site not in admitted:
            raise BadInput(f"site {site} is not admitted; those that are: {', '.join(sorted(admitted)) or 'none'}")
        authority = self._authority
        if site == authority.committer:
            raise BadInput(f"site {site} is the only one that commits: hand that over first, then revoke its key")
        left = {name: key for name, key in admitted.items() if name != site}
        return self._change(left, Authority(authority.committer, authority.guests - {site}))

    def hand_over(self, site: str) -> Admission:
        """From now on `site` alone creates commits. The site that did must have stopped: both would, for a moment."""
        keys.check_site_name(site)
        present = self._authority.committer
        if present is None:
            raise BadInput(
                f"every site of run {self._manifest.run} may commit: only a run created with outer.committer, "
                "for a store that lets two writers win, has one committer"
            )
        if site == present:
            raise BadInput(f"site {site} is the committer already: nothing is to be done")
        admitted = self._admitted() if self._roster.signed else {}
        if self._roster.signed and site not in admitted:
            raise BadInput(f"site {site} has no admitted key: admit it first")
        if site in self._authority.guests:
            raise BadInput(f"site {site} is a guest, which may only offer: admit it again, not as a guest, first")
        return self._change(admitted, Authority(site, self._authority.guests))

    @property
    def _authority(self) -> Authority:
        return self._roster.authority()

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

    def _change(self, admitted: dict[str, str], authority: Authority) -> Admission:
        record = self._roster.sign(
            Admission(
                number=self._roster.newest + 1,
                keys=admitted,
                committer=authority.committer,
                guests=tuple(sorted(authority.guests)),
            )
        )
        self._create(keys.admission(record.number), record.to_bytes())
        return record

    def _create(self, key: str, data: bytes) -> None:
        if not self._store.create(key, data):
            raise BadInput(
                f"{key} was written by someone else at the same moment, and stays: "
                "look at what it changed, then give the command again"
            )


def check_guarded(manifest: Manifest, allowed: Collection[str]) -> None:
    """Raise BadInput where one site alone could ruin the run, unless the owner allows each such term by its name."""
    terms = manifest.terms
    weighs = terms.aggregate in ("mean", "clipped")
    for name, value, is_open, safe in (
        ("aggregate", terms.aggregate, terms.aggregate == "mean", "clipped"),
        ("weighting", terms.weighting, weighs and terms.weighting != "equal", "equal"),
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
