"""A follower holds what the masters are, by whichever way they came; what is wrong with a delta is healed by them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from composer_prime.errors import BadInput, RunGone, SiteError, StoreError
from composer_prime.export.following import Follower
from composer_prime.export.publishing import KEEP_STEPS, Publisher
from composer_prime.export.reading import MasterReader
from composer_prime.export.steps import Step
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from tests.export.runs import make_run
from tests.export.test_export import expected

DTYPE = "bfloat16"


@pytest.fixture(scope="module")
def run(base: Path) -> Store:
    return make_run("memory://followed", base, rounds=4)


class Growing:
    """A copy of an ended run that shows as much of it as a test lets it."""

    def __init__(self, whole: Store, name: str) -> None:
        self.whole, self.store = whole, open_store(f"memory://{name}")

    def show(self, version: int) -> None:
        """All that was there when every master had had so many rounds."""
        for key in self.whole.list(""):
            if keys.is_master(key):
                at = keys.parse_master(key)[1]
            elif key.startswith(keys.rounds_prefix(0)[:7]):
                at = int(key.split("/")[2])  # the commit of round v vouches for master v
            else:
                at = 5 if key.startswith("close") else 0
            if at <= version:
                self.store.put(key, self.whole.get(key))


@pytest.fixture
def growing(run: Store, request: pytest.FixtureRequest) -> Growing:
    return Growing(run, f"{request.node.name}")


class Following:
    """A follower and what it said."""

    def __init__(self, store: Store, base: Path, folder: Path, patience_s: float = 60.0) -> None:
        self.said: list[str] = []
        self.clock = 0.0
        self.reader = MasterReader(store)
        self.folder = folder
        self.follower = Follower(
            self.reader,
            base,
            DTYPE,
            folder,
            None,
            patience_s=patience_s,
            say=self.said.append,
            now=lambda: self.clock,
        )

    def look(self) -> list[str]:
        """What it said at one look."""
        self.said.clear()
        self.follower.look()
        return list(self.said)

    def assert_holds(self, run: Store, version: int) -> None:
        assert self.follower.version == version
        held = load_file(self.folder / "newest" / "model.safetensors")
        wanted = expected(run, version, torch.bfloat16)
        assert held.keys() == wanted.keys() and all(torch.equal(held[name], wanted[name]) for name in wanted)


@pytest.fixture
def follow(growing: Growing, base: Path, tmp_path: Path) -> Callable[..., Following]:
    return lambda folder="followed", **more: Following(growing.store, base, tmp_path / folder, **more)


def publisher(store: Store, name: str = "publisher") -> Publisher:
    return Publisher(MasterReader(store), DTYPE, name)


def test_by_deltas_it_holds_what_it_holds_by_masters_at_a_fraction_of_the_bytes(growing, follow, run):
    growing.show(1)
    publishing, following = publisher(growing.store), follow()
    assert [(step.base_version, step.version) for step in publishing.tick()] == [(0, 1), (0, 1)]
    masters = [key for index in range(2) for key in growing.store.list(keys.masters_prefix(index))]
    held = sum(len(growing.store.get(key)) for key in masters if keys.parse_master(key)[1] == 1)
    assert f"version 1: whole masters, {held:,} bytes" in following.look()[0]
    for version in (2, 3, 4, 5):
        growing.show(version)
        steps = publishing.tick()
        assert [(step.fragment, step.base_version, step.version) for step in steps] == [
            (0, version - 1, version),
            (1, version - 1, version),
        ]
        (line,) = following.look()
        nbytes = sum(step.nbytes for step in steps)
        assert line.startswith(f"version {version}: 2 deltas, {nbytes:,} bytes")
        following.assert_holds(run, version)
    assert publishing.is_final
    fresh = follow("fresh")
    fresh.look()
    for file in ("model.safetensors", "config.json", "composer-prime.json"):
        assert (following.folder / "newest" / file).read_bytes() == (fresh.folder / "newest" / file).read_bytes()


@pytest.mark.parametrize(("codec", "part"), [("int8", 15), ("topk", 100)])
def test_a_step_of_a_real_run_is_a_small_part_of_its_weights_in_bf16(base, codec, part):
    """The parts were measured on these runs and are asserted with a margin; they depend on the learning rate."""
    store = make_run(f"memory://ratio-{codec}", base, rounds=3, codec=codec)
    growing = Growing(store, f"ratio-{codec}-growing")
    growing.show(0)
    publishing = publisher(growing.store)
    publishing.tick()
    whole = sum(2 * fragment.numel for fragment in MasterReader(store).run.fragments)
    for version in (1, 2, 3):
        growing.show(version)
        steps = publishing.tick()
        nbytes, changed = sum(step.nbytes for step in steps), sum(step.changed for step in steps)
        print(f"{codec} version {version}: {2 * changed / whole:.2%} changed, {whole / nbytes:.1f} x smaller")
        assert changed > 0 and nbytes * part < whole


def test_several_steps_behind_it_chains_them(growing, follow, run):
    growing.show(1)
    publishing, following = publisher(growing.store), follow()
    publishing.tick()
    following.look()
    for version in (2, 3, 4):
        growing.show(version)
        publishing.tick()
    assert following.look()[0].startswith("version 4: 6 deltas")
    following.assert_holds(run, 4)


def damage_payload(store: Store, step: Step) -> None:
    key = keys.export_delta(DTYPE, step.fragment, step.version, step.delta_sha256)
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))


def lose_payload(store: Store, step: Step) -> None:
    store.delete(keys.export_delta(DTYPE, step.fragment, step.version, step.delta_sha256))


def change(store: Store, step: Step, **changes) -> None:
    key = keys.export_step(DTYPE, step.fragment, step.version)
    store.put(key, step.model_copy(update=changes).to_bytes())


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (damage_payload, "isn't what its record by publisher names"),
        (lose_payload, "a delta is gone"),
        (lambda store, step: change(store, step, base_sha256="0" * 64), "no steps lead from version 1 of fragment 1"),
        (lambda store, step: change(store, step, sha256="0" * 64), "doesn't lead to the weights that its record names"),
        (lambda store, step: change(store, step, master_sha256="0" * 64), "names another master than the log"),
        (lambda store, step: change(store, step, version=7), "is the record of another step"),
        (lambda store, step: store.put(keys.export_step(DTYPE, 1, 2), b"{}"), "is no Step"),
    ],
)
def test_a_bad_step_is_named_and_the_masters_are_taken(growing, follow, run, harm, said):
    growing.show(1)
    publishing, following = publisher(growing.store), follow()
    publishing.tick()
    following.look()
    growing.show(2)
    harm(growing.store, publishing.tick()[1])
    (line,) = following.look()
    assert line.startswith("version 2: whole masters") and said in line
    following.assert_holds(run, 2)


def test_a_missing_link_in_the_chain_is_healed_by_the_masters(growing, follow, run):
    growing.show(1)
    publishing, following = publisher(growing.store), follow()
    publishing.tick()
    following.look()
    for version in (2, 3):
        growing.show(version)
        publishing.tick()
    growing.store.delete(keys.export_step(DTYPE, 0, 2))
    (line,) = following.look()
    assert f"{keys.export_step(DTYPE, 0, 2)} isn't there" in line
    following.assert_holds(run, 3)


def test_a_step_that_starts_from_other_weights_than_the_one_before_made_is_refused(growing, follow, run):
    growing.show(1)
    publishing, following = publisher(growing.store), follow()
    publishing.tick()
    following.look()
    growing.show(2)
    before = publishing.tick()[0]
    growing.show(3)
    publishing.tick()
    change(growing.store, before, sha256="1" * 64)
    (line,) = following.look()
    assert "leads to other weights than the step after it starts from" in line
    following.assert_holds(run, 3)


def test_deltas_that_are_late_are_waited_for_and_not_for_ever(growing, follow, run):
    growing.show(1)
    publishing, following = publisher(growing.store), follow(patience_s=30.0)
    publishing.tick()
    following.look()
    growing.show(2)
    publishing.tick()
    following.look()
    growing.show(3)
    following.clock = 100.0
    assert following.look() == [] and following.follower.version == 2
    following.clock = 129.0
    assert following.look() == []
    following.clock = 131.0
    assert following.look()[0].endswith("(no deltas to it for 30 s)")
    following.assert_holds(run, 3)


def test_where_nobody_publishes_the_masters_are_taken_at_once(growing, follow, run):
    growing.show(1)
    following = follow()
    following.look()
    growing.show(2)
    assert following.look()[0].endswith("(no deltas are published)")
    following.assert_holds(run, 2)


def test_a_follower_that_starts_again_goes_on_by_deltas_unless_its_folder_was_touched(growing, follow, run):
    growing.show(1)
    publishing = publisher(growing.store)
    publishing.tick()
    follow().look()
    growing.show(2)
    publishing.tick()
    assert follow().look()[0].startswith("version 2: 2 deltas")
    folders = sorted(one.name for one in follow().folder.iterdir())
    assert folders == ["newest", "version_00000001", "version_00000002"]
    growing.show(3)
    publishing.tick()
    touched = follow().folder / "version_00000002" / "model.safetensors"
    touched.write_bytes(touched.read_bytes()[:-1] + b"\x35")
    again = follow()
    assert "fragment 1 isn't what its record says" in again.said[0] or "fragment 0 isn't" in again.said[0]
    assert again.look()[0].startswith("version 3: 4 deltas")  # from version 1, which is still there
    again.assert_holds(run, 3)
    assert sorted(one.name for one in again.folder.iterdir()) == ["newest", "version_00000001", "version_00000003"]


def test_a_second_publisher_changes_nothing_and_one_that_starts_again_goes_on_with_the_chain(growing, follow, run):
    growing.show(1)
    first, second = publisher(growing.store), publisher(growing.store, "second")
    assert len(first.tick()) == 2 and second.tick() == []
    growing.show(2)
    assert len(first.tick()) == 2
    before = {key: growing.store.get(key) for key in growing.store.list("")}
    assert second.tick() == []
    assert {key: growing.store.get(key) for key in growing.store.list("")} == before
    growing.show(4)
    (step, _) = publisher(growing.store).tick()
    assert (step.base_version, step.version) == (2, 4)


def test_of_two_publishers_with_different_deltas_the_second_leaves_nothing_behind(growing):
    growing.show(1)
    first, late = publisher(growing.store), publisher(growing.store)
    first.tick()
    late.tick()
    growing.show(2)
    first.tick()
    growing.show(3)
    first.tick()
    before = growing.store.list("")
    assert late.tick() == []  # from version 1, where the first one's leads from 2
    assert growing.store.list("") == before


def test_old_steps_go_with_their_deltas(growing, monkeypatch):
    assert KEEP_STEPS > 2
    monkeypatch.setattr("composer_prime.export.publishing.KEEP_STEPS", 2)
    growing.show(1)
    publishing = publisher(growing.store)
    for version in (1, 2, 3, 4):
        growing.show(version)
        publishing.tick()
    for fragment in (0, 1):
        places = [keys.parse_export(key) for key in growing.store.list(keys.exports_prefix(DTYPE))]
        assert [place[2] for place in places if place and place[1] == fragment] == [3, 3, 4, 4]


def test_a_bucket_that_cannot_be_read_is_said_once_and_waited_for(growing, follow, run, monkeypatch):
    growing.show(1)
    following = follow()
    following.look()
    growing.show(2)

    def cut(prefix: str) -> list[str]:
        raise StoreError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr(growing.store, "list", cut)
        assert following.look() == ["the bucket can't be read now, looking again until it can: cut off"]
        assert following.look() == []
    following.look()
    following.assert_holds(run, 2)


def test_a_folder_that_cannot_be_written_ends_it_in_one_line(growing, follow, monkeypatch):
    growing.show(1)
    following = follow()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("composer_prime.export.following.write_folder", full)
    with pytest.raises(SiteError, match="No space left on device"):
        following.look()
    assert following.follower.version is None


def test_another_run_in_its_place_ends_following(growing, follow):
    growing.show(1)
    following = follow()
    following.look()
    manifest = growing.store.get(keys.manifest())
    growing.store.put(keys.manifest(), manifest.replace(b'"run":"run"', b'"run":"new"'))
    with pytest.raises(RunGone, match="holds another run"):
        following.look()
    growing.store.delete(keys.manifest())
    with pytest.raises(RunGone, match="no longer holds"):
        following.look()


def test_a_name_or_dtype_that_is_none_is_refused(growing):
    growing.show(1)
    with pytest.raises(BadInput, match=r"site\.name"):
        Publisher(MasterReader(growing.store), DTYPE, "No Name")
    with pytest.raises(BadInput, match="dtype"):
        Publisher(MasterReader(growing.store), "int8", "publisher")
