"""Behind a proxy: a launcher's requests go through the one that its environment names, by the vendors' own clients."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.executors.jobs import PATIENCE_S, fresh_process
from tests.executors.platforms import LoopbackPlatform
from tests.executors.registry import loopback
from tests.servers.forward_proxy import forward_proxy

NOWHERE = "203.0.113.5"
"""Only the proxy knows what stands there (TEST-NET-3)."""
ADDRESSES = {"modal": "MODAL_SERVER_URL", "hf-jobs": "HF_ENDPOINT", "sky": "SKYPILOT_API_SERVER_ENDPOINT"}
MODAL = pytest.param(
    "modal",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("python_socks") is None, reason="needs pip install 'modal[api-proxy-support]'"
    ),
)

ONE_JOB = """
import time
job = executor.submit(JobSpec("proxied", "a", 1, (sys.executable, "-c", "print('hello')"), 60, image="any"))
while not (status := executor.poll(job)).state.final:
    time.sleep(0.05)
print(status.state, *executor.logs(job))
executor.close()
"""


@pytest.fixture(params=[MODAL, "hf-jobs", "sky"])
def platform(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoopbackPlatform]:
    with closing(loopback(request.param, tmp_path / "platform")) as opened:
        yield opened


@pytest.mark.skipif(sys.platform != "linux", reason="the loopbacks find a job's processes in /proc")
def test_a_launcher_without_another_way_out_starts_reads_and_ends_its_jobs_by_a_proxy(
    platform: LoopbackPlatform,
) -> None:
    environment = platform.environment()
    address = urlsplit(environment[ADDRESSES[platform.name]])
    environment[ADDRESSES[platform.name]] = f"http://{NOWHERE}:{address.port}"
    with forward_proxy({NOWHERE: "127.0.0.1"}) as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            environment |= {name: proxy.url, name.lower(): proxy.url}
        environment |= {name: "" for name in ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy")}
        with fresh_process(platform.launch_option(), environment, ONE_JOB) as launcher:
            out, err = launcher.communicate(timeout=PATIENCE_S)
    assert (out, launcher.returncode) == ("succeeded hello\n", 0), err
    assert proxy.passed and all(f"{NOWHERE}:{address.port}" in line for line in proxy.passed)
