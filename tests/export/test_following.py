"""A follower holds what the masters are, and says so once when it can't have them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from composer_prime.config.outer import OuterConfig
from composer_prime.errors import RunGone, SiteError, StoreError
from composer_prime.export.following import Follower
from composer_prime.export.reading import MasterReader
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

    def __init__(self, store: Store, base: Path, folder: Path) -> None:
        self.said: list[str] = []
        self.folder = folder
        self.follower = Follower(MasterReader(store), base, DTYPE, folder, None, say=self.said.append)

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
    return lambda folder="followed": Following(growing.store, base, tmp_path / folder)


def test_it_holds_each_new_version_and_says_what_it_cost(growing, follow, run):
    growing.show(0)
    following = follow()
    for version in (1, 2, 4, 5):
        growing.show(version)
        held = [key for index in range(2) for key in growing.store.list(keys.masters_prefix(index))]
        nbytes = sum(len(growing.store.get(key)) for key in held if keys.parse_master(key)[1] == version)
        assert following.look() == [f"version {version}: {nbytes:,} bytes fetched"]
        assert following.look() == []
        following.assert_holds(run, version)
    assert sorted(one.name for one in following.folder.iterdir()) == ["newest", "version_00000004", "version_00000005"]


def test_at_the_default_settings_a_follower_fetches_less_than_a_byte_a_parameter_a_round(base):
    settings = {name: OuterConfig.model_fields[name].default for name in ("momentum", "codec", "snapshot_rounds")}
    reader = MasterReader(make_run("memory://cost", base, rounds=8, inner_steps=8, **settings))
    num_parameters = sum(fragment.numel for fragment in reader.run.fragments)
    a_round = (reader.nbytes(4) + reader.nbytes(8)) / num_parameters / 8
    print(f"{a_round:.2f} bytes a parameter a round")
    assert 0 < a_round < 1


def test_a_follower_that_starts_again_goes_on_from_its_folder_unless_that_was_touched(growing, follow, run):
    growing.show(1)
    follow().look()
    growing.show(2)
    follow().look()
    assert follow().look() == []
    touched = follow().folder / "version_00000002" / "model.safetensors"
    touched.write_bytes(touched.read_bytes()[:-1] + b"\x35")
    again = follow()
    assert "isn't what its record says" in again.said[0] and again.follower.version == 1
    assert again.look()[0].startswith("version 2: ")
    again.assert_holds(run, 2)


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
