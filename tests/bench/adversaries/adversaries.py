"""`python -m tests.bench adversaries`: what three of ten sites can do when they hold admitted keys and mean harm.

Two parts. The demo's RL run with seven honest sites, real processes with a key each, alone and beside three
adversaries, over paired seeds: how much reward on held-out tasks do they cost? And thousands of honest offers in one
process beside the same adversaries: is one ever refused?
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from composer_prime.ablate.held_out import final_weights, held_out_reward
from composer_prime.ablate.report import difference_interval
from composer_prime.config.load import load_recipe
from composer_prime.config.paths import RunPaths, run_uri
from composer_prime.config.recipe import Recipe
from composer_prime.config.toml import to_toml
from composer_prime.errors import BadInput, ProcessCrashed, SiteError
from composer_prime.sites.embedded.processes import QUIET_ENV, Child, stop
from composer_prime.store import keys, open_store
from composer_prime.sync.owner import Owner
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.verifying import Verifier
from tests.bench.adversaries.audit import Audit, audit
from tests.bench.adversaries.crowd import crowd_plans, judge_crowd
from tests.bench.adversaries.kinds import KINDS
from tests.bench.adversaries.site import Deed, HostilePlan, read_book

HOSTILE_NAMES = ("0-eve", "d-eve", "z-eve")
"""Before, among and after the honest names: in which order names stand must help nobody."""
HELD_OUT_PROMPTS = 384
HELD_OUT_ROLLOUTS = 4
WORDS_PER_SITE = 128
"""Seven sites' words and the held-out ones together are fewer than the 1,296 that there are."""
RUN_LIMIT_S = 3600.0
STOP_S = 20.0
POLL_S = 0.5


@dataclass(frozen=True)
class Arm:
    """One run's end: held-out reward, what an auditor found in its bucket, how long it took."""

    reward: float
    found: Audit
    wall_s: float


def main(
    recipe: Path,
    seeds: Sequence[int],
    max_steps: int,
    honest: int,
    hostile: int,
    honest_offers: int,
    output_dir: Path,
    kinds: Sequence[str] = (),
) -> int:
    """Run both arms for each seed, then the crowd, and print tables; the exit code is 1 when something got through.

    max_steps       training steps of each honest site
    honest_offers   least number of honest offers that the crowd makes; 0: no crowd
    kinds           what each adversary of the real runs plays, in turn; none: all twelve

    Raises SiteError when a run fails, BadInput for an unknown kind, or more adversaries than there are names for.
    """
    if not 0 < hostile <= len(HOSTILE_NAMES):
        raise BadInput(f"--hostile ({hostile}) must be from 1 to {len(HOSTILE_NAMES)}: lower it")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise BadInput(f"--kind {unknown[0]!r} isn't one of {', '.join(KINDS)}")
    logging.getLogger("composer_prime.sync").setLevel(logging.CRITICAL)  # a line a refusal: the tables sum them up
    console = Console(width=None if sys.stdout.isatty() else 200)
    found = Audit()
    pairs: list[tuple[Arm, Arm]] = []
    for seed in seeds:
        settings = {"run.seed": seed, "max_steps": max_steps}
        arms = [_run_arm(recipe, settings, honest, number, output_dir, kinds) for number in (0, hostile)]
        pairs.append((arms[0], arms[1]))
        found.add(arms[0].found)
        found.add(arms[1].found)
        console.print(
            f"seed {seed}: held-out reward clean {arms[0].reward:.4f} ({arms[0].wall_s:.0f} s), "
            f"with {hostile} adversaries {arms[1].reward:.4f} ({arms[1].wall_s:.0f} s)"
        )
    if seeds:
        console.print(draw(found, f"real runs, seeds {', '.join(map(str, seeds))}"))
        console.print(describe_pairs([(clean.reward, harmed.reward) for clean, harmed in pairs]))
    for title, crowd in _crowds(honest_offers, honest, hostile).items():
        console.print(draw(crowd, title))
        found.add(crowd)
    for line in found.complaints:
        console.print(line, soft_wrap=True)
    return 0 if found.is_clean else 1


def _crowds(honest_offers: int, honest: int, hostile: int) -> dict[str, Audit]:
    """What became of the crowd's offers, by the rule that merged them; nothing where no offers are asked for."""
    found: dict[str, Audit] = {}
    for plan in crowd_plans(honest_offers, honest, hostile) if honest_offers else ():
        found.setdefault(f"crowd in one process: {plan.title}", Audit()).add(judge_crowd(plan))
    return found


def draw(found: Audit, title: str) -> Table:
    """A line a kind: what was made, what became of it, and the reason that is given most often."""
    summary = (
        f"{title}: {found.rounds} rounds, {found.cut} of them in parts; {found.honest_offers:,} honest offers, "
        f"{found.honest_taken:,} taken, {len(found.honest_refused)} refused"
    )
    table = Table(title=summary, title_justify="left")
    table.add_column("kind")
    for column in ("made", "refused", "bounded", "without effect"):
        table.add_column(column, justify="right")
    table.add_column("reason given most often", overflow="fold")
    for kind, tally in found.kinds.items():
        why = next((why for why, _ in tally.whys.most_common(1)), "")
        table.add_row(kind, *map(str, (tally.made, tally.refused, tally.bounded, tally.unseen)), why)
    return table


def describe_pairs(rewards: Sequence[tuple[float, float]]) -> str:
    """Paired differences, harmed minus clean, with their mean and its 95 % interval by Student's t."""
    clean, harmed = zip(*rewards, strict=True)
    differences = ", ".join(f"{after - before:+.4f}" for before, after in rewards)
    found = difference_interval(harmed, clean)
    told = f"harmed minus clean: {differences}; mean {found.value:+.4f}"
    if len(rewards) < 2:
        return f"{told} (one seed: no interval)"
    return f"{told}, 95 % interval {found.low:+.4f} to {found.high:+.4f}"


# --- one real run ----------------------------------------------------------------------------------------------------


def _run_arm(
    recipe: Path, settings: Mapping[str, int], honest: int, hostile: int, output_dir: Path, kinds: Sequence[str]
) -> Arm:
    """A whole run in processes of their own, scored and audited.

    settings   of the recipe, in which this bench's runs differ
    """
    began = time.monotonic()
    folder = (output_dir / f"adversaries-{hostile}-of-{honest + hostile}-seed{settings['run.seed']}").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    setup = _Setup.prepare(recipe, settings, honest, hostile, folder, kinds)
    setup.run()
    wall_s = time.monotonic() - began
    store = open_store(setup.uri)
    try:
        found = audit(store, setup.recipe.site_names, setup.deeds())
        if not hostile:
            _verify(setup.uri)
        reward = held_out_reward(
            setup.recipe, final_weights(store), prompts=HELD_OUT_PROMPTS, rollouts=HELD_OUT_ROLLOUTS
        )
    finally:
        store.close()
    return Arm(reward, found, wall_s)


def _verify(uri: str) -> None:
    """Rebuild every master of a clean run. Raises CorruptObject on the first difference."""
    store = open_store(uri)
    verifier = Verifier(store)
    try:
        for fragment in range(len(verifier.run.fragments)):
            verifier.check(fragment)
    finally:
        verifier.close()
        store.close()


@dataclass(frozen=True)
class _Setup:
    """The files of one arm: keys, the recipe of all sites, the plans of the adversaries."""

    recipe: Recipe
    folder: Path
    plans: tuple[HostilePlan, ...]
    owner: SigningKey
    public: Mapping[str, str]

    @property
    def uri(self) -> str:
        """The run's root in its bucket."""
        uri = run_uri(self.recipe)
        assert uri is not None
        return uri

    @classmethod
    def prepare(
        cls, recipe: Path, chosen: Mapping[str, int], honest: int, hostile: int, folder: Path, kinds: Sequence[str]
    ) -> _Setup:
        """Make the keys and write the recipe that every site of this arm reads."""
        names = [chr(ord("a") + index) for index in range(honest)]
        owner, public = SigningKey.generate(), dict[str, str]()
        (folder / "keys").mkdir(parents=True)
        for name in (*names, *HOSTILE_NAMES[:hostile]):
            key = SigningKey.generate()
            key.save(folder / "keys" / f"{name}.key")
            public[name] = key.public
        settings = {
            "run.name": "run",
            "output_dir": folder,
            "sites.count": honest,
            "orchestrator.batch_size": 16,
            "orchestrator.group_size": 8,
            "orchestrator.train.source.0.env.taskset.num_examples": WORDS_PER_SITE,
            "outer.inner_steps": 8,
            "outer.sync_delay": 3,
            "outer.codec": "int8",
            "outer.weighting": "equal",
            "outer.aggregate": "clipped",
            "outer.grace_s": 6.0,
            "outer.owner": owner.public,
            **chosen,
        }
        loaded = load_recipe(recipe, [part for name, value in settings.items() for part in (f"--{name}", str(value))])
        (folder / "recipe.toml").write_text(to_toml(loaded.to_data()))
        uri = run_uri(loaded)
        assert uri is not None
        plans = tuple(
            HostilePlan(
                store=uri,
                site=name,
                key_file=str(folder / "keys" / f"{name}.key"),
                honest=names,
                first_kind=len(KINDS) // len(HOSTILE_NAMES) * index + chosen["run.seed"],
                seed=chosen["run.seed"],
                book=str(folder / "books" / f"{name}.jsonl"),
                kinds=tuple(kinds or KINDS),
            )
            for index, name in enumerate(HOSTILE_NAMES[:hostile])
        )
        return cls(loaded, folder, plans, owner, public)

    def run(self) -> None:
        """Start all sites and adversaries, and wait until the sites are done. Raises SiteError when one fails."""
        children: list[Child] = []
        try:
            first, *others = self.recipe.site_names
            children.append(self._child(first, self._site_command(first)))
            self._admit(children[0])
            children += [self._child(name, self._site_command(name)) for name in others]
            for plan in self.plans:
                path = plan.save(self.folder / "books" / f"{plan.site}.json")
                children.append(
                    self._child(plan.site, [sys.executable, "-m", "tests.bench.adversaries.site", str(path)])
                )
            self._wait(children)
        finally:
            stop(children, STOP_S)

    def _admit(self, first: Child) -> None:
        """Wait until the first site has created the run, and admit the others. Raises ProcessCrashed."""
        with closing(open_store(self.uri)) as store:
            while not store.list(keys.manifest()):
                if first.poll() is not None:
                    raise ProcessCrashed(f"{first.role} ended: " + "\n".join(first.tail()))
                time.sleep(POLL_S)
            owner = Owner(store, self.owner)
            for name, public in self.public.items():
                if name != first.role:
                    owner.admit(name, public)

    def deeds(self) -> list[Deed]:
        """What the adversaries wrote down."""
        return [deed for plan in self.plans for deed in read_book(Path(plan.book))]

    def _site_command(self, name: str) -> list[str]:
        key_file = str(self.folder / "keys" / f"{name}.key")
        recipe = str(self.folder / "recipe.toml")
        command = [sys.executable, "-m", "composer_prime.cli.main", "site", recipe, "--site", name]
        return [*command, "--site.key_file", key_file]

    def _child(self, name: str, command: list[str]) -> Child:
        return Child(name, command, self.folder / "logs" / f"{name}.log", env=QUIET_ENV)

    def _wait(self, children: Sequence[Child]) -> None:
        until = time.monotonic() + RUN_LIMIT_S
        while any(child.poll() is None for child in children):
            for child in children:
                if (code := child.poll()) not in (None, 0):
                    raise ProcessCrashed(f"{child.role} ended with {code}: " + "\n".join(child.tail()))
            if time.monotonic() > until:
                raise SiteError(f"the run in {self.folder} took more than {RUN_LIMIT_S:.0f} s: see its logs")
            time.sleep(POLL_S)
        failed = [name for name in self.recipe.site_names if not RunPaths.of(self.recipe).site(name).result.exists()]
        if failed:
            raise SiteError(f"sites {', '.join(failed)} of {self.folder} left no result: see their logs")
