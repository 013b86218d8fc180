"""`site.device`: a site on another device than the CPU, here a simulated one, and a device that isn't there."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner

from composer_prime.cli.main import app
from composer_prime.config import load_any
from composer_prime.errors import ConfigError
from composer_prime.sites.embedded.inference.serve import make_engine, make_teacher
from composer_prime.sites.embedded.local_run import model_command
from composer_prime.sites.embedded.model import load_policy
from composer_prime.sites.embedded.ports import claim_port
from composer_prime.sites.embedded.trainer import build as build_trainer
from composer_prime.volunteers.shared_recipe import shared_toml
from tests.architecture import REPOSITORY
from tests.outer.device_claims import Device, Gpu
from tests.outer.late_device.device import Process
from tests.outer.late_device.running import running
from tests.sites.device_claims import SITE_CLAIMS
from tests.sites.letters_site import letters_site
from tests.sites.tiny_folder import save_random_tiny

EMBEDDED = "composer_prime.sites.embedded"
LOCAL = REPOSITORY / "recipes/local"


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    yield from running(tmp_path_factory.mktemp("late_device"))


@pytest.mark.parametrize("claim", SITE_CLAIMS, ids=lambda claim: claim.__name__)
def test_on_the_simulated_device(claim: Callable[[Device], None], late: Process) -> None:
    if (failure := late.failure(claim)) is not None:
        pytest.fail(failure, pytrace=False)


@pytest.mark.gpu
@pytest.mark.parametrize("claim", SITE_CLAIMS, ids=lambda claim: claim.__name__)
def test_on_a_gpu(claim: Callable[[Device], None]) -> None:
    claim(Gpu())


def call(arguments: list[str]) -> None:
    CliRunner().invoke(app, arguments, catch_exceptions=False)


LACKING = "cuda" if not torch.cuda.is_available() else "mps"


@pytest.mark.parametrize(
    "command",
    [
        ("run", str(LOCAL / "two_sites.toml"), "--clean"),
        ("site", str(LOCAL / "two_sites.toml"), "--site", "c"),
        ("ablate", str(LOCAL / "hints.toml"), "--dry-run"),
    ],
    ids=lambda command: command[0],
)
def test_a_device_that_torch_lacks_is_one_line_before_anything_starts(command: tuple[str, ...], tmp_path: Path) -> None:
    earlier = tmp_path / "two-sites" / "recipe.json"
    earlier.parent.mkdir()
    recipe = load_any(Path(command[1]), ["--output_dir", str(tmp_path)])
    earlier.write_text(json.dumps(recipe.to_data()) if command[0] == "site" else "{}")
    with pytest.raises(ConfigError) as refused:
        call([*command, "--output_dir", str(tmp_path), "--site.device", LACKING])
    text = str(refused.value)
    assert text.startswith(
        f'device ("{LACKING}") must be cpu, cuda or mps and one that torch has, and torch {torch.__version__} has cpu'
    )
    assert "install a driver and a torch" in text and "\n" not in text
    assert [*tmp_path.rglob("*")] == [earlier.parent, earlier]


def test_a_teachers_device_that_torch_lacks_is_refused() -> None:
    port = str(claim_port(None, set()))
    with pytest.raises(ConfigError, match="must be cpu, cuda or mps and one that torch has"):
        call(["replay", "teacher", "tiny", "--port", port, "--device", LACKING])


@pytest.mark.parametrize(
    ("recipe", "settings", "reason"),
    [
        ("local/one_site.toml", ["--inference.engine", "vllm"], 'inference.engine "vllm", which generates where'),
        ("cluster/reverse_text.toml", [], 'site.backend "prime-rl", whose GPUs \\[deployment\\] counts: drop the key'),
    ],
)
def test_a_device_is_refused_where_something_else_chooses_it(recipe: str, settings: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=f'site.device \\("cuda"\\) can\'t be set with {reason}'):
        load_any(LOCAL.parent / recipe, ["--site.device", "cuda", *settings])


def test_an_invitation_leaves_the_device_to_each_machine() -> None:
    assert "device" not in shared_toml(load_any(LOCAL / "two_sites.toml", ["--site.device", "cuda"]))


def test_every_model_of_a_site_is_loaded_to_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's, the server's, and that of hints' teacher."""
    loaded: list[str] = []

    def record(folder: Path, device: str = "cpu") -> PreTrainedModel:
        loaded.append(device)
        return load_policy(folder)

    monkeypatch.setattr(f"{EMBEDDED}.model.load_policy", record)
    monkeypatch.setattr(f"{EMBEDDED}.inference.transformers_engine.load_policy", record)
    settings = letters_site(tmp_path, model_dir=save_random_tiny(tmp_path / "model"), site={"device": "cuda"}, hints={})
    build_trainer(settings).close()
    failures: list[BaseException] = []
    fail = failures.append

    async def start_all() -> None:
        for engine in (make_engine(settings, fail), *make_teacher(settings, fail).values()):
            await engine.start()
            await engine.close()

    asyncio.run(start_all())
    assert loaded == ["cuda"] * 3 and not failures
    assert "cuda" in model_command(settings.recipe)
