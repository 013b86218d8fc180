"""A vLLM server as our child process: started in an environment of its own, awaited, and ended with all it started.

vLLM spawns an engine and workers that outlive a killed parent, so a guard in a session of its own waits on a pipe that
only we hold, and ends their process group when we are gone, however we went.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from composer_prime.config.distill import MAX_K
from composer_prime.errors import BadInput, SiteError
from composer_prime.sites.embedded.processes import Child, describe_exit, stop

READY_TIMEOUT_S = 240.0
"""It takes 30 to 60 seconds on two idle cores."""
STOP_GRACE_S = 0.5
"""It needs longer to end by itself, and has nothing to save."""

_POLL_S = 0.2
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=60.0)
_TAIL_LINES = 15
_GUARD = 'read -r _; kill -s KILL -- "-$1"'
_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",  # serves /collective_rpc and /reset_prefix_cache
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS counts then; its own choice is every core, pinned
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_API_KEY": "",  # one that the user exported is another server's, and would shut us out
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",  # or it listens at the host name's address
}


class VllmServer:
    """Starts when it is made; `close` it in any case, on the thread that made it.

    folder  the model's, which is served under `model_name`, on a Unix socket that this user alone can reach: its routes
            for development ask for no key.
    python  the interpreter of the environment that has vLLM; None: ours.
    log     where its output goes.

    Raises BadInput when there is no such interpreter.
    """

    model_name = "policy"
    base_url = "http://vllm"

    def __init__(
        self, folder: Path, *, python: Path | None, log: Path, seed: int, max_batch_size: int, max_model_len: int
    ) -> None:
        interpreter = str(python or sys.executable)
        if python is not None and not python.is_file():
            raise BadInput(f"inference.python ({python}) is no file: give the python of an environment that has vLLM")
        self._place = tempfile.TemporaryDirectory(prefix="composer-prime-vllm-")  # 0700, and short enough for a socket
        self.socket = str(Path(self._place.name) / "socket")
        # Its `vllm` command looks for a distribution of that name, which vllm-cpu isn't.
        command = [interpreter, "-m", "vllm.entrypoints.openai.api_server", "--uds", self.socket]
        command += ["--model", str(folder), "--served-model-name", self.model_name]
        command += ["--max-model-len", str(max_model_len), "--max-num-seqs", str(max_batch_size)]
        command += ["--seed", str(seed), "--dtype", "float32", "--enforce-eager"]
        command += ["--disable-uvicorn-access-log"]
        command += ["--enable-scale-out"]  # serves /inference/v1/generate
        command += ["--max-logprobs", str(MAX_K)]
        command += ["--logprobs-mode", "processed_logprobs"]  # after temperature
        self._child = Child("vllm", command, log, env=_ENV)
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", str(self._child.pid)], stdin=subprocess.PIPE, start_new_session=True
        )

    async def wait_ready(self, http: aiohttp.ClientSession) -> None:
        """Return when it answers. Raises SiteError when it has ended, or hasn't answered in time."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not await _is_healthy(http):
            self.check_alive()
            if time.monotonic() > deadline:
                raise SiteError(f"vLLM wasn't ready within {READY_TIMEOUT_S:g} s: {self._last_words()}")
            await asyncio.sleep(_POLL_S)

    def check_alive(self) -> None:
        """Raise SiteError, with the end of its log, when it has ended."""
        code = self._child.poll()
        if code is not None:
            raise SiteError(f"vLLM ended with {describe_exit(code)}: {self._last_words()}")

    def close(self) -> None:
        """End it and everything it started."""
        stop([self._child], STOP_GRACE_S)
        self._guard.kill()
        self._guard.communicate()
        self._place.cleanup()

    def _last_words(self) -> str:
        lines = "\n".join(f"    {line}" for line in self._child.tail(_TAIL_LINES))
        return f"the end of {self._child.log}:\n{lines}"


async def _is_healthy(http: aiohttp.ClientSession) -> bool:
    try:
        async with http.get("/health", timeout=_PROBE_TIMEOUT) as answer:
            return answer.ok
    except (aiohttp.ClientError, TimeoutError):
        return False
