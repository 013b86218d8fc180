"""Reads the bucket's policies as S3 does, as far as ours go: allow and deny, wildcards, three kinds of conditions."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Template
from typing import Any

from tests.architecture import REPOSITORY

BUCKET, RUN = "my-bucket", "runs/run-1"
FOLDER = REPOSITORY / "infra" / "bucket"


@dataclass(frozen=True)
class Request:
    """What someone asks of the bucket. `context` holds condition keys that the request has."""

    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=lambda: {"aws:SecureTransport": "true"})


def put(key: str, *, if_absent: bool) -> Request:
    header = {"s3:if-none-match": "*"} if if_absent else {}
    return Request("s3:PutObject", f"arn:aws:s3:::{BUCKET}/{RUN}/{key}", {"aws:SecureTransport": "true", **header})


def get(key: str) -> Request:
    return Request("s3:GetObject", f"arn:aws:s3:::{BUCKET}/{RUN}/{key}")


def delete(key: str) -> Request:
    return Request("s3:DeleteObject", f"arn:aws:s3:::{BUCKET}/{RUN}/{key}")


def list_names(prefix: str, run: str = RUN) -> Request:
    context = {"aws:SecureTransport": "true", "s3:prefix": f"{run}/{prefix}"}
    return Request("s3:ListBucket", f"arn:aws:s3:::{BUCKET}", context)


def policy(name: str, site: str = "") -> list[dict[str, Any]]:
    """The statements of a policy file, for one run and site."""
    text = (FOLDER / f"{name}.json").read_text()
    return json.loads(Template(text).substitute(BUCKET=BUCKET, RUN=RUN, SITE=site))["Statement"]


def allowed(request: Request, identity: Sequence[dict[str, Any]]) -> bool:
    """Whether an identity with these statements may, under the bucket's own policy: a deny wins, no word is no."""
    statements = [*identity, *policy("bucket-policy")]
    hits = {statement["Effect"] for statement in statements if _applies(statement, request)}
    return "Allow" in hits and "Deny" not in hits


def _applies(statement: Mapping[str, Any], request: Request) -> bool:
    return (
        any(_like(pattern, request.action) for pattern in _listed(statement["Action"]))
        and any(_like(pattern, request.resource) for pattern in _listed(statement["Resource"]))
        and all(
            _holds(operator, request.context.get(key), _listed(values))
            for operator, keys in statement.get("Condition", {}).items()
            for key, values in keys.items()
        )
    )


def _holds(operator: str, value: str | None, wanted: Sequence[str]) -> bool:
    if operator == "Null":
        return (value is None) == (wanted == ["true"])
    if operator == "Bool":
        return value in wanted
    assert operator == "StringLike", f"the evaluator doesn't know the condition {operator}"
    return value is not None and any(_like(pattern, value) for pattern in wanted)


def _like(pattern: str, text: str) -> bool:
    """IAM's wildcards: * is any characters, / too, and ? is one."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), text) is not None


def _listed(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]
