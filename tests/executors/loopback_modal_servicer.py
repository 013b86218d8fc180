"""Modal's API on loopback, as far as its 1.6 client asks it to deploy, call, watch and end a function.

One method for each request, named as Modal names it; what isn't here answers "unimplemented". Requests of clients can
be made to go wrong; requests of containers always succeed.
"""

import asyncio
import hashlib
import itertools
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.symbol_database import Default as symbols
from grpclib import GRPCError, Status
from grpclib.const import Cardinality, Handler
from modal_proto import api_pb2 as api

from tests.executors.loopback_modal_calls import Call, Calls, Function
from tests.executors.loopback_modal_containers import TASK_HEADER
from tests.executors.loopback_modal_teardown import Teardown
from tests.executors.platforms import Trouble
from tests.executors.stock_image import build

SLOW_S = 2.0
TOKEN_ID, TOKEN_SECRET = "ak-loopback", "as-loopback-secret"
WORKSPACE = "loopback-team"
BAD_IMAGE = "registry.invalid"
"""Images whose name begins so can't be built."""
IDLE = frozenset(
    ["AppGetLayout", "AppHeartbeat", "AppClientDisconnect", "ContainerHello", "ContainerHeartbeat", "VolumeCommit"]
)
"""Requests that are answered by an empty message."""


class Servicer(Teardown):
    """One workspace, empty at the start. Lives in one event loop."""

    def __init__(self, folder: Path) -> None:
        self._numbers = itertools.count(1)
        # Containers are found by their ids among all processes of this machine, where other loopbacks may run.
        self._own = secrets.token_hex(6)
        self._folder = folder
        self._troubles: deque[Trouble] = deque()
        self._to_lose: list[str] = []
        self._apps: dict[str, str] = {}
        self._published: dict[tuple[str, str], str] = {}
        self._secrets: dict[str, dict[str, str]] = {}
        self._volumes: dict[str, Path] = {}
        self._dicts: dict[str, dict[bytes, bytes]] = {}
        self._named: dict[tuple[str, str, str], str] = {}
        self._files: dict[str, bytes] = {}
        self._mounts: dict[str, dict[str, str]] = {}
        self._programs: dict[str, Path | None] = {}
        """By image: the folder of its programs; None where this machine stands for the image."""
        self.ranks: dict[str, list[str]] = {}
        """By function: the GPUs of which any will do, the best first."""
        self.secret_names: dict[str, str] = {}
        self.registries: dict[str, str] = {}
        """Image that was pulled -> the secret that its registry was given, by name."""
        self.built: list[str] = []
        """Lines of Dockerfiles that images were made of, in their order."""
        self.mounted: set[str] = set()
        """Names of all files that an app or its image brought."""
        self.functions: dict[str, Function] = {}
        self.calls = Calls(folder, self.functions, self._new_id)
        self.requests: list[str] = []

    def trouble(self, kind: Trouble, count: int) -> None:
        self._troubles.clear()
        self._troubles.extend(itertools.repeat(kind, count))

    def lose_answer(self, name: str) -> None:
        """Let the next request of this name be carried out, and its answer be lost."""
        self._to_lose.append(name)

    def __mapping__(self) -> dict[str, Handler]:
        methods = api.DESCRIPTOR.services_by_name["ModalClient"].methods_by_name
        return {
            f"/modal.client.ModalClient/{name}": Handler(
                self._handler(name, getattr(self, name, None), said),
                Cardinality.UNARY_STREAM if method.server_streaming else Cardinality.UNARY_UNARY,
                symbols().GetSymbol(method.input_type.full_name),
                said,
            )
            for name, method in methods.items()
            for said in [symbols().GetSymbol(method.output_type.full_name)]
        }

    def _handler(self, name: str, answer: Callable[..., Any] | None, empty: type[Any]) -> Callable[..., Any]:
        async def handle(stream: Any) -> None:
            request = await stream.recv_message()
            task_id = stream.metadata.get(TASK_HEADER)
            if task_id is None:
                self.requests.append(name)
                await self._go_wrong(stream)
                if stream.metadata.get("x-modal-token-secret") != TOKEN_SECRET:
                    raise GRPCError(Status.UNAUTHENTICATED, "Token ID is malformed")
            if name in IDLE:
                return await stream.send_message(empty())
            if answer is None:
                raise GRPCError(Status.UNIMPLEMENTED, f"the loopback Modal has no {name}")
            found = answer(request, task_id)
            if task_id is None and name in self._to_lose:
                self._to_lose.remove(name)
                await found
                stream._stream._transport.abort()
                raise GRPCError(Status.UNAVAILABLE, "the answer was lost")
            if hasattr(found, "__aiter__"):
                async for message in found:
                    await stream.send_message(message)
            else:
                await stream.send_message(await found)

        return handle

    async def _go_wrong(self, stream: Any) -> None:
        trouble = self._troubles.popleft() if self._troubles else None
        if trouble == "429":
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rate limit")
        if trouble == "503":
            raise GRPCError(Status.UNAVAILABLE, "try again")
        if trouble == "reset":
            stream._stream._transport.abort()
            raise GRPCError(Status.UNAVAILABLE, "cut")
        if trouble == "slow":
            await asyncio.sleep(SLOW_S)

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}-{self._own}{next(self._numbers):010d}"

    def _by_name(self, kind: str, request: Any) -> str:
        """The id of an environment's named object, made if the request allows it."""
        key = (kind, request.environment_name, request.deployment_name)
        if key not in self._named:
            if request.object_creation_type == api.OBJECT_CREATION_TYPE_UNSPECIFIED:
                raise GRPCError(Status.NOT_FOUND, f"no {kind} named {request.deployment_name!r}")
            self._named[key] = self._new_id(kind)
        return self._named[key]

    def _call(self, call_id: str) -> Call:
        if call_id not in self.calls.by_id:
            raise GRPCError(Status.NOT_FOUND, f"function call {call_id} not found")
        return self.calls.by_id[call_id]

    # Deploying

    async def ClientHello(self, request: Any, _: Any) -> Any:
        return api.ClientHelloResponse(image_builder_version="2025.06")

    async def WorkspaceNameLookup(self, request: Any, _: Any) -> Any:
        return api.WorkspaceNameLookupResponse(workspace_name=WORKSPACE, username=WORKSPACE)

    async def EnvironmentGetOrCreate(self, request: Any, _: Any) -> Any:
        settings = api.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api.EnvironmentMetadata(name="main", settings=settings)
        return api.EnvironmentGetOrCreateResponse(environment_id="en-main", metadata=metadata)

    async def AppGetByDeploymentName(self, request: Any, _: Any) -> Any:
        return api.AppGetByDeploymentNameResponse(app_id=self._apps.get(request.name, ""))

    async def AppCreate(self, request: Any, _: Any) -> Any:
        return api.AppCreateResponse(app_id=self._new_id("ap"), app_page_url="http://localhost/app")

    async def AppPublish(self, request: Any, _: Any) -> Any:
        self._apps[request.name] = request.app_id
        for tag, function_id in request.function_ids.items():
            self._published[request.name, tag] = function_id
        return api.AppPublishResponse(url="http://localhost/app", deployed_at=time.time())

    async def MountBatchedCheckExistence(self, request: Any, _: Any) -> Any:
        missing = [sha256 for sha256 in request.sha256_hex_hashes if sha256 not in self._files]
        return api.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)

    async def MountPutFile(self, request: Any, _: Any) -> Any:
        if request.data:
            assert hashlib.sha256(request.data).hexdigest() == request.sha256_hex
            self._files[request.sha256_hex] = request.data
        return api.MountPutFileResponse(exists=request.sha256_hex in self._files)

    async def MountGetOrCreate(self, request: Any, _: Any) -> Any:
        mount_id = self._new_id("mo")
        self._mounts[mount_id] = {file.filename: file.sha256_hex for file in request.files}
        self.mounted |= self._mounts[mount_id].keys()
        return api.MountGetOrCreateResponse(mount_id=mount_id)

    async def SecretGetOrCreate(self, request: Any, _: Any) -> Any:
        secret_id = self._new_id("st")
        self._secrets[secret_id] = dict(request.env_dict)
        self.secret_names[secret_id] = request.deployment_name
        keys = ["REGISTRY_USERNAME", "REGISTRY_PASSWORD"] if request.deployment_name else request.env_dict
        return api.SecretGetOrCreateResponse(secret_id=secret_id, metadata=api.SecretMetadata(keys=keys))

    async def VolumeGetOrCreate(self, request: Any, _: Any) -> Any:
        volume_id = self._by_name("vo", request)
        self._volumes[volume_id] = self._folder / "volumes" / request.deployment_name
        self._volumes[volume_id].mkdir(parents=True, exist_ok=True)
        return api.VolumeGetOrCreateResponse(volume_id=volume_id)

    async def ImageGetOrCreate(self, request: Any, _: Any) -> Any:
        image, image_id = request.image, self._new_id("im")
        if any(BAD_IMAGE in line for line in image.dockerfile_commands):
            failed = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_FAILURE, exception="no such image")
            return api.ImageGetOrCreateResponse(image_id=image_id, result=failed)
        programs = next((self._programs[base.image_id] for base in image.base_images), None)
        files = {name: self._files[sha256] for name, sha256 in self._mounts.get(image.context_mount_id, {}).items()}
        folder = self._folder / "images" / image_id
        if image.image_registry_config.secret_id:
            self.registries[image.dockerfile_commands[0]] = self.secret_names[image.image_registry_config.secret_id]
        self.built += image.dockerfile_commands
        said = await asyncio.to_thread(build, image.dockerfile_commands, folder, programs, files)
        self._programs[image_id] = said if isinstance(said, Path) else None
        failure = said if isinstance(said, str) else ""
        status = api.GenericResult.GENERIC_STATUS_FAILURE if failure else api.GenericResult.GENERIC_STATUS_SUCCESS
        result = api.GenericResult(status=status, exception=failure)
        return api.ImageGetOrCreateResponse(image_id=image_id, result=result)

    async def FunctionPrecreate(self, request: Any, _: Any) -> Any:
        function_id = request.existing_function_id or self._new_id("fu")
        return api.FunctionPrecreateResponse(
            function_id=function_id, handle_metadata=self._handle(request.function_name)
        )

    async def FunctionCreate(self, request: Any, _: Any) -> Any:
        ranked = [each.function for each in request.function_data.ranked_functions]
        definition = ranked[0] if ranked else request.function
        self.ranks[request.existing_function_id] = [each.resources.gpu_config.gpu_type for each in ranked]
        files = {
            name: self._files[sha256]
            for mount_id in definition.mount_ids
            for name, sha256 in self._mounts[mount_id].items()
        }
        secrets: dict[str, str] = {}
        for secret_id in definition.secret_ids:
            secrets |= self._secrets[secret_id]
        volumes = {mount.mount_path: self._volumes[mount.volume_id] for mount in definition.volume_mounts}
        function_id = request.existing_function_id
        self.functions[function_id] = Function(
            function_id, request.app_id, definition, files, secrets, volumes, self._programs[definition.image_id]
        )
        return api.FunctionCreateResponse(
            function_id=function_id,
            function=definition,
            function_data=self._data(definition),
            handle_metadata=self._handle(definition.function_name),
        )

    async def FunctionGet(self, request: Any, _: Any) -> Any:
        function_id = self._published.get((request.app_name, request.object_tag))
        if function_id is None:
            raise GRPCError(Status.NOT_FOUND, f"function {request.object_tag} of app {request.app_name} not found")
        definition = self.functions[function_id].definition
        return api.FunctionGetResponse(
            function_id=function_id,
            function=self._data(definition),
            handle_metadata=self._handle(definition.function_name),
        )

    def _handle(self, name: str) -> Any:
        size = 2**21
        return api.FunctionHandleMetadata(
            function_name=name,
            function_type=api.Function.FUNCTION_TYPE_FUNCTION,
            max_object_size_bytes=size,
            max_async_object_size_bytes=size,
            supported_input_formats=[api.DATA_FORMAT_PICKLE],
            supported_output_formats=[api.DATA_FORMAT_PICKLE],
        )

    def _data(self, definition: Any) -> Any:
        ranked = api.FunctionData.RankedFunction(rank=0, function=definition)
        return api.FunctionData(function_name=definition.function_name, ranked_functions=[ranked])

    # Calling

    async def FunctionMap(self, request: Any, _: Any) -> Any:
        call = self.calls.begin(request.function_id, request.pipelined_inputs[0].input)
        accepted = api.FunctionPutInputsResponseItem(idx=0, input_id=call.input_id, input_jwt="jwt")
        return api.FunctionMapResponse(function_call_id=call.id, pipelined_inputs=[accepted])

    async def FunctionGetOutputs(self, request: Any, _: Any) -> Any:
        output = self._call(request.function_call_id).output
        if output is None:
            return api.FunctionGetOutputsResponse(num_unfinished_inputs=1)
        return api.FunctionGetOutputsResponse(outputs=[output])

    async def FunctionCallCancel(self, request: Any, _: Any) -> Any:
        assert request.terminate_containers
        await self.calls.cancel(self._call(request.function_call_id))
        return Empty()

    async def FunctionCallFromId(self, request: Any, _: Any) -> Any:
        call = self._call(request.function_call_id)
        app_id = self.functions[call.function_id].app_id
        metadata = api.FunctionCallHandleMetadata(app_id=app_id, function_id=call.function_id)
        return api.FunctionCallFromIdResponse(function_call_id=call.id, num_inputs=1, metadata=metadata)

    async def FunctionCallGetInfo(self, request: Any, _: Any) -> Any:
        call = self._call(request.function_call_id)
        info = api.FunctionCallInfo(function_call_id=call.id, created_at=call.created_at, total_inputs=1)
        return api.FunctionCallGetInfoResponse(info=info)

    async def FunctionGetCallGraph(self, request: Any, _: Any) -> Any:
        call = self._call(request.function_call_id)
        status = call.output.result.status if call.output else api.GenericResult.GENERIC_STATUS_UNSPECIFIED
        node = api.InputCallGraphInfo(input_id=call.input_id, status=status, function_call_id=call.id)
        about = api.FunctionCallCallGraphInfo(function_call_id=call.id, function_name="run_job")
        return api.FunctionGetCallGraphResponse(inputs=[node], function_calls=[about])

    async def AppCountLogs(self, request: Any, _: Any) -> Any:
        counts: dict[int, int] = {}
        size_s = request.bucket_secs
        for entry in self._entries(request):
            bucket = int(entry.timestamp // size_s) * size_s
            counts[bucket] = counts.get(bucket, 0) + 1
        answer = api.AppCountLogsResponse()
        for bucket, count in sorted(counts.items()):
            answer.buckets.add(stdout_logs=count).bucket_start_at.FromSeconds(bucket)
        return answer

    async def AppFetchLogs(self, request: Any, _: Any) -> Any:
        entries = list(self._entries(request))[: request.limit]
        return api.AppFetchLogsResponse(batches=[api.TaskLogsBatch(items=entries)] if entries else [])

    def _entries(self, request: Any) -> list[Any]:
        since_ns, until_ns = request.since.ToNanoseconds(), request.until.ToNanoseconds()
        log = self._call(request.function_call_id).log
        return [entry for entry in log if since_ns <= entry.timestamp_ns < until_ns]

    # Dicts

    async def DictGetOrCreate(self, request: Any, _: Any) -> Any:
        dict_id = self._by_name("di", request)
        self._dicts.setdefault(dict_id, {})
        metadata = api.DictMetadata(name=request.deployment_name)
        return api.DictGetOrCreateResponse(dict_id=dict_id, metadata=metadata)

    async def DictGet(self, request: Any, _: Any) -> Any:
        value = self._dicts[request.dict_id].get(request.key)
        return api.DictGetResponse(found=value is not None, value=value)

    async def DictUpdate(self, request: Any, _: Any) -> Any:
        entries = self._dicts[request.dict_id]
        (update,) = request.updates
        created = not (request.if_not_exists and update.key in entries)
        if created:
            entries[update.key] = update.value
        return api.DictUpdateResponse(created=created)

    async def DictContents(self, request: Any, _: Any) -> AsyncIterator[Any]:
        for key, value in list(self._dicts[request.dict_id].items()):
            yield api.DictEntry(key=key, value=value)

    # Containers

    async def FunctionGetInputs(self, request: Any, task_id: str) -> Any:
        call, container = self.calls.of_task(task_id)
        container.input_taken.set()
        item = api.FunctionGetInputsItem(input_id=call.input_id, input=call.input, function_call_id=call.id)
        return api.FunctionGetInputsResponse(inputs=[item])

    async def FunctionPutOutputs(self, request: Any, task_id: str) -> Any:
        _, container = self.calls.of_task(task_id)
        (container.output,) = request.outputs
        return Empty()

    async def TaskResult(self, request: Any, task_id: str) -> Any:
        _, container = self.calls.of_task(task_id)
        container.init_failure = request.result
        return Empty()
