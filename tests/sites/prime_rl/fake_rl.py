"""Stands for PRIME-RL's `rl`: notes what it was started with beside its TOML, prints, and ends as it was told to.

FAKE_RL holds a JSON object: the outer run's `result` to write as the trainer does, `lines` to print, `exit` code to end
with, `signal` to end itself with, and `wait`: until a file `go` is beside the TOML, or SIGTERM, which it notes in
`terminated` before it ends with code 1.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    file = Path(sys.argv[2])
    orders = json.loads(os.environ.get("FAKE_RL", "{}"))

    def terminated(number: int, frame: object) -> None:
        (file.parent / "terminated").touch()
        sys.exit(1)

    signal.signal(signal.SIGTERM, terminated)
    environment = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "AWS_SECRET_ACCESS_KEY")}
    seen = {"arguments": sys.argv[1:], "environment": environment, "pid": os.getpid()}
    (file.parent / "seen.json.new").write_text(json.dumps(seen))
    (file.parent / "seen.json.new").rename(file.parent / "seen.json")
    if "result" in orders:
        result = file.parent / "prime-rl" / "outer" / "result.json"
        result.parent.mkdir(parents=True, exist_ok=True)
        result.with_suffix(".new").write_text(json.dumps(orders["result"]))
        result.with_suffix(".new").rename(result)
    for line in orders.get("lines", []):
        print(line, flush=True)
    while orders.get("wait") and not (file.parent / "go").exists():
        time.sleep(0.05)
    if "signal" in orders:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), orders["signal"])
    sys.exit(orders.get("exit", 0))


if __name__ == "__main__":
    main()
