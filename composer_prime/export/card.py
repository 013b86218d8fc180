"""What a snapshot says of itself: a record for programs beside the weights, and a model card for people."""

import math
from pathlib import Path

from composer_prime import __version__
from composer_prime.export.reading import Merged
from composer_prime.sync.canonical import Record
from composer_prime.sync.run import Run
from composer_prime.visible import markdown

RECORD_FILE = "composer-prime.json"
CARD_FILE = "README.md"

_SETTINGS = ("inner_steps", "fragments", "sync_delay", "lr", "momentum", "codec", "weighting", "aggregate", "rounds")


class FragmentWeights(Record):
    """One fragment in a snapshot: which master it is, and the hash of its bits after rounding (`bits.bits_sha256`)."""

    version: int
    master_sha256: str
    bits_sha256: str


class SnapshotRecord(Record):
    """Which weights a folder holds."""

    run: str
    manifest_sha256: str
    dtype: str
    fragments: tuple[FragmentWeights, ...]

    @property
    def version(self) -> int:
        """Rounds that every fragment has had."""
        return min(fragment.version for fragment in self.fragments)


def write_card(run: Run, record: SnapshotRecord, merged: Merged, base_name: str, *, adapter: bool) -> str:
    """The model card, in Markdown.

    base_name  the model that the run was created from, as it was named to us; of a folder, cards say the last part
    adapter    whether the folder holds LoRA adapters instead of a whole model
    """
    manifest, terms, name = run.manifest, run.terms, markdown(run.manifest.run)
    num_parameters = sum(math.prod(parameter.shape) for parameter in manifest.parameters)
    settings = terms.model_dump()
    what = "LoRA adapters" if adapter else "weights"
    base = base_name if _is_hub_id(base_name) else Path(base_name).name
    lines = [
        "---",
        "library_name: " + ("peft" if adapter else "transformers"),
        *([f"base_model: {base_name}"] if _is_hub_id(base_name) else []),
        "tags: [composer-prime, reinforcement-learning, diloco]",
        "---",
        "",
        f"# {name}, version {record.version}",
        "",
        f"The {what} of a composer-prime run after {min(record.version, terms.rounds)} of {terms.rounds} rounds of "
        f"each fragment{', closed' if record.version > terms.rounds else ''}, rounded to {record.dtype}: "
        f"{num_parameters:,} trained parameters. Everything else is that of `{base}`.",
        "",
        f"Run `{name}`, manifest `{run.sha256}`, written by composer-prime {__version__}.",
        "",
        "## Masters",
        "",
        "`composer-prime verify` on the bucket makes the masters of these hashes again.",
        "",
        "| fragment | version | sha256 of the fp32 master | sha256 of the weights here |",
        "|---|---|---|---|",
        *(
            f"| {index} | {one.version} | `{one.master_sha256}` | `{one.bits_sha256}` |"
            for index, one in enumerate(record.fragments)
        ),
        "",
        "## Training",
        "",
        *_merged_lines(merged),
        "",
        "| outer setting | value |",
        "|---|---|",
        *(f"| `{name}` | {markdown(settings[name])} |" for name in _SETTINGS),
        "",
    ]
    return "\n".join(lines)


def _merged_lines(merged: Merged) -> list[str]:
    total = sum(merged.tokens.values())
    lines = [
        f"{total:,} tokens merged in {merged.rounds - merged.void} of {merged.rounds} fragment rounds; the others "
        "took nothing.",
        "",
        "| site | tokens merged |",
        "|---|---|",
    ]
    return [*lines, *(f"| {site} | {count:,} |" for site, count in merged.tokens.items())]


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))
