"""What a gateway answers when it doesn't do what was asked: an HTTP status, a word for programs, a line for people."""

from composer_prime.store.gateway_wire import LARGE, NOT_ADMITTED, REVOKED


class Refusal(Exception):
    """Ends the handling of one request."""

    def __init__(self, status: int, code: str, text: str, *, retry_after_s: int = 0) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


def forbidden(text: str) -> Refusal:
    """The site is known, and may not do this."""
    return Refusal(403, "forbidden", text)


def unknown(text: str) -> Refusal:
    """Who asks isn't a site of this run, or can't show it."""
    return Refusal(401, "unknown", text)


def not_admitted(status: int, text: str) -> Refusal:
    """The run doesn't let this key in."""
    return Refusal(status, NOT_ADMITTED, text)


def revoked(text: str) -> Refusal:
    """The run let this key in before, and its owner has taken it out."""
    return Refusal(401, REVOKED, text)


def too_large(text: str) -> Refusal:
    """More bytes than are taken."""
    return Refusal(413, LARGE, text)


def malformed(text: str) -> Refusal:
    """No client of ours sends this."""
    return Refusal(400, "malformed", text)


def busy(text: str, retry_after_s: int) -> Refusal:
    """Too many requests, of this site or of all."""
    return Refusal(429, "busy", text, retry_after_s=retry_after_s)
