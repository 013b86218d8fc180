"""What the loopback of a SkyPilot API server answers, in the shapes of the real one."""

import asyncio
import base64
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from tests.executors.loopback_sky import ManagedJob, SkyPlatform

RECORDED = Path(__file__).parent / "recorded" / "sky"


def recorded(name: str) -> Any:
    """What the real server answered once: `status` and `body` or `text`, or those of a POST and of its result."""
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


CATALOG = json.loads(recorded("list_accelerators")["get"]["return_value"])
HEARTBEAT_S = 30.0


class Failed(Exception):
    """A request that fails, with SkyPilot's type of error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def routes(server: "SkyPlatform") -> list[Route]:
    def launch(body: Mapping[str, Any]) -> Any:
        return server.launch(body)

    def queue(body: Mapping[str, Any]) -> Any:
        numbers, part, fields = body.get("job_ids"), body.get("name_match") or "", body.get("fields")
        every = sorted(server.jobs.values(), key=lambda job: job.number, reverse=True)
        found = [job for job in every if (numbers is None or job.number in numbers) and part in job.name]
        kept = {*(fields or ()), "job_id", "task_id", "status"}
        jobs = [{name: each for name, each in job.record().items() if fields is None or name in kept} for job in found]
        counts = {status: sum(job["status"] == status for job in jobs) for status in {job["status"] for job in jobs}}
        total = {"total": len(jobs), "total_no_filter": len(every), "status_counts": counts, "infra_options": []}
        return {"jobs": jobs, **total}

    def cancel(body: Mapping[str, Any]) -> None:
        for number in body["job_ids"]:
            if number in server.jobs:
                server.cancel(server.jobs[number])

    def accelerators(body: Mapping[str, Any]) -> Any:
        if not server.has_catalog:
            raise Failed("ConnectionError", "HTTPSConnectionPool(host='raw.githubusercontent.com', port=443): no route")
        return CATALOG

    async def health(request: Request) -> Response:
        return JSONResponse({**recorded("health")["body"], "api_version": str(server.api_version), "user": server.user})

    async def get(request: Request) -> Response:
        name = request.query_params["request_id"]
        if name not in server.results:
            return JSONResponse({"detail": f"Request {name!r} not found"}, status_code=404)
        record = server.results[name]
        return JSONResponse(record) if record["error"] == "null" else JSONResponse({"detail": record}, status_code=500)

    async def logs(request: Request) -> Response:
        body = await request.json()
        return StreamingResponse(_log(server, body["job_id"], body["follow"]), media_type="text/plain")

    return [
        Route("/api/health", _guarded(server, health)),
        Route("/api/get", _guarded(server, get)),
        Route("/enabled_clouds", _asking(server, "sky.enabled_clouds", lambda _: server.clouds)),
        Route("/list_accelerators", _asking(server, "sky.list_accelerators", accelerators), methods=["POST"]),
        Route("/jobs/launch", _asking(server, "sky.jobs.launch", launch, "task"), methods=["POST"]),
        Route("/jobs/queue/v2", _asking(server, "sky.jobs.queue_v2", queue), methods=["POST"]),
        Route("/jobs/cancel", _asking(server, "sky.jobs.cancel", cancel), methods=["POST"]),
        Route("/jobs/logs", _guarded(server, logs), methods=["POST"]),
    ]


def _guarded(server: "SkyPlatform", handler: Any) -> Any:
    """The handler behind the server's check of who asks."""

    async def answer(request: Request) -> Response:
        if server.token is not None and request.headers.get("authorization") != f"Bearer {server.token}":
            return JSONResponse({"detail": "Invalid service account token"}, status_code=401)
        return await handler(request)

    return answer


def _asking(server: "SkyPlatform", name: str, act: Callable[[Mapping[str, Any]], Any], *needed: str) -> Any:
    """A route that answers a request's id; its result is there at once."""

    async def handler(request: Request) -> Response:
        body = await request.json() if request.method == "POST" else {}
        if missing := [each for each in needed if each not in body]:
            told = {"type": "missing", "loc": ["body", missing[0]], "msg": "Field required", "input": body}
            return JSONResponse({"detail": [told]}, status_code=422)
        record = _record(name, body)
        try:
            record |= {"status": "SUCCEEDED", "return_value": json.dumps(act(body)), "error": "null"}
        except Failed as failed:
            error = {"object": "gASV", "type": failed.kind, "message": str(failed)}
            record |= {"status": "FAILED", "return_value": "null", "error": json.dumps(error)}
        server.results[record["request_id"]] = record
        return JSONResponse(None, headers={"X-SkyPilot-Request-ID": record["request_id"]})

    return _guarded(server, handler)


def _record(name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A request as `/api/get` tells of it; the real one's `request_body` is a pickle, which holds the whole task."""
    return {
        "request_id": str(uuid.uuid4()),
        "name": name,
        "entrypoint": "gASV",
        "request_body": base64.b64encode(json.dumps(body).encode()).decode(),
        "created_at": time.time(),
        "user_id": "fcd1e5cf",
        "pid": 1,
        "schedule_type": "short",
        "user_name": None,
        "cluster_name": None,
        "status_msg": None,
        "should_retry": False,
        "finished_at": time.time(),
        "file_mounts_blob_id": None,
    }


async def _log(server: "SkyPlatform", number: int, follow: bool) -> AsyncIterator[str]:
    """A job's log as the real server frames it: its own words around those of the present machine, from its start."""
    yield _payload("rich_init", "[bold cyan]Waiting for task to start[/]. It may take a few minutes.")
    job = server.jobs.get(number)
    if job is None:
        yield f"Job {number} not found.\n"
        return
    seen, sent, alive_at = None, 0, time.monotonic()
    while not server.is_closing:
        is_final, machine = job.is_final, job.machines[-1] if job.machines else None
        if machine is not None and machine.started_at is not None:
            if machine is not seen:
                seen, sent = machine, 0
                yield "├── Waiting for task resources on 1 node.\n└── Job started. Streaming logs...\n"
            lines = machine.events[sent:]
            sent += len(lines)
            yield "".join(f"\x1b[36m({job.name}, pid=4242)\x1b[0m {line}\n" for _, line in lines)
        if is_final or (not follow and seen is not None):
            break
        if time.monotonic() > alive_at + HEARTBEAT_S:
            alive_at = time.monotonic()
            yield _payload("heartbeat", "")
        await asyncio.sleep(0.01)
    if is_final:
        yield _finished(job, seen is not None)


def _finished(job: "ManagedJob", had_machine: bool) -> str:
    if had_machine:
        return f"\x1b[0m\x1b[32m✓ Job finished (status: {job.status}).\x1b[0m\n"
    return f"\x1b[33mJob {job.number} is already in terminal state {job.status}.\x1b[0m\n"


def _payload(kind: str, text: str) -> str:
    return f"<sky-payload>{json.dumps(f'<{kind}>{text}</{kind}>')}</sky-payload>\n"
