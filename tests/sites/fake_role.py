"""Stands in for a site's roles: same files, same exits, no model. `python fake_role.py ROLE SITE_DIR BEHAVIOUR...`

A trainer takes `steps=N` and writes both tapes; any role takes `ending=exit:CODE|stubborn`, a trainer also
`ending=result`. All else serves or waits until SIGTERM. Every process writes <site_dir>/pids/<role> when it is up.
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from composer_prime.metrics import MetricsTape


class Server(BaseHTTPRequestHandler):
    """Healthy at once."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        print(format % args)


def main() -> None:
    role, site_dir = sys.argv[1], Path(sys.argv[2])
    behaviour = dict(part.split("=", 1) for part in sys.argv[3:])
    signal.signal(signal.SIGTERM, lambda *_: end(role, site_dir))
    print(f"{role} is up", flush=True)
    if behaviour.get("ending", "").startswith("exit:"):
        for line in range(25):
            print(f"line {line}")
        said = behaviour.get("last", "widget_(7)_must_be_at_most_3:_lower_it").replace("_", " ")
        print(f"error: {said}", file=sys.stderr)
        sys.exit(int(behaviour["ending"].removeprefix("exit:")))
    if behaviour.get("ending") == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = None
    if role == "inference":
        port = json.loads((site_dir / "configs" / "recipe.json").read_text())["inference_port"]
        server = HTTPServer(("127.0.0.1", port), Server)
    if role == "trainer":
        train(site_dir, int(behaviour.get("steps", 0)))
    mark(site_dir / "pids", role, str(os.getpid()))
    if behaviour.get("ending") == "result":
        write_result(site_dir, int(behaviour["steps"]))
    elif server:
        server.serve_forever()
    else:
        while True:
            time.sleep(60)


def train(site_dir: Path, steps: int) -> None:
    rollouts, training = (MetricsTape(site_dir / "metrics" / f"{role}.jsonl") for role in ("orchestrator", "trainer"))
    for step in range(steps):
        rollouts.log(step, **{"rollout/reward": (step + 1) / steps, "rollout/per_s": 40.0})
        training.log(
            step,
            **{"train/tokens": 100, "train/step_s": 0.5, "train/train_s": 0.4, "outer/stall_s": 0.01},
            **{"outer/round": step // 2},
        )


def write_result(site_dir: Path, steps: int) -> None:
    result = {
        "steps": steps,
        "tokens": 100 * steps,
        "outer_rounds": steps // 2,
        "master_sha256": {"0": {"version": steps // 2, "sha256": "ab" * 32}},
        "bytes_up": 1000,
        "bytes_down": 2000,
        "stall_s": 0.01 * steps,
        "train_s": 0.4 * steps,
    }
    (site_dir / "result.json").write_text(json.dumps(result))


def mark(folder: Path, name: str, text: str) -> None:
    """Write a small file that a test waits for, whole at once."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f".{name}").write_text(text)
    (folder / f".{name}").rename(folder / name)


def end(role: str, site_dir: Path) -> None:
    mark(site_dir / "ended", role, str(time.monotonic()))
    os._exit(0)


if __name__ == "__main__":
    main()
