"""Stand-ins for Google Cloud Storage's XML requests and Azure's Blob service, in a thread; they check no credentials.

No emulator that pip installs speaks what obstore says to these two. So these show our side, not theirs.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.servers.in_thread import serving_handler

BUCKET, ACCOUNT = "composer-prime", "account"
PAGE = 1000
KINDS = ("gs", "az")
_KIND = "<Content-Type>application/octet-stream</Content-Type>"
_DATE = "Sun, 29 Nov 2026 00:00:00 GMT"


@dataclass
class StandIn:
    """A running stand-in: the objects by bucket and name, and the requests that came."""

    kind: str
    endpoint: str = ""
    buckets: dict[str, dict[str, bytes]] = field(default_factory=lambda: {BUCKET: {}})
    requests: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def environment(self) -> dict[str, str]:
        """The variables that send obstore here."""
        if self.kind == "gs":
            return {"STORAGE_EMULATOR_HOST": self.endpoint}
        place = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ENDPOINT": f"{self.endpoint}/{ACCOUNT}"}
        return {**place, "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}

    def make_bucket(self, bucket: str) -> None:
        """Make `bucket`."""
        self.buckets.setdefault(bucket, {})

    def drop_bucket(self, bucket: str) -> None:
        """Remove `bucket`, which is empty."""
        assert not self.buckets.pop(bucket)


@contextmanager
def running(kind: str) -> Iterator[StandIn]:
    """The stand-in "gs" or "az" on a free loopback port."""
    found = StandIn(kind)

    class Handler(_Handler):
        scene = found

    with serving_handler(Handler) as found.endpoint:
        yield found


class _Handler(BaseHTTPRequestHandler):
    scene: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Tests print nothing."""

    def do_GET(self) -> None:
        with self._bucket() as (objects, name, query):
            if objects is None:
                return
            if not name:
                self._answer(200, self._listing(objects, query).encode())
                return
            if name not in objects:
                self._refuse(404, "BlobNotFound" if self.scene.kind == "az" else "NoSuchKey")
                return
            data, span = objects[name], self.headers.get("Range") or self.headers.get("x-ms-range")
            if span is None:
                self._answer(200, data)
                return
            first, last = (int(number) for number in span.removeprefix("bytes=").split("-"))
            if first >= len(data):
                self._refuse(416, "InvalidRange")
                return
            part = data[first : last + 1]
            self._answer(206, part, {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"})

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        with self._bucket() as (objects, name, _):
            if objects is None:
                return
            only_new = self.headers.get("x-goog-if-generation-match") == "0" or self.headers.get("If-None-Match") == "*"
            if only_new and name in objects:
                az = self.scene.kind == "az"
                self._refuse(409 if az else 412, "BlobAlreadyExists" if az else "PreconditionFailed")
                return
            objects[name] = data
            self._answer(201 if self.scene.kind == "az" else 200, b"", {"x-goog-generation": "1"})

    def do_DELETE(self) -> None:
        with self._bucket() as (objects, name, _):
            if objects is None:
                return
            if objects.pop(name, None) is None:
                self._refuse(404, "BlobNotFound" if self.scene.kind == "az" else "NoSuchKey")
            else:
                self._answer(202 if self.scene.kind == "az" else 204, b"")

    def do_POST(self) -> None:
        """Azure's batch, which obstore sends to delete even one object."""
        sent = self.rfile.read(int(self.headers["Content-Length"])).decode()
        with self._bucket() as (objects, _, _query):
            if objects is None:
                return
            answers = []
            for number, path in enumerate(re.findall(r"DELETE (\S+) HTTP", sent)):
                name = unquote(urlsplit(path).path).removeprefix(f"/{ACCOUNT}").strip("/").partition("/")[2]
                there = objects.pop(name, None) is not None
                said = "202 Accepted" if there else "404 The specified blob does not exist."
                code = "" if there else "x-ms-error-code: BlobNotFound\r\n"
                part = f"Content-Type: application/http\r\nContent-ID: {number}\r\n\r\nHTTP/1.1 {said}\r\n{code}\r\n"
                answers.append(f"--batch\r\n{part}\r\n")
            body = "".join(answers) + "--batch--\r\n"
            self._answer(202, body.encode(), {"Content-Type": "multipart/mixed; boundary=batch"})

    @contextmanager
    def _bucket(self) -> Iterator[tuple[dict[str, bytes] | None, str, dict[str, str]]]:
        """(objects, name, query) of a request, one at a time; no objects where it is answered already."""
        place = urlsplit(self.path)
        bucket, _, name = unquote(place.path).removeprefix(f"/{ACCOUNT}").strip("/").partition("/")
        query = {key: values[0] for key, values in parse_qs(place.query, keep_blank_values=True).items()}
        with self.scene.lock:
            self.scene.requests.append(f"{self.command} {self.path}")
            objects = self.scene.buckets.get(bucket)
            if objects is None:
                self._refuse(404, "ContainerNotFound" if self.scene.kind == "az" else "NoSuchBucket")
            yield objects, name, query

    def _listing(self, objects: Mapping[str, bytes], query: Mapping[str, str]) -> str:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("marker") or ""
        names, folders = [], set()
        for name in sorted(name for name in objects if name.startswith(prefix) and name > after):
            head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            if cut:
                folders.add(f"{prefix}{head}{cut}")
            else:
                names.append(name)
        more = names[PAGE - 1] if len(names) > PAGE else ""
        if self.scene.kind == "az":
            size = "<Properties><Last-Modified>{}</Last-Modified><Content-Length>{}</Content-Length>{}<Etag>e</Etag>"
            blobs = "".join(
                f"<Blob><Name>{escape(name)}</Name>{size.format(_DATE, len(objects[name]), _KIND)}</Properties></Blob>"
                for name in names[:PAGE]
            )
            blobs += "".join(f"<BlobPrefix><Name>{escape(each)}</Name></BlobPrefix>" for each in sorted(folders))
            return f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker>{more}</NextMarker></EnumerationResults>"
        found = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(objects[name])}</Size>"
            "<LastModified>2026-11-29T00:00:00.000Z</LastModified><ETag>e</ETag></Contents>"
            for name in names[:PAGE]
        )
        found += "".join(
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(folders)
        )
        token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
        return f"<ListBucketResult>{found}{token}</ListBucketResult>"

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>a stand-in's refusal</Message></Error>".encode())

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        stated = {"Content-Type": "application/octet-stream", "ETag": '"e"', "Last-Modified": _DATE, **(headers or {})}
        for name, value in stated.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
