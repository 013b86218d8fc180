"""The requests that S3Store makes, each within its time: botocore's client, used by many threads at once.

botocore gives up on silence; what trickles is given up here, at the deadline. One request is one object, whole: a read
in parallel ranges could mix two objects when a put comes between.
"""

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import count
from typing import Any

from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.response import StreamingBody
from botocore.session import get_session

from composer_prime.store.redirects import FOUND, Astray, host_of, next_url
from composer_prime.store.remote import CONNECT_TIMEOUT_S

log = logging.getLogger(__name__)
logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns of each connection beyond CONNECTIONS

CONNECTIONS = 32
"""Kept open at once, at most."""
PARTS_AT_ONCE = 4
"""Parts of one object under way at once."""
READ_BYTES = 2**18
"""Read between two looks at the clock."""
STREAMED_BYTES = 2**18
"""From this size on a body is sent bit by bit, so that a slow link isn't taken for a silent one."""


class S3Client:
    """One bucket of one service. Raises what botocore raises, and TimeoutError at the deadline."""

    def __init__(
        self,
        bucket: str,
        *,
        endpoint: str | None,
        part_bytes: int,
        read_timeout_s: float,
        config: Mapping[str, Any],
    ) -> None:
        """
        endpoint   None: where the AWS tools look for it
        part_bytes an upload goes in parts of this size from twice this size on
        config     more of botocore's client configuration

        Connects with the first request: credentials may be looked up on the network.
        """
        self._bucket = bucket
        self._endpoint = endpoint
        self._part_bytes = part_bytes
        self.config = Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=read_timeout_s,
            retries={"total_max_attempts": 1},  # ours retry, with deadlines (retry.py)
            max_pool_connections=CONNECTIONS,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            **config,
        )
        self._connecting = threading.Lock()

    @cached_property
    def _made(self) -> Any:
        return get_session().create_client("s3", endpoint_url=self._endpoint, config=self.config)

    @property
    def _client(self) -> Any:  # botocore makes its clients' methods at run time
        with self._connecting:
            return self._made

    @cached_property
    def _presigning(self) -> Any:
        """A client that only signs: URLs want version 4 named, without which botocore falls back to version 2."""
        config = self.config.merge(Config(signature_version="s3v4"))
        return get_session().create_client("s3", endpoint_url=self._endpoint, config=config)

    def presign(self, operation: str, name: str, expires_s: int, **more: Any) -> str:
        """A URL with which whoever holds it may do one operation ("get_object", "put_object") on one object.

        more   the operation's further parameters. Those that travel as headers are signed: the request must have them,
               with these values.
        """
        with self._connecting:
            client = self._presigning
        place = {"Bucket": self._bucket, "Key": name}
        return client.generate_presigned_url(operation, Params={**place, **more}, ExpiresIn=expires_s)

    @property
    def endpoint_url(self) -> str:
        """Where requests go, the bucket's name apart."""
        return self._client.meta.endpoint_url

    def close(self) -> None:
        """Close all connections."""
        for name in ("_made", "_presigning"):
            if name in self.__dict__:
                self.__dict__[name].close()

    def look(self, prefix: str, within_s: float) -> None:
        """Ask for one name; TimeoutError after `within_s`, even where looking up a name or credentials hangs."""
        ended: list[BaseException | None] = []

        def ask() -> None:
            try:
                self.list_page(prefix, MaxKeys=1)
                ended.append(None)
            except BaseException as error:
                ended.append(error)

        asking = threading.Thread(target=ask, name="store-first-contact", daemon=True)
        asking.start()
        asking.join(within_s)
        if not ended:
            raise TimeoutError(f"no answer within {within_s:.0f} s")
        if ended[0] is not None:
            raise ended[0]

    def get(self, name: str, within_s: float, span: tuple[int, int] | None = None) -> bytes:
        """An object's bytes, or those from the first to the last of `span`."""
        deadline = time.monotonic() + within_s
        wanted = {} if span is None else {"Range": f"bytes={span[0]}-{span[1]}"}
        try:
            body = self._client.get_object(Bucket=self._bucket, Key=name, **wanted)["Body"]
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") != FOUND:
                raise
            body = self._elsewhere(error.response["ResponseMetadata"]["HTTPHeaders"].get("location", ""), wanted)
        with body:
            pieces = [body.read(READ_BYTES)]
            while len(pieces[-1]) == READ_BYTES and (span is None or READ_BYTES * len(pieces) <= span[1] - span[0]):
                _check(deadline)
                pieces.append(body.read(READ_BYTES))
            if body.read(1):  # at the end it checks that all bytes that were announced have come
                raise ConnectionError("the server sends more than it was asked for")
        return b"".join(pieces)

    def _elsewhere(self, location: str, wanted: Mapping[str, str]) -> StreamingBody:
        """The body of an object to which a redirect of the service leads. It is asked for without any signature."""
        session = self._client._endpoint.http_session  # with the client's own proxies, certificates and time-outs
        url = self.endpoint_url
        for hop in count():
            try:
                url = next_url(url, location, hop)
            except Astray as why:
                raise _answered(FOUND, str(why)) from None
            request = AWSRequest("GET", url, headers=dict(wanted), stream_output=True)
            answer = session.send(request.prepare())
            if answer.status_code in (200, 206):
                return StreamingBody(answer.raw, answer.headers.get("content-length"))
            answer.raw.close()
            location = answer.headers.get("location", "")
            if answer.status_code == 416:
                raise _answered(416, "the span is outside of the object")
            if answer.status_code != FOUND:  # what isn't the service's own word is no word on the object
                raise ConnectionError(f"redirected to {host_of(url)}, which answers {answer.status_code}")
        raise AssertionError("unreachable")

    def put(self, name: str, data: bytes | memoryview, within_s: float, *, if_absent: bool = False) -> None:
        """Store an object, whole or not at all; with `if_absent` in one request that fails (412) where one is."""
        deadline = time.monotonic() + within_s
        if not if_absent and len(data) >= 2 * self._part_bytes:
            self._put_parts(name, data, deadline)
            return
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        self._client.put_object(Bucket=self._bucket, Key=name, Body=_body(data, deadline), **condition)

    def _put_parts(self, name: str, data: bytes | memoryview, deadline: float) -> None:
        place = {"Bucket": self._bucket, "Key": name}
        upload = {**place, "UploadId": self._client.create_multipart_upload(**place)["UploadId"]}
        view = memoryview(data)

        def put_part(number: int) -> dict[str, Any]:
            part = view[(number - 1) * self._part_bytes : number * self._part_bytes]
            said = self._client.upload_part(**upload, PartNumber=number, Body=_body(part, deadline))
            return {"PartNumber": number, "ETag": said["ETag"]}

        try:
            with ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="store-part") as pool:
                parts = list(pool.map(put_part, range(1, -(-len(data) // self._part_bytes) + 1)))
            self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        except BaseException:
            self._abort(upload)
            raise

    def _abort(self, upload: Mapping[str, Any]) -> None:
        """Have the store drop parts that came; where it can't be told, its own rules for unfinished uploads do."""
        try:
            self._client.abort_multipart_upload(**upload)
        except Exception as error:
            log.debug("bucket=%s unfinished upload stays: %r", self._bucket, error)

    def list_page(self, prefix: str, **more: Any) -> dict[str, Any]:
        """One page of names under a prefix, as the service answers."""
        return self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, **more)

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._client.delete_object(Bucket=self._bucket, Key=name)


def _answered(status: int, why: str) -> ClientError:
    said = {"Error": {"Code": str(status), "Message": why}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(said, "GetObject")  # pyright: ignore[reportArgumentType]


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("the transfer is slower than the slowest that is waited for")


def _body(data: bytes | memoryview, deadline: float) -> "bytes | _Body":
    """Data as botocore sends it."""
    return bytes(data) if len(data) < STREAMED_BYTES else _Body(data, deadline)


class _Body:
    """Bytes as a file that fails at a deadline; the file is read while it is sent."""

    def __init__(self, data: bytes | memoryview, deadline: float) -> None:
        self._view = memoryview(data)
        self._deadline = deadline
        self._at = 0

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int | None = None) -> memoryview:
        """The next bytes, all that are left by default."""
        _check(self._deadline)
        start = self._at
        self._at = len(self._view) if size is None or size < 0 else min(start + size, len(self._view))
        return self._view[start : self._at]

    def tell(self) -> int:
        """Where reading goes on."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go on elsewhere, as files do."""
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at
