"""One replica as a process of its own: torchft's DiLoCo over a bucket, the weights saved at the end.

    python -m tests.integrations.torchft_replica URI REPLICA SETTINGS OUT

SETTINGS is JSON: `manager` (BucketManager's arguments), `train` (train_with_torchft's), and `die_at`, the inner step
after which this process kills itself as `kill -9` would.
"""

import json
import os
import signal
import sys

import torch

from composer_prime.integrations.torchft import BucketManager
from tests.integrations.replicas import masters, train_with_torchft


class Dying(BucketManager):
    """Is killed at the beginning of one inner step."""

    die_at: int | None = None
    begun = 0

    def disallow_state_dict_read(self) -> None:
        if self.begun == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.begun += 1
        super().disallow_state_dict_read()


def main(uri: str, replica: str, settings: str, out: str) -> None:
    values = json.loads(settings)
    manager = Dying(uri, run="run", replica=replica, **values["manager"])
    manager.die_at = values["die_at"]
    weights = train_with_torchft(manager, **values["train"])
    ended = {"weights": weights[-1], "masters": masters(manager)}
    torch.save(ended | {"step": manager.current_step(), "part": manager.num_participants()}, out)
    manager.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
