"""Logs a site's trained steps in Weights & Biases or Trackio, in a process that nothing of the site waits for.

`python -m composer_prime.sites.embedded.monitors SITE_DIR wandb`. It follows the site's metrics files until SIGTERM.
"""

import json
import math
import os
import signal
import sys
import threading
import uuid
import warnings
from pathlib import Path
from typing import Any

from composer_prime.config.settings import SiteSettings
from composer_prime.errors import SiteError, last_words
from composer_prime.metrics import ROLLOUT_PER_S, TRAIN_TOKENS, TapeFollower
from composer_prime.redaction import Redactor, secret_values
from composer_prime.sites.embedded.result import write_whole

POLL_S = 0.5


def open_run(name: str, settings: SiteSettings, run_id: str, is_new: bool) -> Any:
    """The site's run in a monitor: a new one, or the one it was before. Raises whatever the monitor does."""
    config = Redactor(secret_values(os.environ)).data(settings.recipe.to_data())
    table, run_name = config["monitors"][name], settings.recipe.run.name
    said = {"project": table["project"], "group": table.get("group", run_name), "config": config}
    said["name"] = f"{table.get('name', run_name)}-{settings.site}"
    if name == "trackio":
        import trackio

        return trackio.init(**said, resume="never" if is_new else "allow")
    import wandb

    said |= {"entity": table.get("entity"), "tags": table["tags"], "dir": settings.paths.root}
    mode: Any = os.environ.get("WANDB_MODE") or ("offline" if table["offline"] else "online")
    return wandb.init(**said, id=run_id, resume="allow", settings=wandb.Settings(mode=mode, console="off"))


def follow(name: str, settings: SiteSettings, stop: threading.Event) -> None:
    """Log each trained step once, in order, until `stop` is set and none is left. Raises whatever the monitor does."""
    kept = settings.paths.tape(name).with_suffix(".json")  # the run, and the next step, over all resumes
    run_id, next_step = json.loads(kept.read_text()) if kept.exists() else (uuid.uuid4().hex, 0)
    run = open_run(name, settings, run_id, is_new=not next_step)
    tapes = [TapeFollower(settings.paths.tape(role)) for role in ("orchestrator", "trainer")]
    steps, has_ended = dict[int, dict[str, float]](), False
    with warnings.catch_warnings(record=True) as warned:
        while not has_ended:
            has_ended = stop.wait(POLL_S)
            for record in [record for tape in tapes for record in tape.new_records()]:
                steps.setdefault(int(record.pop("step")), {}).update(record)
            needed = {TRAIN_TOKENS} if has_ended else {TRAIN_TOKENS, ROLLOUT_PER_S}
            for step in sorted(step for step, values in steps.items() if needed <= values.keys()):
                values = steps.pop(step)
                if step >= next_step:
                    values = {one: values[one] for one in values if one != "time" and math.isfinite(values[one])}
                    run.log(values, step=step)
                    next_step = step + 1
                    write_whole(kept, json.dumps([run_id, next_step]))
        run.finish()
    if warned and name == "trackio":  # which raises nothing where it can't write
        raise SiteError(str(warned[0].message))


def main(site_dir: Path, name: str) -> int:
    """Run a site's monitor in this process; returns the exit code."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        follow(name, SiteSettings.load(site_dir), stop)
    except Exception as error:  # whatever it is: the site trains on
        return last_words(SiteError(" ".join(f"{type(error).__name__}: {error}".split())))
    return 0


if __name__ == "__main__":
    exit_code = main(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    os._exit(exit_code)  # what a monitor does at an exit may hang, and comes after the last words
