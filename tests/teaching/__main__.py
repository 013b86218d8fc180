"""`python -m tests.teaching SETTING [SEEDS]`: all arms of one setting of docs/evidence/teaching-plan.md, seed by seed.

Makes the first policy and the replay teacher, runs `composer-prime ablate`, the imitation baseline, what the task's
player comes to and, of a sparse setting, base with eight times the rollouts. Rows are appended to
docs/evidence/teaching/SETTING.jsonl; those that are there aren't made again.
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer_prime.ablate.plan import Row
from composer_prime.ablate.runner import is_healthy
from composer_prime.config.load import load_any
from composer_prime.config.paths import models_cache
from composer_prime.config.recipe import Recipe
from composer_prime.metrics import read_tape
from composer_prime.sites.embedded.model import resolve_model
from tiny_policy.making import make

HERE = Path(__file__).parent
ROWS = Path("docs/evidence/teaching")
OUT = Path("outputs/teaching")
SPARSE = ("cipher", "desk", "locks", "mail")
DENSE = ("boxes", "kiln", "lost", "reply")
FIRST_SEED, SEEDS, PROMPTS = 100, 5, 256
TEACHER_SEED, LONG_SEED = 50, 51
LONG = 8
PORT = 8200
COMMAND = [sys.executable, "-m", "composer_prime.cli.main"]


class Setting:
    """One task with its settings, and the rows that there are of it."""

    def __init__(self, name: str) -> None:
        self.name, self.file = name, ROWS / f"{name}.jsonl"
        self.recipe_words = ["@", str(HERE / "recipes/base.toml"), "@", str(HERE / f"recipes/{name}.toml")]
        self.port = PORT + [*SPARSE, *DENSE].index(name)
        self.rows = [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def recipe(self, seed: int) -> Recipe:
        found = load_any(None, [*self.recipe_words, f"--run.seed={seed}", "--hints=None"])
        assert isinstance(found, Recipe)
        return found

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, with the first policy's hash."""
        folder = resolve_model(self.recipe(FIRST_SEED).model.name, row["seed"], models_cache())
        policy = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:12]
        self.rows.append({"setting": self.name, **row, "policy": policy})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")

    def has(self, arm: str, seed: int) -> bool:
        return any((row["arm"], row["seed"]) == (arm, seed) for row in self.rows)

    def run(self, *words: str) -> None:
        """One command of ours, its words printed."""
        print("composer-prime", *words, flush=True)
        subprocess.run([*COMMAND, *words], check=True, stdout=subprocess.DEVNULL)


def make_policy(setting: Setting) -> None:
    """The first policy, where the recipe names a folder."""
    recipe = setting.recipe(FIRST_SEED)
    folder = Path(recipe.model.name)
    if folder.parent.name != "models" or folder.exists():
        return
    (source,) = recipe.to_data()["orchestrator"]["train"]["source"]
    taskset = {key: value for key, value in source["env"]["taskset"].items() if key != "id"}
    make(source["env"]["taskset"]["id"], folder, taskset, max_turns=source["env"]["agent"]["max_turns"])


def trained(setting: Setting, name: str, *words: str) -> Path:
    """The folder of site a of a run of the recipe; a run that ended isn't made again."""
    site = OUT / name / "sites/a"
    if not (OUT / name / "summary.json").exists():
        resume = ["--resume"] if (OUT / name).exists() else []
        setting.run("run", *setting.recipe_words, f"--run.name={name}", *words, *resume)
    return site


def last_reward(site: Path) -> float:
    """Mean training reward of the last ten steps."""
    found = [record["rollout/reward"] for record in read_tape(site / "metrics/orchestrator.jsonl")]
    return statistics.fmean(found[-10:])


@contextmanager
def teacher(setting: Setting) -> Iterator[str]:
    """`[[replay.teachers]]` of the policy that a run with hints ended with, while it is served."""
    site = trained(setting, f"{setting.name}-teacher", f"--run.seed={TEACHER_SEED}")
    if not setting.has("teacher", TEACHER_SEED):
        setting.add({"arm": "teacher", "seed": TEACHER_SEED, "reward": last_reward(site)})
    newest = max((site / "broadcasts").glob("step_*"), key=lambda path: int(path.name[5:]))
    model = setting.recipe(TEACHER_SEED).model.name
    words = ["replay", "teacher", model, "--port", str(setting.port), "--weights", str(newest), "--seed"]
    url = f"http://127.0.0.1:{setting.port}"
    if is_healthy(setting.port):
        raise SystemExit(f"port {setting.port} is in use: stop what listens there")
    served = subprocess.Popen([*COMMAND, *words, str(TEACHER_SEED)], stdout=subprocess.DEVNULL)
    try:
        while not is_healthy(setting.port):
            if served.poll() is not None:
                raise SystemExit(f"the teacher of {setting.name} ended")
            time.sleep(0.5)
        yield f'[{{name="big",base_url="{url}"}}]'
    finally:
        served.terminate()
        served.wait()


def ablate(setting: Setting, teachers: str, count: int) -> None:
    """The arms of the first `count` seeds, and their rows."""
    folder = OUT / f"{setting.name}-ablation/rows"
    folder.mkdir(parents=True, exist_ok=True)
    for row in setting.rows:  # of an earlier machine
        if "recipe_sha256" in row:
            file = folder / f"{row['arm'].replace('+', 'plus-')}-s{row['seed']}.json"
            file.write_text(
                Row.model_validate({key: row[key] for key in Row.model_fields if key in row}).model_dump_json()
            )
    words = [f"--run.seed={FIRST_SEED}", "--seeds", str(count), "--held-out-prompts", str(PROMPTS)]
    setting.run("ablate", *setting.recipe_words, *words, f"--replay.teachers={teachers}")
    for file in sorted(folder.glob("*.json")):
        row = json.loads(file.read_text())
        if not setting.has(row["arm"], row["seed"]):
            setting.add(row)


def main(name: str, seeds: int) -> None:
    """Everything of one setting."""
    from tests.teaching.imitating import imitate, player_reward

    setting = Setting(name)
    make_policy(setting)
    if not setting.has("player", FIRST_SEED):
        reward = player_reward(setting.recipe(FIRST_SEED))
        setting.add({"arm": "player", "seed": FIRST_SEED, "reward": reward})
    with teacher(setting) as teachers:
        for count in range(1, seeds + 1):
            seed = FIRST_SEED + count - 1
            ablate(setting, teachers, count)
            if not setting.has("imitation", seed):
                setting.add(imitate(setting.recipe(seed), prompts=PROMPTS))
    if name in SPARSE and not setting.has("base x8", LONG_SEED):
        steps = LONG * setting.recipe(FIRST_SEED).max_steps
        words = ["--hints=None", f"--run.seed={LONG_SEED}", f"--max_steps={steps}"]
        site = trained(setting, f"{name}-long", *words)
        setting.add({"arm": "base x8", "seed": LONG_SEED, "reward": last_reward(site)})


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE / "tasks"), os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, str(HERE / "tasks"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else SEEDS)
