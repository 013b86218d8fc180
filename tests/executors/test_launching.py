"""From a recipe and options to a launch: names, shards, secrets, and what is refused before anything starts."""

from collections.abc import Callable
from typing import Any

import pytest
from botocore.session import get_session

from composer_prime.bench.seaweed import free_ports
from composer_prime.config.settings import data_shard
from composer_prime.errors import BadInput, ConfigError
from composer_prime.executors import prices
from composer_prime.executors.base import Resources
from composer_prime.executors.open import open_executor
from composer_prime.launch.budget import Limits
from composer_prime.launch.plan import plan_launch
from composer_prime.launch.preflight import bucket_lines, described
from composer_prime.launch.problems import Problems
from composer_prime.store.s3 import bucket_region
from tests.executors.launches import ENVIRONMENT, SECRET, small_plan, small_recipe
from tests.servers import S3Server


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
    assert plan.resources == Resources("H100", 2) and plan.places["a"].image == "mine" and plan.timeout_s == 7200
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
    text = "\n".join(described(plan, Limits(max_usd=6.0), problems, logged_in=False))
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
    on = {site: place.on for site, place in plan.places.items()}
    assert on == {"r0": "modal", "r1": "modal", "r2": "hf-jobs", "r3": "ssh:alice@gpu1", "r4": "ssh:gpu2"}
    assert plan.platforms == ("modal", "hf-jobs", "ssh") and plan.one_of_each == ("r0", "r2", "r3", "r4")
    assert planned(there, on="modal:1,hf-jobs:1").sites == ("a", "b"), "as many as the recipe has"


def test_what_a_platform_can_not_install_it_is_not_given() -> None:
    places = planned(FAR, on="modal:1,hf-jobs:1,ssh:gpu1").places
    assert [place.packages is not None for place in places.values()] == [True, True, False]
    assert [place.linked is not None for place in places.values()] == [False, True, False]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"replicas": 4}, "--on counts 3 sites, and --replicas is 4"), ({"sites": ("a",)}, "and --sites names 1")],
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


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'modal'", name="modal")

    monkeypatch.setattr("composer_prime.executors.open.importlib.import_module", missing)
    with pytest.raises(BadInput, match=r"composer-prime\[modal\]"):
        open_executor("modal")


def test_a_gpus_price_is_per_gpu_and_an_unknown_one_has_none() -> None:
    one, two = (prices.modal_price(Resources("h100", count), cpus=0, memory_gib=0) for count in (1, 2))
    assert one.usd_per_hour == pytest.approx(3.9492) and two.usd_per_hour == pytest.approx(2 * 3.9492)
    assert prices.modal_price(Resources("H1000", 1)).usd_per_hour is None


def test_every_price_list_has_a_source_and_a_date() -> None:
    assert all(table["source"] and len(table["date"]) == len("2026-01-01") for table in prices.table().values())


def test_a_bucket_in_another_region_is_warned_about_before_its_cost() -> None:
    plan = planned({**FAR, "launch": {"region": "eu-west-1"}})
    asked = []
    warning, traffic = bucket_lines(plan, shapes, lambda name: asked.append(name) or "us-east-1")
    assert warning.startswith("warning: the bucket is in us-east-1 and the jobs run in eu-west-1")
    assert "$0.01" in traffic and asked == ["b"]


def test_a_region_that_is_the_jobs_own_is_not_warned_about() -> None:
    plan = planned({**FAR, "launch": {"region": "eu-west-1"}})
    (line,) = bucket_lines(plan, shapes, lambda name: "eu-west-1")
    assert line.startswith("bucket traffic")


def nobody(name: str) -> str:
    raise AssertionError("asked")


@pytest.mark.parametrize(
    ("store", "ask"),
    [("s3://b/r", lambda name: None), ("gs://b/r", nobody), ("hf://buckets/me/b/r", nobody)],
    ids=["s3", "gs", "hf"],
)
def test_a_region_that_can_not_be_compared_is_said(store: str, ask: Callable[[str], str | None]) -> None:
    plan = planned({"outer": {**FAR["outer"], "store": store}, "launch": {"region": "eu-west-1"}})
    said, traffic = bucket_lines(plan, shapes, ask)
    assert said == "launch.region (eu-west-1) isn't compared with the bucket's, which doesn't say where it is"
    assert traffic.startswith("bucket traffic")


def test_nobody_is_asked_for_a_region_without_need() -> None:
    (line,) = bucket_lines(planned(FAR), shapes, nobody)
    assert line.startswith("bucket traffic")


@pytest.mark.s3
def test_a_bucket_says_itself_where_it_is(store_uri: Callable[[str], str], moto: S3Server) -> None:
    store_uri("moto")  # the AWS variables lead there
    client = get_session().create_client("s3", region_name="eu-central-1")
    client.create_bucket(Bucket="far-away", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
    client.close()
    assert bucket_region("far-away") == "eu-central-1"
    assert bucket_region("not-there") is None


def test_a_bucket_that_can_not_be_asked_has_no_known_region(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert bucket_region("nobody-answers") is None


def test_the_buckets_traffic_is_known_beforehand() -> None:
    (line,) = bucket_lines(planned(FAR), shapes)
    assert "0.08 GB in 2 rounds" in line and "$0.01" in line


FAR: dict[str, Any] = {"outer": {"store": "s3://b/r", "codec": "fp32", "fragments": 1}}


def shapes(model: str) -> list[tuple[str, tuple[int, ...]]]:
    assert model == "tiny"
    return [("layers.0.weight", (1000, 5000))]
