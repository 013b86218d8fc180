"""Near-duplicate sessions, as data-juicer finds them, left out of a copy of a store.

data-juicer (https://github.com/datajuicer/data-juicer) pins what ours can't have beside it, so it runs in an
environment of its own: `dj-process` reads one file of texts, normalises and compares them, and writes those that stay.
Only their ids are read back; sessions are copied as they are.
"""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_prime.errors import BadInput
from composer_prime.traces.ingest.session import Session
from composer_prime.traces.ingest.store import TraceStore
from composer_prime.traces.states import calls_of, text_of

VERSION = "1.6.1"
"""Of py-data-juicer, with which this was tried."""

SIMILARITY = 0.7
"""Jaccard similarity of two texts' runs of words from which on they are near-duplicates; data-juicer's own default."""

WINDOW = 5
"""Words in a run. A session of fewer isn't compared, as data-juicer takes all such for the same one."""

OPERATORS: tuple[Mapping[str, Any], ...] = (
    {"fix_unicode_mapper": {"normalization": "NFKC"}},
    {"whitespace_normalization_mapper": {}},
    {"document_minhash_deduplicator": {"window_size": WINDOW, "jaccard_threshold": SIMILARITY, "lowercase": True}},
)


@dataclass(frozen=True)
class Normalized:
    """Sessions of the store, how many of them are near-duplicates of others, and how many were too short to compare."""

    num_sessions: int
    num_near_duplicates: int
    num_short: int


def normalize(store: TraceStore, to: TraceStore, dj_process: Path) -> Normalized:
    """Copy all sessions but near-duplicates into another store; of those that are alike the longest stays.

    dj_process  data-juicer's command, in its own environment

    Raises BadInput when both stores are one, or it can't be run, fails, or leaves something else than it was given.
    """
    if to.folder.resolve() == store.folder.resolve():
        raise BadInput(f"--to ({to.folder}) is the store itself, which nothing is taken out of: name another folder")
    texts = dict(sorted(_texts(store), key=lambda one: (-len(one[1]), one[0])))
    short = {id for id, text in texts.items() if len(text.split()) < WINDOW}
    compared = {id: text for id, text in texts.items() if id not in short}
    stay = short | (_stay(compared, dj_process) if compared else set())
    for id in sorted(stay):
        to.add(store.session(id))
    to.save_index()
    return Normalized(len(texts), len(texts) - len(stay), len(short))


def _texts(store: TraceStore) -> Iterator[tuple[str, str]]:
    for session in store.sessions():
        yield session.id, text_of_session(session)


def text_of_session(session: Session) -> str:
    """All that was said, called and answered, without thinking, in the order of the file."""
    lines = []
    for node in session.nodes:
        message = node.message
        called = [f"{call['function']['name']} {call['function']['arguments']}" for call in calls_of(message)]
        lines.append(" ".join(filter(None, [message["role"], text_of(message), *called])))
    return "\n".join(lines)


def _stay(texts: Mapping[str, str], dj_process: Path) -> set[str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given, kept, config = folder / "given.jsonl", folder / "kept" / "kept.jsonl", folder / "config.yaml"
        given.write_text("".join(json.dumps({"id": id, "text": text}) + "\n" for id, text in texts.items()))
        settings = {"project_name": "traces", "dataset_path": str(given), "export_path": str(kept), "np": 1}
        settings["ds_cache_dir"] = str(folder / "cache")  # by default the texts stay in ~/.cache/huggingface
        config.write_text(json.dumps(settings | {"process": OPERATORS}))  # JSON is YAML
        _run(dj_process, config)
        try:
            found = {json.loads(line)["id"] for line in kept.read_text().splitlines()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{dj_process} left no sessions that can be read ({error}): use version {VERSION}") from None
    if not found or not found <= texts.keys():
        raise BadInput(f"{dj_process} left {len(found)} sessions, some not ours: use version {VERSION}")
    return found


def _run(dj_process: Path, config: Path) -> None:
    try:
        done = subprocess.run([dj_process, "--config", config], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BadInput(
            f"--dj-process ({dj_process}) can't be run ({error.strerror}): make it by `python -m venv dj` and "
            f"`dj/bin/pip install py-data-juicer=={VERSION} scipy aiohttp`, and give dj/bin/dj-process"
        ) from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise BadInput(f"--dj-process ({dj_process}) ended with {done.returncode}: {said[-1]}")
