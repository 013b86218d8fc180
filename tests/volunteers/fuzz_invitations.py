"""Hostile invitations, signed by the run's owner, through `doctor` and `join`, and all that this process does is seen.

`python -m tests.volunteers.fuzz_invitations --cases 100000 --jobs 2`; `--first N --cases 1` replays case N.
Only what costs time is stood in for: the look at the machine, the trial of the link, the bucket's server.
"""

import argparse
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from composer_prime.config.load import any_from_data
from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.recipe import Recipe, RecipeBase
from composer_prime.config.toml import to_toml
from composer_prime.errors import BadInput
from composer_prime.plan.traffic import Link
from composer_prime.store import open_store
from composer_prime.sync.canonical import PROTOCOL, canonical
from composer_prime.volunteers import consent, doctor, entrance
from composer_prime.volunteers import join as joining
from composer_prime.volunteers.consent import Wishes, asked_of
from composer_prime.volunteers.doctor import Gpu, Torch, examine_for_invitation, lines
from composer_prime.volunteers.invitation import Invitation, decode
from composer_prime.volunteers.shared_recipe import EMBEDDED, LOSSES, PRIME_RL, refusals, shared_toml
from tests.volunteers.audit import watched
from tests.volunteers.hostile_cases import FIELDS, KEYS, PUBLIC_URLS, Case, draw, leaves
from tests.volunteers.owned_run import GIB, OWNER, OwnedRun, machine
from tests.volunteers.test_invitation import packed

LONGEST_LINE = 900
SAFE_TEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.,+=-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
PUBLIC_PLACE = re.compile(
    r"(s3|gs|hf)://[A-Za-z0-9][\w./=+-]*|gateway\+https?://(gate\.example\.org|8\.8\.8\.8(:8790)?)/run"
)
PUBLIC_ENDPOINTS = (*PUBLIC_URLS, "https://hub.example/org/model", "https://s3.amazonaws.com")
OUR_LOSSES = ("composer_prime.sites.prime_rl.outer.loss", "composer_prime.sites.prime_rl.loss.composer_loss")
NAMED_LOSSES = ("composer_loss", "default", "ipo", "icepop", "ppo", "cispo")
DENIED_NAMES = re.compile(
    r"(^|\.|_)(path|dir|file|command|url|var|vars|env_vars|trust_remote_code|python|port|key_file)$"
)


@dataclass
class Count:
    """What came of the cases. keys: how often each was judged past the signature check; fields: as decoded."""

    accepted: int = 0
    refused: int = 0
    keys: Counter[str] = field(default_factory=Counter)
    fields: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, other: "Count") -> None:
        """Count these, too."""
        self.accepted += other.accepted
        self.refused += other.refused
        self.violations += other.violations
        for mine, theirs in ((self.keys, other.keys), (self.fields, other.fields), (self.refusals, other.refusals)):
            mine.update(theirs)


class Place:
    """A run in this process's memory, a volunteer's folders, and what stands in for what takes time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = OwnedRun(folder, uri=f"memory://fuzz-{os.getpid()}-{folder.name}/run")
        self.sound = json.loads(self.run.invite().to_bytes())
        self.embedded: dict[str, Any] = tomllib.loads(self.sound["recipe"])
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        source = {"name": "one", "env": {"taskset": {"id": "reverse-letters"}, "agent": agent}}
        shared = {name: self.embedded[name] for name in ("run", "max_steps", "outer")}
        more = {"site": {"backend": "prime-rl"}, "model": {"name": "org/model"}, "prime_rl": {"version": "0.8.0"}}
        more |= {"orchestrator": {"batch_size": 64, "group_size": 8, "train": {"source": [source]}}, "inference": {}}
        self.prime: dict[str, Any] = tomllib.loads(shared_toml(any_from_data(shared | more)))
        home = folder / "home"
        (home / "Documents").mkdir(parents=True)
        (home / "secret").write_text("the volunteer's own\n")
        (folder / "tmp").mkdir()
        self.opened: list[str] = []
        self.read: list[RecipeBase] = []
        self.judged = 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Be the volunteer's process meanwhile."""
        vector = self.run.site.run.manifest.test_vector
        able = machine(torch=Torch("2.13.0", vector, (Gpu("card", 80 * GIB),) * 4))
        before, variables = Path.cwd(), dict(os.environ)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(entrance, "open_store", self._open))
            for module in (doctor, joining):
                stack.enter_context(mock.patch.object(module, "invited_recipe", self._noted(module.invited_recipe)))
            stack.enter_context(mock.patch.object(consent, "read_shared", self._judged(consent.read_shared)))
            stack.enter_context(mock.patch.object(doctor, "look", lambda: able))
            stack.enter_context(mock.patch.object(doctor, "measure", lambda *args: Link(20.0, 80.0, 0.03)))
            stack.enter_context(mock.patch.object(tempfile, "tempdir", str(self.folder / "tmp")))
            os.environ |= {"PATH": str(self.folder / "tmp"), "HOME": str(self.folder / "home")}
            os.chdir(self.folder / "home")
            try:
                yield
            finally:
                os.chdir(before)
                os.environ.clear()
                os.environ.update(variables)

    def _open(self, uri: str, key_file: Path | None = None) -> Any:
        self.opened.append(uri)
        return open_store(self.run.uri)

    def _noted(self, read: Callable[..., RecipeBase]) -> Callable[..., RecipeBase]:
        def noted(*args: Any, **more: Any) -> RecipeBase:
            self.read.append(read(*args, **more))
            return self.read[-1]

        return noted

    def _judged(self, read: Callable[[str], RecipeBase]) -> Callable[[str], RecipeBase]:
        def judged(text: str) -> RecipeBase:
            self.judged += 1  # `enter` has found the owner's signature good
            return read(text)

        return judged

    def signed_line(self, case: Case) -> str:
        """The invitation of a case as the volunteer gets it."""
        data = dict(self.sound, environment=dict(self.sound["environment"]))
        if case.recipe is not None:
            data["recipe"] = to_toml(case.recipe)
        elif "uri" not in case.fields:
            data["uri"] = "s3://bucket/run"  # so that all else is looked at
        for name, value in case.fields.items():
            table, key = (data["environment"], name.partition(".")[2]) if "." in name else (data, name)
            table[key] = value
        if "signature" not in case.fields:
            message = canonical({name: value for name, value in data.items() if name != "signature"})
            head = f"composer-prime/{PROTOCOL}/Invitation/{self.run.site.run.sha256}\n"
            data["signature"] = OWNER.sign(head.encode() + message)
        return packed(data)


def run_case(place: Place, case: Case, count: Count) -> None:
    """Let a volunteer read, check and join by the case's invitation, and count what came of it."""
    rng = random.Random(f"wishes of {case.number}")
    wishes = Wishes(
        folder=place.folder / "alice",
        allow_envs=() if rng.random() < 0.1 else ("reverse-letters",),
        allow_harnesses=("bash",) if rng.random() < 0.3 else (),
        allow_teachers=PUBLIC_URLS if rng.random() < 0.6 else (),
        allow_local=case.recipe is not None or rng.random() < 0.3,
    )
    line, said = place.signed_line(case), []
    place.opened.clear()
    place.read.clear()
    judged, variables, problem = place.judged, dict(os.environ), None
    with watched(place.folder) as seen:
        try:
            invitation = decode(line)
            _take_part(place, case, invitation, wishes, said)
            count.accepted += 1
        except BadInput as error:
            said.append(str(error))
            count.refused += 1
            count.refusals[" ".join(str(error).split()[:6])] += 1
        except Exception as error:  # whatever else comes out is what is looked for
            problem = f"{type(error).__name__}: {error!s:.200}"
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    if case.recipe is None:
        count.fields.update(case.keys)
    elif place.judged > judged:
        count.keys.update(case.keys)
    found = [*seen, *_faults(place, case, wishes, said), *([problem] if problem else [])]
    count.violations += [f"case {case.number} {case.keys}: {fault}" for fault in found]


def _take_part(place: Place, case: Case, invitation: Invitation, wishes: Wishes, said: list[str]) -> None:
    if case.number // 4 % 2:
        diagnosis = examine_for_invitation(invitation, wishes)
        said += [line for line in lines(diagnosis)]
        return
    folder = joining.folder_of(invitation, wishes.folder)
    folder.make()
    recipe = joining.prepare(invitation, wishes, folder, said.append)
    assert isinstance(recipe, Recipe | PrimeRecipe)
    place.read.append(recipe)


def _faults(place: Place, case: Case, wishes: Wishes, said: list[str]) -> Iterator[str]:
    """What a case must not lead to, judged without the code that is tested."""
    for line in said:
        if not line.isprintable() or len(line) > LONGEST_LINE:
            yield f"said {line[:200]!r} ({len(line)} characters)"
    for place_ in place.opened:
        is_local = place_ not in PUBLIC_ENDPOINTS and not PUBLIC_PLACE.fullmatch(place_)
        if is_local and not wishes.allow_local and "gate.example.org" not in place_ and "8.8.8.8" not in place_:
            yield f"opened {place_!r}"
    for recipe in place.read:
        for name, value in leaves(recipe.to_data()):
            if not _is_harmless(name, value, wishes, place):
                yield f"let in {name} = {value!r:.100}"
        asked = asked_of(recipe)
        if not {*asked.environments} <= {*wishes.allow_envs} or not {*asked.harnesses} <= {*wishes.allow_harnesses}:
            yield f"let in {asked}"
    if case.recipe is not None:  # each key of a case that was refused for another is judged as well
        refused = {refusal.name.replace("[]", "") for refusal in refusals(case.recipe)}
        for spelled, value in leaves(case.recipe):
            name = spelled.replace("[]", "")
            if not any(name == each or name.startswith(f"{each}.") for each in refused) and not _is_harmless(
                name, value, None, place
            ):
                yield f"would let in {name} = {value!r:.100}"


LOCALIZED = ("output_dir", "outer.store", "outer.owner", "site.key_file", "site.name", "prime_rl.command")
"""What the volunteer's own side sets, and the defaults of what an invitation can't hold."""


def _is_harmless(name: str, value: Any, wishes: Wishes | None, place: Place) -> bool:
    if name.startswith(LOCALIZED) and wishes is not None:
        return True
    if isinstance(value, bool | int | float):
        return (not DENIED_NAMES.search(name) or wishes is not None) and abs(value) < 1e18
    if not isinstance(value, str) or len(value) > 5000:
        return False
    if name.endswith("base_url"):
        return value + "/" in [url.removesuffix("/v1") + "/" for url in PUBLIC_URLS] or value in PUBLIC_ENDPOINTS
    if name.startswith("hints.templates."):
        return len(value.format(error="e", tool="t")) < 5000
    if name.endswith("import_path"):
        return value in (*LOSSES, *OUR_LOSSES)
    if name == "trainer.loss.kwargs.inner":
        return value in NAMED_LOSSES
    if DENIED_NAMES.search(name) and wishes is None:
        return False
    return (
        bool(SAFE_TEXT.fullmatch(value)) and ".." not in value and (wishes is None or not _is_here(name, value, place))
    )


def _is_here(name: str, value: str, place: Place) -> bool:
    is_choice = name in EMBEDDED or name in PRIME_RL or ".taskset." not in name
    return (not is_choice or name == "model.name") and (place.folder / "home" / value).exists()


def warm_up(place: Place) -> None:
    """Import, unwatched, what sound invitations and an ordinary refusal need; hostile ones would hide what they do."""
    wishes = Wishes(folder=place.folder / "alice", allow_envs=("reverse-letters",), allow_local=True)
    for data in (
        place.embedded,
        place.prime,
        place.embedded | {"seq_len": "no number"},
        place.embedded | {"seq_len": 8},
    ):
        for number in (0, 4):
            case = Case(number, (), data, {})
            with contextlib.suppress(BadInput):
                _take_part(place, case, decode(place.signed_line(case)), wishes, [])


def run(first: int, number: int) -> Count:
    """Run so many cases, from that one on."""
    count = Count()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        place = Place(Path(folder).resolve())
        with place.entered():
            warm_up(place)
            for case in range(first, first + number):
                run_case(place, draw(case, place.embedded, place.prime), count)
    return count


def main(arguments: list[str]) -> int:
    """Run, print what came of it, and return 1 where anything happened that mustn't."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args(arguments)
    began, total, size = time.monotonic(), Count(), 2500
    starts = range(asked.first, asked.first + asked.cases, size)
    sizes = [min(size, asked.first + asked.cases - start) for start in starts]
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool:
        for count in pool.map(run, starts, sizes):
            total.add(count)
    print(f"cases {total.accepted + total.refused}: accepted {total.accepted}, refused {total.refused}")
    for what, names, counted in (("key", KEYS, total.keys), ("field", FIELDS, total.fields)):
        least = min(names, key=lambda name: counted[name])
        print(f"{len(names)} {what}s, each judged at least {counted[least]} times ({least})")
    print(f"violations {len(total.violations)}, in {time.monotonic() - began:.0f} s")
    for line in total.violations[:50]:
        print(line)
    return 1 if total.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
