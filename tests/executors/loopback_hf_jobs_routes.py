"""What the loopback of Hugging Face Jobs answers: the routes that the client asks, and how they go wrong."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from composer_prime.plan.prices import Machine, shipped
from tests.executors.loopback_hf_jobs_containers import Container

if TYPE_CHECKING:
    from tests.executors.loopback_hf_jobs import HfJobsPlatform

TOKEN, BROKE_TOKEN, READING_TOKEN = "hf_loopback", "hf_without_credit", "hf_read_only"
USER = "tester"
PAGE_SIZE = 10
KEEP_ALIVE_S = 30.0


class Refused(Exception):
    """An HTTP error, with what the service says."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass
class HostedJob:
    """A job as the service has it. `secrets` are known to its container alone."""

    id: str
    namespace: str
    request: Mapping[str, Any]
    created_at: datetime
    container: Container

    def to_json(self) -> dict[str, Any]:
        request, container = self.request, self.container
        return {
            "id": self.id,
            "createdAt": _stamp(self.created_at),
            "startedAt": container.started_at and _stamp(container.started_at),
            "finishedAt": container.finished_at and _stamp(container.finished_at),
            "dockerImage": request.get("dockerImage"),
            "spaceId": request.get("spaceId"),
            "command": request["command"],
            "arguments": request["arguments"],
            "environment": request["environment"],
            "secrets": sorted(request.get("secrets", {})),
            "flavor": request["flavor"],
            "labels": request.get("labels", {}),
            "volumes": request.get("volumes", []),
            "status": {"stage": container.stage, "message": container.message},
            "owner": {"id": "5e9ecfc04957053f60648a3e", "name": self.namespace, "type": "user"},
        }


def routes(service: "HfJobsPlatform") -> list[Route]:
    def hosted(request: Request) -> HostedJob:
        job = service.hosted.get(request.path_params["job"])
        if job is None or job.namespace != request.path_params["namespace"]:
            raise Refused(404, "Job not found")
        return job

    async def whoami(request: Request) -> Response:
        return JSONResponse({"type": "user", "id": "5e9ecfc04957053f60648a3e", "name": USER})

    async def hardware(request: Request) -> Response:
        return JSONResponse([_hardware(flavor) for flavor in shipped("hf-jobs")])

    async def submit(request: Request) -> Response:
        return JSONResponse(service.start(request.path_params["namespace"], await request.json()).to_json())

    async def listing(request: Request) -> Response:
        service.blind_listings, is_blind = max(0, service.blind_listings - 1), service.blind_listings > 0
        labels = [] if service.ignores_labels else request.query_params.getlist("label")
        found = [] if is_blind else _matching(service.hosted.values(), request, labels)
        begin = int(request.query_params.get("cursor", "0"))
        headers = {}
        if begin + PAGE_SIZE < len(found):
            url = request.url.include_query_params(cursor=begin + PAGE_SIZE)
            headers["Link"] = f'<{url}>; rel="next"'
        return JSONResponse([job.to_json() for job in found[begin : begin + PAGE_SIZE]], headers=headers)

    async def inspect(request: Request) -> Response:
        return JSONResponse(hosted(request).to_json())

    async def cancel(request: Request) -> Response:
        job = hosted(request)
        if job.container.is_final:
            raise Refused(400, "Job is not running")
        job.container.end("CANCELED", None)
        return JSONResponse(job.to_json())

    async def logs(request: Request) -> Response:
        asked = {"Date": format_datetime(datetime.now(UTC), usegmt=True)}  # events after it are no part of the past
        return StreamingResponse(_events(service, hosted(request)), headers=asked, media_type="text/event-stream")

    async def make_bucket(request: Request) -> Response:
        bucket = f"{request.path_params['namespace']}/{request.path_params['name']}"
        is_new = bucket not in service.buckets
        service.buckets.add(bucket)
        return JSONResponse({"url": f"{service.url}/buckets/{bucket}"}, status_code=200 if is_new else 409)

    async def delete_bucket(request: Request) -> Response:
        bucket = f"{request.path_params['namespace']}/{request.path_params['name']}"
        if bucket not in service.buckets:
            raise Refused(404, f"Bucket {bucket} not found")
        service.buckets.remove(bucket)
        return JSONResponse({})

    return [
        Route("/api/whoami-v2", _answering(whoami, service)),
        Route("/api/jobs/hardware", _answering(hardware, service)),
        Route("/api/jobs/{namespace}", _answering(submit, service), methods=["POST"]),
        Route("/api/jobs/{namespace}", _answering(listing, service)),
        Route("/api/jobs/{namespace}/{job}", _answering(inspect, service)),
        Route("/api/jobs/{namespace}/{job}/cancel", _answering(cancel, service), methods=["POST"]),
        Route("/api/jobs/{namespace}/{job}/logs", _answering(logs, service)),
        Route("/api/buckets/{namespace}/{name}", _answering(make_bucket, service), methods=["POST"]),
        Route("/api/buckets/{namespace}/{name}", _answering(delete_bucket, service), methods=["DELETE"]),
    ]


def _answering(handler: Any, service: "HfJobsPlatform") -> Any:
    """The handler behind the service's checks of who asks."""

    async def answer(request: Request) -> Response:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        try:
            if token not in (TOKEN, BROKE_TOKEN, READING_TOKEN):
                raise Refused(401, "Invalid credentials in Authorization header")
            if request.method == "POST" and token == BROKE_TOKEN:
                raise Refused(402, "Pre-paid credit balance is insufficient")
            if request.method == "POST" and token == READING_TOKEN:
                raise Refused(403, "This token has no permission job.write")
            if request.path_params.get("namespace", USER) not in service.namespaces:
                raise Refused(404, "Namespace not found")
            return await handler(request)
        except Refused as refusal:
            return JSONResponse({"error": str(refusal)}, status_code=refusal.status)

    return answer


def _matching(jobs: Iterable[HostedJob], request: Request, labels: list[str]) -> list[HostedJob]:
    """The namespace's jobs with the labels, newest first."""
    pairs = [label.partition("=")[::2] for label in labels]
    stages = request.query_params.getlist("stage")
    return [
        job
        for job in sorted(jobs, key=lambda job: job.id, reverse=True)
        if job.namespace == request.path_params["namespace"]
        and all(job.request.get("labels", {}).get(key) == value for key, value in pairs)
        and (not stages or job.container.stage in stages)
    ]


async def _events(service: "HfJobsPlatform", job: HostedJob) -> AsyncIterator[str]:
    """The log as server-sent events, from its start, until it is complete. Nothing for a job that is pending."""
    container = job.container
    if container.started_at is None and not container.events:
        return
    yield _event(job.created_at, f"===== Job started at {job.created_at:%Y-%m-%d %H:%M:%S} =====")
    sent, alive_at = 0, time.monotonic()
    while not service.is_closing:
        is_complete, end = container.is_log_complete, len(container.events)
        if end > sent:
            yield "".join(_event(at, line) for at, line in container.events[sent:end])
            sent = end
        if is_complete and sent == len(container.events):
            return
        if time.monotonic() > alive_at + KEEP_ALIVE_S:
            alive_at = time.monotonic()
            yield ": keep-alive\n\n"
        await asyncio.sleep(0.01)


def _event(at: datetime, line: str) -> str:
    return f"data: {json.dumps({'data': line, 'timestamp': _stamp(at)})}\n\n"


def _stamp(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"


def _hardware(flavor: Machine) -> dict[str, Any]:
    usd_per_minute = (flavor.usd_per_hour or 0) / 60
    return {
        "name": flavor.name,
        "prettyName": flavor.name.upper(),
        "cpu": f"{flavor.cpus:g} vCPU",
        "ram": f"{flavor.memory_gb:g} GB",
        "ephemeralStorage": f"{flavor.disk_gb:g} GB",
        "accelerator": {
            "type": "gpu",
            "model": flavor.gpu.replace("-", " "),
            "quantity": str(flavor.num_gpus),
            "vram": "24 GB",
            "manufacturer": "Nvidia",
        }
        if flavor.gpu
        else None,
        "unitCostMicroUSD": round(usd_per_minute * 1e6),
        "unitCostUSD": usd_per_minute,
        "unitLabel": "minute",
    }


class Faulty:
    """Lets requests go wrong, one for each trouble that is asked for."""

    def __init__(self, app: ASGIApp, service: "HfJobsPlatform") -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        service.requests.append((scope["method"], scope["path"]))
        kind = service.troubles.popleft() if service.troubles else None
        if kind == "429":
            headers = {"Retry-After": service.retry_after}
            answer = JSONResponse({"error": "Too many requests"}, status_code=429, headers=headers)
            return await answer(scope, receive, send)
        if kind == "503":
            return await Response("Service Unavailable", status_code=503)(scope, receive, send)
        if kind == "reset":
            return await self._reset(scope, receive, send)
        if kind == "slow":
            await asyncio.sleep(2)
        await self._app(scope, receive, send)

    async def _reset(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Do what a POST asks for, and lose the answer on the way: the worst of what a cut connection may mean."""
        if scope["method"] == "POST":
            await self._app(scope, receive, _nowhere)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})


async def _nowhere(message: Message) -> None:
    """Where an answer goes that nobody gets."""
