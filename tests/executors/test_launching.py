"""From a recipe and options to a launch: names, shards, secrets, and what is refused before anything starts."""

from typing import Any

import pytest

from composer_prime.config.settings import data_shard
from composer_prime.errors import BadInput, ConfigError, Problems
from composer_prime.executors.base import Resources
from composer_prime.executors.modal_deploy import price as modal_price
from composer_prime.executors.packages import UV_IMAGE
from composer_prime.launch.budget import Limits
from composer_prime.launch.plan import plan_launch
from composer_prime.launch.preflight import bucket_lines, described
from composer_prime.launch.records import Launch
from composer_prime.plan import prices
from tests.executors.launches import ENVIRONMENT, SECRET, small_plan, small_recipe


def planned(recipe_tables: dict[str, Any] | None = None, on: str = "local", **options: Any):
    return plan_launch(small_recipe(**(recipe_tables or {})), on, environment=ENVIRONMENT, **options)


def test_sites_have_the_recipes_names_or_count_or_those_given() -> None:
    assert planned().sites == ("a", "b")
    assert planned(replicas=3).sites == ("r0", "r1", "r2")
    assert planned(sites=("left", "right")).sites == ("left", "right")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sites": ("a", "a")}, "must differ"),
        ({"sites": ("a",), "replicas": 2}, "--replicas"),
        ({"sites": ("A",)}, "lower-case"),
        ({"sites": ("a--b",)}, "'--'"),
        ({"secrets": ("NOT_SET",)}, "export NOT_SET"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_can_not_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        planned(**options)


def test_every_replica_trains_on_a_shard_of_its_own() -> None:
    recipe = planned(replicas=3).recipe
    assert [data_shard(recipe, site) for site in ("r0", "r1", "r2")] == [0, 1, 2]  # type: ignore[arg-type]


def test_secrets_are_taken_by_name_and_a_machine_as_the_table_says() -> None:
    table = {"gpu": "H100", "gpu_count": 2, "image": "mine", "timeout_hours": 2.0, "secrets": ["UNRELATED"]}
    plan = planned({"launch": table}, on="modal")
    assert list(plan.secrets) == ["HF_TOKEN", "UNRELATED"]
    assert plan.resources == Resources("H100", 2) and plan.recipe.launch.image == "mine" and plan.timeout_s == 7200
    assert SECRET not in repr(plan) and SECRET not in plan.recipe_text


def test_without_a_gpu_none_is_asked_for() -> None:
    assert planned().resources == Resources()


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"outer": {"store": "/tmp/folder"}}, "s3://"),
        ({"outer": {}}, "s3://"),
        ({"site": {"key_file": "/tmp/key"}}, "key_file"),
        ({"model": {"name": "/tmp"}}, "Hugging Face model"),
    ],
    ids=["folder", "unnamed", "key", "model"],
)
def test_what_only_this_machine_has_is_refused_elsewhere(tables: dict[str, Any], said: str) -> None:
    assert planned(tables).sites
    with pytest.raises(BadInput, match=said):
        planned(tables, on="modal")


def test_a_recipe_whose_sites_could_not_meet_is_refused() -> None:
    recipe = small_recipe().model_copy(update={"outer": None})
    with pytest.raises(BadInput, match=r"\[outer\]"):
        plan_launch(recipe, "local", environment=ENVIRONMENT)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"secrets": ["HF_TOKEN=hf_abc"]}, "names of environment variables"),
        ({"caches": {"weights": "relative"}}, "absolute path"),
        ({"timeout_hours": 0}, "timeout_hours"),
        ({"gpus": 1}, "gpu"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_launch_table_is_checked_as_every_table(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        small_recipe(launch=table)


def test_a_dry_run_says_what_it_would_start_and_cost_and_no_secret() -> None:
    plan, problems = small_plan(replicas=2, usd_per_hour=1.5), Problems()
    text = "\n".join(described(plan, Limits(max_usd=6.0), problems, dry_run=True))
    problems.check()
    assert "replica s3://bucket/runs/small --launch 1 --site r0 --attempt 1" in text and "--site r1" in text
    assert "$3.00 an hour" in text and "ends by itself after 1.99 h" in text
    assert "HF_TOKEN" in text and SECRET not in text


# --- platforms and prices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("moon", "'moon' is no platform: use local, modal"),
        ("modl", "did you mean modal"),
        ("ssh", "names no host: write ssh:"),
        ("ssh:", "names no host"),
        ("local:x", "local must be followed by a number"),
        ("modal:0", "a number of sites, 1 to 64"),
        ("modal,hf-jobs:2", "doesn't say how many sites modal gets"),
        ("modal:1,modal:2", "names modal twice"),
        ("ssh:a,ssh:a", "names ssh:a twice"),
        ("local:1,modal:1", "mixes this machine with others"),
    ],
)
def test_platforms_that_can_not_be_are_refused(option: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        planned(on=option)


def test_a_site_of_a_launch_is_on_the_platform_that_its_turn_gives_it() -> None:
    there = {**FAR, "launch": {"image": "any"}}
    plan = planned(there, on="modal:2,hf-jobs:1,ssh:alice@gpu1,ssh:gpu2")
    assert plan.places == {"r0": "modal", "r1": "modal", "r2": "hf-jobs", "r3": "ssh:alice@gpu1", "r4": "ssh:gpu2"}
    assert plan.platforms == ("modal", "hf-jobs", "ssh")
    assert planned(there, on="modal:1,hf-jobs:1").sites == ("a", "b"), "as many as the recipe has"


def test_what_a_platform_can_not_install_it_is_not_given() -> None:
    plan = planned(FAR, on="modal:1,hf-jobs:1,ssh:gpu1")
    specs = [plan.spec(Launch(number=1, name="small-00000000"), site, 1) for site in plan.sites]
    assert [spec.packages is not None for spec in specs] == [True, True, False]
    assert [spec.image for spec in specs] == [UV_IMAGE, UV_IMAGE, None]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"replicas": 4}, "--replicas says 4, and --on says 3"), ({"sites": ("a",)}, "--sites says 1, and --on says 3")],
)
def test_counts_that_do_not_agree_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        planned(FAR, on="modal:2,hf-jobs:1", **options)


def test_all_that_is_wrong_is_said_at_once_a_line_each() -> None:
    tables = {"outer": {"store": "/tmp/folder"}, "model": {"name": "/tmp"}}
    with pytest.raises(BadInput) as refused:
        planned(tables, on="modal", sites=("a", "a"), secrets=("NOT_SET",))
    said = str(refused.value).splitlines()
    expected = ("--sites", "outer.store", "model.name", "secret NOT_SET")
    assert len(said) == 4 and all(line.startswith(word) for line, word in zip(said, expected, strict=True))


def test_a_gpus_price_is_per_gpu_and_an_unknown_one_is_refused() -> None:
    one, two = (modal_price(Resources("h100", count, cpus=0, memory_gib=0)) for count in (1, 2))
    assert one.usd_per_hour == pytest.approx(3.9492) and two.usd_per_hour == pytest.approx(2 * 3.9492)
    with pytest.raises(BadInput, match="Modal has no GPU 'H1000'"):
        modal_price(Resources("H1000", 1))


def test_every_price_list_has_a_source_and_a_date() -> None:
    assert all(table["source"] and len(table["date"]) == len("2026-01-01") for table in prices.TABLE.values())


def test_the_buckets_traffic_is_known_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_prime.launch.preflight.named_shapes", lambda model: [("w", (1000, 5000))])
    (line,) = bucket_lines(planned(FAR))
    assert "0.08 GB in 2 rounds" in line and "$0.01" in line


FAR: dict[str, Any] = {"outer": {"store": "s3://b/r", "codec": "fp32", "fragments": 1}}
