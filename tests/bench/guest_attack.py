"""What one guest can do to a run that the commands of docs/volunteers.md set up, as they stand there.

    python -m tests.bench.guest_attack --members 1 --members 3 --seed 0 --seed 1 --seed 2

Each seed has a run for each arm: without a guest, beside one that plays all kinds of hostile offers in turn and in
every other round what turns it around, and beside a site of ours on an environment that rewards wrong answers. The
page's recipe is changed in its length, 200 rounds, and in its task, to one that is learned by then: reversing letters.
The judge is the reward of the final weights on tasks that no site has seen.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from composer_prime.ablate.held_out import final_weights, held_out_reward
from composer_prime.config.load import load_recipe
from composer_prime.sites.embedded.processes import QUIET_ENV, Child, stop
from composer_prime.store import keys, open_store
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Commit
from composer_prime.volunteers.invitation import decode
from tests.architecture import REPOSITORY
from tests.bench.adversaries.adversaries import (
    HELD_OUT_PROMPTS,
    HELD_OUT_ROLLOUTS,
    POLL_S,
    RUN_LIMIT_S,
    STOP_S,
    describe_pairs,
)
from tests.bench.adversaries.kinds import GUEST_KINDS
from tests.bench.adversaries.site import HostilePlan, read_book

ARMS: dict[str, tuple[str, ...]] = {
    "clean": (),
    "hostile": tuple(one for kind in GUEST_KINDS for one in (kind, "against")),
    "wrong": (),
    "honest": (),
    "against": ("against",),
}
"""What hostile offers the guest makes, in turn; none: there is no guest, or one that trains."""
TASK = {
    'model.name = "tiny-sort"': 'model.name = "tiny"',
    '"sort-letters", env.taskset = { id = "sort-letters", alphabet = "abcdefgh", num_examples = 1024 }': (
        '"reverse-letters", env.taskset.id = "reverse-letters"'
    ),
}
"""The task of the page's recipe, and the one that is trained on here."""
FRAGMENTS, INNER_STEPS = 2, 12
"""As the page's recipe has them."""
GUEST = "alice"
ENVIRONMENT = QUIET_ENV | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def documented(page: str, heading: str) -> list[str]:
    """The shell commands below a heading of a page, a block each."""
    section = page.split(f"\n### {heading}\n", 1)[1].split("\n### ", 1)[0]
    return re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL)


@dataclass
class Run:
    """One run: its folder, the names of the owner's sites, and which arm it is."""

    folder: Path
    seed: int
    members: Sequence[str]
    arm: str

    def prepare(self, rounds: int) -> None:
        """The owner's keys and recipe, by the page's commands, with another task and a shorter run."""
        self._page = (REPOSITORY / "docs/volunteers.md").read_text()
        made, written, self._site = documented(self._page, "1. A run with an owner")
        (self._invite,) = documented(self._page, "2. The invitation")
        changes = {
            **TASK,
            "max_steps = 4000": f"max_steps = {rounds // FRAGMENTS * INNER_STEPS}",
            'name = "letters"\n': f'name = "letters"\nseed = {self.seed}\n\n[sites]\ncount = {len(self.members)}\n',
        }
        for old, new in changes.items():
            assert written.count(old) == 1, old
            written = written.replace(old, new)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._bash(made + written)

    def _bash(self, commands: str) -> None:
        variables = {**os.environ, **ENVIRONMENT}
        done = subprocess.run(["bash", "-ec", commands], cwd=self.folder, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def start(self) -> list[Child]:
        """The owner's sites, the invitation as soon as there is a run, and the guest with what it was sent."""
        children = [self._child("a", self._site_command("a"))]
        while not (self.bucket / keys.manifest()).exists():
            check(children)
            time.sleep(POLL_S)
        for name in (name for name in self.members if name != "a"):
            admit = f"composer-prime admit bucket/letters --site {name} --key owner.key --public"
            self._bash(f"{admit} $(composer-prime keygen {name}.key)")
            children.append(self._child(name, self._site_command(name)))
        if self.arm == "clean":
            return children
        self._bash(self._invite)
        return [*children, self._adversary() if ARMS[self.arm] else self._trainer()]

    def _trainer(self) -> Child:
        """A site of ours, in the arm "wrong" with an environment package that rewards the answers that are wrong."""
        ours = (REPOSITORY / "envs/reverse_letters/reverse_letters.py").read_text()
        right, wrong = "trace.last_reply == self.data.answer", "trace.last_reply != self.data.answer"
        assert ours.count(right) == 1
        package = self.folder / "package"
        package.mkdir()
        (package / "reverse_letters.py").write_text(ours.replace(right, wrong) if self.arm == "wrong" else ours)
        (join,) = documented(self._page, "2. Join")
        join = join.replace("sort-letters", "reverse-letters")
        command = [*shlex.split(join), "--folder", str(self.folder / GUEST)]
        return self._child(GUEST, command, PYTHONPATH=f"{package}{os.pathsep}{REPOSITORY}")

    def _adversary(self) -> Child:
        """What holds the invitation's key and never trains."""
        invitation = decode((self.folder / f"{GUEST}.invitation").read_text())
        key, key_file = invitation.key(), self.folder / f"{GUEST}.key"
        assert key is not None and invitation.guest
        key.save(key_file)
        plan = HostilePlan(
            store=str(self.bucket),
            site=GUEST,
            key_file=str(key_file),
            honest=list(self.members),
            first_kind=self.seed,
            seed=self.seed,
            book=str(self.book),
            kinds=ARMS[self.arm],
        )
        path = plan.save(self.folder / "plan.json")
        return self._child(GUEST, [sys.executable, "-m", "tests.bench.adversaries.site", str(path)])

    def _site_command(self, name: str) -> list[str]:
        command = shlex.split(self._site, comments=True)
        return command if name == "a" else [*command, "--site", name, "--site.key_file", f"{name}.key"]

    def _child(self, name: str, command: list[str], **variables: str) -> Child:
        told = f"cd {shlex.quote(str(self.folder))} && exec {shlex.join(command)}"
        return Child(name, ["bash", "-c", told], self.folder / "logs" / f"{name}.log", env=ENVIRONMENT | variables)

    @property
    def bucket(self) -> Path:
        return self.folder / "bucket" / "letters"

    @property
    def book(self) -> Path:
        return self.folder / "book.jsonl"

    @property
    def num_trainers(self) -> int:
        return len(self.members) + (self.arm != "clean" and not ARMS[self.arm])

    def reward(self) -> float:
        """Of the final weights, on tasks that no site was shown."""
        recipe = load_recipe(self.folder / "run.toml", [])
        with closing(open_store(str(self.bucket))) as store:
            weights = final_weights(store)
        return held_out_reward(recipe, weights, prompts=HELD_OUT_PROMPTS, rollouts=HELD_OUT_ROLLOUTS)

    def commits(self) -> list[Commit]:
        """Of all rounds, of all fragments."""
        with closing(open_store(str(self.bucket))) as store:
            places = [key for index in range(FRAGMENTS) for key in store.list(keys.rounds_prefix(index))]
            found = [key for key in places if (place := keys.place(key)) and place.kind == "commit"]
            return [commit for key in found if (commit := find_record(store, Commit, key)) is not None]

    def fates(self) -> str:
        """What became of the guest's offers."""
        commits = self.commits()
        taken = [entry for commit in commits for entry in commit.taken]
        theirs = [entry for entry in taken if entry.site == GUEST]
        made = Counter(deed.kind for deed in read_book(self.book)) if self.book.exists() else Counter[str]()
        told = f"{len(commits)} rounds; taken: {len(taken) - len(theirs)} offers of members, {len(theirs)} of the guest"
        return f"{told} ({sum(made.values())} hostile ones of {len(made)} kinds made)"


def check(children: Sequence[Child]) -> bool:
    """Whether all are done. Raises AssertionError with the log's end when one failed."""
    for child in children:
        assert child.poll() in (None, 0), f"{child.role} ended with {child.poll()}:\n" + "\n".join(child.tail())
    return all(child.poll() == 0 for child in children)


def play(runs: Sequence[Run]) -> None:
    """Run them all at the same time, to their ends."""
    children: list[Child] = []
    try:
        for run in runs:
            children += run.start()
        until = time.monotonic() + RUN_LIMIT_S
        while not check(children):
            assert time.monotonic() < until, f"the runs below {runs[0].folder.parent} don't end: see their logs"
            time.sleep(POLL_S)
    finally:
        stop(children, STOP_S)


def batches(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """As many runs at a time as have a core for each site that trains; at least one."""
    together: list[Run] = []
    for run in runs:
        if together and sum(one.num_trainers for one in [*together, run]) > (os.cpu_count() or 1):
            yield together
            together = []
        together.append(run)
    yield together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, action="append", choices=range(1, 9), help="the owner's sites: 1, 3")
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--arm", action="append", choices=list(ARMS), help="all of them")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path("outputs/guest-attack"))
    asked = parser.parse_args()
    arms = asked.arm or ["clean", "hostile", "wrong"]
    for members in asked.members or [1, 3]:
        names = [chr(ord("a") + index) for index in range(members)]
        rewards: dict[str, list[float]] = {arm: [] for arm in arms}
        for seed in asked.seed or [0, 1, 2]:
            folder = (asked.folder / f"{members}-members-seed-{seed}").absolute()
            runs = [Run(folder / arm.replace(" ", "-"), seed, names, arm) for arm in arms]
            for run in runs:
                run.prepare(asked.rounds)
            for together in batches(runs):
                began = time.monotonic()
                play(together)
                ran = f"{time.monotonic() - began:.0f} s, load average {os.getloadavg()[0]:.1f}"
                for run in together:
                    rewards[run.arm].append(reward := run.reward())
                    print(
                        f"{members} + 1, seed {seed}, {run.arm}: reward {reward:.4f}; {run.fates()}; {ran}", flush=True
                    )
        for arm in arms[1:]:
            pairs = list(zip(rewards[arms[0]], rewards[arm], strict=True))
            print(f"{members} + 1, {arm}, against {arms[0]}: {describe_pairs(pairs)}", flush=True)


if __name__ == "__main__":
    main()
