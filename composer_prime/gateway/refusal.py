"""What a gateway answers when it doesn't do what was asked: an HTTP status, a word for programs, a line for people."""

from composer_prime.gateway.wire import MISSING, NOT_ADMITTED, REVOKED

STATUS = {
    "malformed": 400, "unknown": 401, "replayed": 401, NOT_ADMITTED: 401, REVOKED: 401, "forbidden": 403, MISSING: 404,
    "run": 404, "method": 405, "length": 411, "large": 413, "busy": 429, "bucket": 502,
}  # fmt: skip


class Refusal(Exception):
    """Ends the handling of one request."""

    def __init__(self, code: str, text: str, *, status: int = 0, retry_after_s: int = 0) -> None:
        super().__init__(text)
        self.status = status or STATUS[code]
        self.code = code
        self.retry_after_s = retry_after_s
