"""The requests by which Modal's command line shows and deletes what a launch left: apps, dicts and volumes."""

from pathlib import Path
from typing import Any

from google.protobuf.empty_pb2 import Empty
from modal_proto import api_pb2 as api

from tests.executors.loopback_modal_calls import Calls, Function


class Teardown:
    """The part of a workspace's servicer that ends things."""

    _apps: dict[str, str]
    """By name, of those that are deployed."""
    _published: dict[tuple[str, str], str]
    _named: dict[tuple[str, str, str], str]
    _dicts: dict[str, dict[bytes, bytes]]
    _volumes: dict[str, Path]
    functions: dict[str, Function]
    calls: Calls

    def left(self) -> set[str]:
        """Names of the apps that are deployed, and of the dicts and volumes that are there."""
        return {*self._apps, *(name for _, _, name in self._named)}

    async def AppList(self, request: Any, _: Any) -> Any:
        state = api.APP_STATE_DEPLOYED
        apps = [
            api.AppListResponse.AppListItem(app_id=id, description=name, name=name, state=state)
            for name, id in self._apps.items()
        ]
        return api.AppListResponse(apps=apps)

    async def AppStop(self, request: Any, _: Any) -> Any:
        for name in [name for name, app_id in self._apps.items() if app_id == request.app_id]:
            del self._apps[name]
            for place in [place for place in self._published if place[0] == name]:
                del self._published[place]
        for call in list(self.calls.by_id.values()):
            if self.functions[call.function_id].app_id == request.app_id:
                await self.calls.cancel(call)
        return Empty()

    async def DictDelete(self, request: Any, _: Any) -> Any:
        del self._dicts[request.dict_id]
        self._forget(request.dict_id)
        return Empty()

    async def VolumeDelete(self, request: Any, _: Any) -> Any:
        del self._volumes[request.volume_id]
        self._forget(request.volume_id)
        return Empty()

    def _forget(self, object_id: str) -> None:
        for key in [key for key, each in self._named.items() if each == object_id]:
            del self._named[key]
