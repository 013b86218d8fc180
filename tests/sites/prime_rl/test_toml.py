"""What PRIME-RL is given to read: the recipe's own settings untouched, ours added, in the installed version's keys."""

import json
from pathlib import Path
from typing import Any

import pytest

from composer_prime.errors import ConfigError
from composer_prime.sites.embedded.folder import flat
from composer_prime.sites.prime_rl.placement import Ports
from composer_prime.sites.prime_rl.toml import LOSS_PATH, VERSIONS, SiteFiles, render
from tests.sites.prime_rl.recipes import minimal, prime_recipe

FOLDER = Path("/runs/test/sites/b")


def rendered(version: str, files: SiteFiles | None = None, **tables: Any) -> dict[str, Any]:
    """One site's rendering, by dotted name."""
    return flat(render(prime_recipe(**tables), version, files or SiteFiles("b", FOLDER)))


def test_the_newest_version_gets_the_recipe_as_it_stands_and_our_keys() -> None:
    ours = flat(render(prime_recipe(), "559b447", SiteFiles("b", FOLDER)))
    upstream = {key: value for key, value in minimal().items() if key not in ("run", "site", "outer", "inference")}
    assert upstream.items() <= {**ours, **upstream}.items()
    assert flat(upstream).items() <= ours.items()
    assert ours.keys() - flat(upstream).keys() == {
        "output_dir", "run.name", "run.dir", "trainer.loss.type", "trainer.loss.import_path", "inference.vllm.seed",
        "inference.server.host",
        "trainer.env_vars.COMPOSER_PRIME_OUTER", "trainer.env_vars.COMPOSER_PRIME_SITE",
    }  # fmt: skip
    assert (ours["trainer.loss.type"], ours["trainer.loss.import_path"]) == ("custom", LOSS_PATH)
    assert (ours["output_dir"], ours["run.name"], ours["run.dir"]) == (str(FOLDER), "test-b", "prime-rl")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_trainer_learns_its_run_and_site_and_no_credentials(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    outer = {"inner_steps": 10, "fragments": 2, "store": "s3://bucket/runs"}
    site = {"backend": "prime-rl", "key_file": "keys/b.key", "same_name": "refuse", "max_mbit_down": 12.5}
    data = render(prime_recipe(outer=outer, site=site), version, SiteFiles("b", FOLDER))
    assert data["trainer"]["env_vars"] == {
        "COMPOSER_PRIME_OUTER": "s3://bucket/runs/test",
        "COMPOSER_PRIME_SITE": "b",
        "COMPOSER_PRIME_KEY": str(Path("keys/b.key").absolute()),
        "COMPOSER_PRIME_SAME_NAME": "refuse",
        "COMPOSER_PRIME_MAX_MBIT_DOWN": "12.5",
    }
    assert "hush-hush" not in json.dumps(data)


@pytest.mark.parametrize("version", VERSIONS)
def test_without_an_outer_loop_the_trainer_learns_of_none(version: str) -> None:
    assert not any("COMPOSER_PRIME" in name or name.endswith("seed") for name in rendered(version, outer=None))


def test_sites_sample_with_seeds_of_their_own_unless_the_recipe_has_one() -> None:
    seeds = {site: rendered("559b447", SiteFiles(site, FOLDER))["inference.vllm.seed"] for site in "abc"}
    assert len(set(seeds.values())) == 3 and all(0 <= seed < 2**31 for seed in seeds.values())
    assert rendered("559b447", inference={"vllm": {"seed": 7}})["inference.vllm.seed"] == 7
    assert rendered("0.8.0")["inference.seed"] == seeds["b"]


@pytest.mark.parametrize(
    ("version", "fresh", "resumed", "cleaned"),
    [
        ("559b447", {}, {"resume": {"step": 4}}, {"clean": True}),
        ("0.8.0", {}, {"ckpt.resume_step": 4}, {"clean_output_dir": True}),
    ],
)
def test_going_on_is_said_in_each_versions_words(
    version: str, fresh: dict[str, Any], resumed: dict[str, Any], cleaned: dict[str, Any]
) -> None:
    words = ("resume", "clean", "clean_output_dir", "ckpt.resume_step")

    def said(*, resume: int | None = None, clean: bool = False) -> dict[str, Any]:
        data = render(prime_recipe(), version, SiteFiles("b", FOLDER, resume, clean))
        return {name: value for name, value in {**flat(data), **data}.items() if name in words}

    assert (said(), said(resume=4), said(clean=True)) == (fresh, resumed, cleaned)


def test_an_older_version_gets_a_folder_for_every_site() -> None:
    data = rendered("0.8.0", monitors={"wandb": {"project": "p"}})
    assert data["output_dir"] == str(FOLDER / "prime-rl") and "run.name" not in data
    assert (data["wandb.project"], data["wandb.name"]) == ("p", "test-b")
    assert not any(name.startswith("monitors") for name in data)


VLLM = {
    "max_model_len": 4096, "tensor_parallel_size": 2, "data_parallel_size": 4, "gpu_memory_utilization": 0.8,
    "enable_return_routed_experts": True, "max_num_seqs": 64,
}  # fmt: skip


def test_vllms_arguments_go_where_an_older_version_looks_for_them() -> None:
    data = rendered("0.8.0", inference={"vllm": VLLM})
    assert not any(name.startswith("inference.vllm.") for name in data)
    inference = {name: value for name, value in data.items() if name.startswith("inference.")}
    assert {name.removeprefix("inference."): value for name, value in inference.items()} == {
        "model.max_model_len": 4096, "parallel.tp": 2, "parallel.dp": 4, "gpu_memory_utilization": 0.8,
        "enable_return_routed_experts": True, "vllm_extra.max_num_seqs": 64, "seed": data["inference.seed"],
        "server.host": "127.0.0.1",
    }  # fmt: skip


def test_tasksets_bear_the_names_they_had() -> None:
    def taskset(version: str) -> str:
        source = render(prime_recipe(), version, SiteFiles("b", FOLDER))["orchestrator"]["train"]["source"][0]
        return source["env"]["taskset"]["id"]

    assert (taskset("0.8.0"), taskset("559b447")) == ("reverse-text-v1", "reverse-text")


def test_one_number_of_rollouts_in_flight_has_two_names() -> None:
    data = minimal()
    data["orchestrator"]["concurrency"] = {"max_inflight": 96}
    names = {version: {k for k, v in rendered(version, **data).items() if v == 96} for version in VERSIONS}
    assert names == {
        "0.8.0": {"orchestrator.max_inflight_episodes"},
        "559b447": {"orchestrator.concurrency.max_inflight"},
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cleared_setting_stays_cleared(version: str) -> None:
    trainer = {"optim": {"max_norm": "None"}, "model": {"ac": "None"}}
    data = rendered(version, trainer=trainer)
    assert (data["trainer.optim.max_norm"], data["trainer.model.ac"]) == ("None", "None")


@pytest.mark.parametrize(
    ("version", "tables", "message"),
    [
        (
            "0.8.0",
            {"monitors": {"other": 1}},
            "PRIME-RL 0.8.0 has no monitors.other: drop the key, or install a newer one",
        ),
        (
            "0.8.0",
            {"orchestrator": {"concurrency": {"min_inflight": 4}}},
            "PRIME-RL 0.8.0 has no orchestrator.concurrency.min_inflight: drop the key, or install a newer one",
        ),
        (
            "0.8.0",
            {"orchestrator": {"train": {"filter_zero_advantages": False}}},
            "PRIME-RL 0.8.0 has no orchestrator.train.filter_zero_advantages = false: drop the key, or "
            "install a newer one",
        ),
    ],
)
def test_what_a_version_has_no_key_for_is_refused(version: str, tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rendered(version, **tables)
    assert str(raised.value) == message


PORT_NAMES = {
    "0.8.0": {
        "inference.server.port": 12200, "inference.backend_port": 12300, "inference.data_parallel_rpc_port": 12230,
        "weight_broadcast.port": 12210, "rollout_transport.port": 12220, "orchestrator.env_server_base_port": 12240,
        "orchestrator.model.client.base_url": ["http://localhost:12200/v1"],
    },
    "559b447": {
        "inference.server.port": 12200, "inference.backend_port": 12300, "inference.vllm.data_parallel_rpc_port": 12230,
        "weight_broadcast.port": 12210, "rollout_transport.port": 12220, "orchestrator.env_server_base_port": 12240,
        "orchestrator.model.client.base_url": "http://localhost:12200/v1",
    },
}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_a_site_beside_others_gets_every_port_under_the_versions_name(version: str) -> None:
    data = rendered(version, SiteFiles("b", FOLDER, ports=Ports.starting_at(12200)))
    found = {name: value for name, value in data.items() if name.endswith((".port", "_port", "base_url"))}
    assert found == PORT_NAMES[version]


def test_weights_and_rollouts_on_disk_need_no_port() -> None:
    tables = {"weight_broadcast": {"type": "filesystem"}, "rollout_transport": {"type": "filesystem"}}
    data = rendered("559b447", SiteFiles("b", FOLDER, ports=Ports.starting_at(12200)), **tables)
    assert not {"weight_broadcast.port", "rollout_transport.port"} & data.keys()
    trainer = {"model": {"lora": {"rank": 8}}}
    assert "weight_broadcast.port" not in rendered(
        "559b447", SiteFiles("b", FOLDER, ports=Ports.starting_at(12200)), trainer=trainer
    )


def test_rendering_leaves_the_recipe_as_it_is() -> None:
    recipe = prime_recipe(inference={"vllm": VLLM})
    before = json.dumps(recipe.to_data())
    for version in VERSIONS:
        render(recipe, version, SiteFiles("b", FOLDER, ports=Ports.starting_at(12200)))
    assert json.dumps(recipe.to_data()) == before


@pytest.mark.parametrize("version", VERSIONS)
def test_a_site_on_one_machine_listens_on_loopback_and_one_on_several_as_upstream_does(version: str) -> None:
    server = {"metrics_server": {"port": 9000}}
    local = rendered(version, trainer=server)
    assert (local["inference.server.host"], local["trainer.metrics_server.host"]) == ("127.0.0.1", "127.0.0.1")
    chosen = rendered(version, inference={"server": {"host": "10.1.2.3"}})
    assert chosen["inference.server.host"] == "10.1.2.3"
    several = rendered(version, deployment={"type": "multi_node", "num_infer_nodes": 2})
    assert "inference.server.host" not in several
