"""What a run shall be, written down before anyone knows its first masters: its first site makes the manifest from it.

For trainers whose parameter names follow from their own code and not from the model's checkpoint: terms, owner and keys
are the creator's, the model is what the first site has loaded. No torch, so that any command may look.
"""

from typing import TYPE_CHECKING

from pydantic import Field

from composer_prime.errors import BadInput, CorruptObject, KeyMissing, ProtocolError
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import PROTOCOL, Record
from composer_prime.sync.deleting import check_whole
from composer_prime.sync.reading import check_protocol, read_bytes
from composer_prime.sync.records import Manifest
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.terms import ASKED, Terms

if TYPE_CHECKING:
    from composer_prime.config.recipe import RecipeBase


class FoundingRecord(Record):
    """A run without its model: the manifest's fields of these names, which the manifest must repeat."""

    protocol: int = PROTOCOL
    run: str
    terms: Terms
    owner: str | None = None
    keys: dict[str, str] = Field(default_factory=dict)


def first_keys(recipe: "RecipeBase", site: str) -> dict[str, str]:
    """Whom a run of this recipe admits from the start: in a run with an owner the site that creates it, by its key."""
    if recipe.outer is None or recipe.outer.owner is None or recipe.site.key_file is None:
        return {}
    return {site: SigningKey.load(recipe.site.key_file).public}


def announce(store: Store, record: FoundingRecord) -> None:
    """Write down what the run in `store` shall be.

    Raises BadInput when another is written down there already, CorruptObject when what is there can't be read.
    """
    check_whole(store)
    if store.create(keys.founding(), record.to_bytes()):
        return
    present = find_founding(store)
    changed = "something else" if present is None else changed_terms(present.terms, record.terms)
    if (
        changed
        or present is None
        or record.model_copy(update={"terms": present.terms, "keys": present.keys}) != present
    ):
        said = changed or "another owner"
        raise BadInput(f"{store.uri} is already to hold another run ({said}): {another_run(record.run, store.uri)}")


def find_founding(store: Store) -> FoundingRecord | None:
    """What the run in `store` was announced to be; None when nobody has announced one.

    Raises ProtocolError when it speaks another version, CorruptObject when it can't be read: whoever wrote the manifest
    then would decide terms and keys alone.
    """
    try:
        data = read_bytes(store, keys.founding())
        check_protocol(data, keys.founding())
        return FoundingRecord.from_bytes(data, keys.founding())
    except KeyMissing:
        return None
    except CorruptObject as error:
        raise CorruptObject(
            f"{error}. Restore it from a backup; or delete it, and where there is no {keys.manifest()} yet announce "
            "the run again with `composer-prime create RECIPE`"
        ) from None


def check_founded(manifest: Manifest, record: FoundingRecord | None) -> None:
    """Raise ProtocolError when a manifest isn't what was announced: someone else founded the run."""
    if record is None:
        return
    fields = tuple(FoundingRecord.model_fields)
    different = [name for name in fields if getattr(manifest, name) != getattr(record, name)]
    if different:
        raise ProtocolError(
            f"{keys.manifest()} differs from {keys.founding()} in {', '.join(different)}: it was not written by a site "
            "of this run; create the run anew in an empty place that only its sites can write to"
        )


def another_run(run: str, uri: str) -> str:
    """What to do where a run differs from the recipe."""
    away = f"if it made no round or is over, `composer-prime delete {uri}` first"
    return f"Use the run's values, or another run.name than {run!r}; {away}"


def changed_terms(theirs: Terms, ours: Terms) -> str:
    """The settings in which two runs' terms differ, each with both values; '' when they are the same."""
    return "; ".join(
        f"outer.{name}: run {value!r}, recipe {getattr(ours, name)!r}"
        for name, value in theirs.model_dump(include=ASKED).items()
        if value != getattr(ours, name) and not (name == "step_tokens" and is_within(ours.step_tokens, value))
    )


def is_within(step_tokens: int | None, limit: int | None) -> bool:
    """Whether a site of smaller batches, or of an unknown one, fits a run: what it offers is compared all the same."""
    return step_tokens is None or limit is None or step_tokens <= limit
