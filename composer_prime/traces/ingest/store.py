"""A folder of sessions, each under the sha256 of what is kept of it, and an index of where they came from.

A session is written whole or not at all. The index is written when a command ends. If the command is killed, the
sessions stand, and the same command adds what is missing.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import zstandard

from composer_prime.errors import BadInput, CorruptObject, StoreError
from composer_prime.store.file import FileStore
from composer_prime.traces.ingest.session import Session
from composer_prime.traces.states import TraceState, digest

VERSION = 2
MAX_BYTES = 2**27
"""Of a session as JSON: what others share may state any length, in a few bytes of zstd."""
MAX_INDEX_BYTES = 2**29
_INDEX = "index.json"
_SESSIONS = "sessions/"
_SUFFIX = ".json.zst"


class TraceStore:
    """Reads a store of traces. Satisfies `composer_prime.traces.states.States`."""

    def __init__(self, folder: Path, *, is_new: bool = False) -> None:
        """Open the folder; `is_new` is for writing: it makes a store if the folder isn't there or is empty.

        Raises BadInput if it holds something else, or a store of another version.
        """
        self.folder = folder.expanduser().absolute()
        self._store = FileStore(self.folder, shared=False)
        if is_new and not (self.folder.is_dir() and any(path.name[0] != "." for path in self.folder.iterdir())):
            self._store.put(_INDEX, _json({"version": VERSION, "sessions": {}, "files": {}}))
        self.index = self._read_index()
        for id in self.ids() if is_new else ():
            if id not in self.index["sessions"]:  # a killed command left it out
                self.add(self.session(id))

    def ids(self) -> list[str]:
        """The ids of all sessions, sorted."""
        keys = self._store.list(_SESSIONS)
        return [key.removeprefix(_SESSIONS).removesuffix(_SUFFIX) for key in keys if key.endswith(_SUFFIX)]

    def session(self, id: str) -> Session:
        """One session. Raises KeyMissing if there is none, CorruptObject if its bytes aren't what was written."""
        data = self._store.get_range(_key(id), 0, MAX_BYTES)
        try:
            if not 0 <= (size := zstandard.frame_content_size(data)) <= MAX_BYTES:
                raise ValueError(f"it states {size} bytes, of {MAX_BYTES} at most")
            return Session.of(json.loads(zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_BYTES)))
        except (ValueError, KeyError, TypeError, RecursionError, zstandard.ZstdError) as error:
            where = f"{self.folder / _key(id)} isn't a session ({error})"
            raise CorruptObject(f"{where}: delete it and ingest its file again") from error

    def sessions(self) -> Iterator[Session]:
        """All sessions, in the order of their ids."""
        return (self.session(id) for id in self.ids())

    def states(self) -> Iterator[TraceState]:
        """Every decision point once: a call that several sessions hold comes of the largest of them."""
        seen: set[str] = set()
        by_size = sorted(self.ids(), key=lambda id: (-(self.folder / _key(id)).stat().st_size, id))
        for session in map(self.session, by_size):
            keys = session.call_keys()
            for node, state in session.numbered_states():
                if keys.get(node) not in seen:
                    yield state
            seen |= set(keys.values())

    def add(self, session: Session) -> bool:
        """Write a session; False if it is there already, with the same tools and system message where it has some. The
        index knows of it from the next `save_index` on."""
        known = self.index["sessions"].get(session.id)
        given = digest([list(session.tools), session.system]) if session.tools or session.system else None
        if known is not None and given in (None, known["given"]):
            return False
        keys = sorted(set(session.call_keys().values()))
        entry = {"format": session.format, "name": session.name, "calls": keys, "given": given}
        self.index["sessions"][session.id] = entry
        if known is None and (self.folder / _key(session.id)).exists():
            return False
        data = _json(session.to_json())
        if len(data) > MAX_BYTES:
            raise BadInput(
                f"session {session.name} has {len(data)} bytes as JSON, of {MAX_BYTES} at most: cut its file"
            )
        self._store.put(_key(session.id), zstandard.ZstdCompressor().compress(data))
        return True

    def known_calls(self) -> set[str]:
        """The keys of all calls that sessions in the index hold."""
        return {key for entry in self.index["sessions"].values() for key in entry["calls"]}

    def note_file(self, path: Path, account: Mapping[str, Any]) -> None:
        """Put the account of an ingested file into the index, in place of an earlier one of that path."""
        self.index["files"][str(path.absolute())] = dict(account)

    def save_index(self) -> None:
        """Write the index."""
        self._store.put(_INDEX, _json(self.index))

    def _read_index(self) -> dict[str, Any]:
        path = self.folder / _INDEX
        try:
            if len(data := self._store.get_range(_INDEX, 0, MAX_INDEX_BYTES + 1)) > MAX_INDEX_BYTES:
                raise ValueError(f"its index has more than {MAX_INDEX_BYTES} bytes")
            index = json.loads(data)
            version = index["version"]
        except (StoreError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadInput(f"{self.folder} is no store of traces ({error}): make one with `replay ingest`") from error
        if version != VERSION:
            raise BadInput(f"{path} has version {version}; this program reads {VERSION}: ingest the files once more")
        return index


def _key(id: str) -> str:
    return f"{_SESSIONS}{id}{_SUFFIX}"


def _json(value: Any) -> bytes:
    """ASCII, so that every text can be said."""
    return json.dumps(value, separators=(",", ":")).encode()
