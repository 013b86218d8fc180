"""What the Modal executor deploys, where secrets and files go, and how a call's output is read."""

import sys
from dataclasses import replace

import pytest

from composer_prime.errors import BadInput
from composer_prime.executors.base import JobState, Resources, Secrets
from composer_prime.executors.packages import CUDA_IMAGE, CUDA_VARIABLES, UV_IMAGE, Packages

pytest.importorskip("modal")
from tests.executors import loopback_modal_fixtures as fixtures
from tests.executors import stock_image
from tests.executors.loopback_modal_fixtures import SLEEP, wait_for
from tests.executors.loopback_modal_servicer import BAD_IMAGE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the loopback finds a container's processes in /proc")
platform, executor, spec, handmade = fixtures.platform, fixtures.executor, fixtures.spec, stock_image.handmade


# What is deployed


def test_jobs_of_the_same_settings_share_an_app_and_others_do_not(platform, executor, spec):
    specs = [
        spec,
        replace(spec, site="b", env={"X": "1"}),
        replace(spec, site="c", timeout_s=90),
        replace(spec, site="d", secrets=Secrets({"TOKEN": "first-value"})),
        replace(spec, site="e", secrets=Secrets({"TOKEN": "other-value"})),
    ]
    jobs = [executor.submit(each) for each in specs]
    functions = [platform.calls(job)[0].function_id for job in jobs]
    assert functions[0] == functions[1]
    assert len(set(functions)) == 4
    for job in jobs:
        assert wait_for(executor, job).state is JobState.SUCCEEDED


def test_without_an_image_a_stock_one_is_built_once_with_what_this_machine_has(platform, executor, spec, handmade):
    code = f"import {handmade}; print({handmade}.ANSWER)"
    installs = replace(spec, image=UV_IMAGE, packages=Packages((handmade,)), command=("python3", "-c", code))
    assert f"installs {handmade} 1.0 of this machine" in executor.describe(installs)
    jobs = [executor.submit(replace(installs, site=site)) for site in "ab"]
    for job in jobs:
        assert wait_for(executor, job).state is JobState.SUCCEEDED
        assert list(executor.logs(job)) == ["42"]
    first, second = (platform.calls(job)[0].function_id for job in jobs)
    assert first == second
    assert platform.calls(executor.submit(replace(spec, site="c")))[0].function_id != first
    on_gpu = executor.submit(replace(installs, site="d", resources=Resources("T4", 1)))
    assert wait_for(executor, on_gpu).state is JobState.SUCCEEDED
    without, with_gpu = (line for line in platform.servicer.built if "uv pip install" in line)
    assert "--torch-backend cpu" in without and "torch-backend" not in with_gpu, "built where no GPU is, for one"


def test_prime_rl_is_installed_before_our_packages_come_so_that_an_image_of_others_begins_alike(
    platform, executor, spec, handmade
):
    packages, known = Packages((handmade,), prime_rl="559b447"), len(platform.servicer.built)
    executor.submit(replace(spec, image=packages.image, packages=packages))
    first, *rest = (line for line in platform.servicer.built[known:] if line.strip() and line != "FROM base")
    prepared = [f"RUN {command}" for command in packages.preparation]
    prepared += [f"ENV {name}={value}" for name, value in CUDA_VARIABLES.items()]
    assert first == f"FROM {CUDA_IMAGE}" and rest[: len(prepared)] == prepared
    copied, ours, *_ = rest[len(prepared) :]
    assert copied.startswith("COPY ") and "uv pip install" in ours


def test_the_container_gets_our_one_file_and_not_our_package(platform, executor, spec):
    (call,) = platform.calls(executor.submit(spec))
    function = platform.servicer.functions[call.function_id]
    assert list(function.files) == ["/root/modal_job_body.py"]
    assert function.definition.module_name == "modal_job_body"
    assert not function.definition.function_serialized


def test_the_function_ends_with_its_job_and_is_never_retried(platform, executor, spec):
    resources = replace(spec.resources, gpu="h100", gpu_count=2, cpus=4, memory_gib=16, disk_gib=1000)
    (call,) = platform.calls(executor.submit(replace(spec, resources=resources, timeout_s=7200)))
    definition = platform.servicer.functions[call.function_id].definition
    assert definition.timeout_secs == 7260
    assert definition.startup_timeout_secs == 1800
    assert definition.single_use_containers
    assert definition.retry_policy.retries == 0
    assert (definition.resources.gpu_config.gpu_type, definition.resources.gpu_config.count) == ("H100", 2)
    assert (definition.resources.milli_cpu, definition.resources.memory_mb) == (4000, 16 * 1024)
    assert definition.resources.ephemeral_disk_mb == 1000 * 1024


def test_what_is_reserved_is_the_limit_too_so_that_nothing_beyond_it_is_billed(platform, executor, spec):
    resources = replace(spec.resources, cpus=0.5, memory_gib=0.5)
    (call,) = platform.calls(executor.submit(replace(spec, resources=resources)))
    given = platform.servicer.functions[call.function_id].definition.resources
    assert (given.milli_cpu_max, given.memory_mb_max) == (500, 512)


def test_secrets_are_in_modals_secret_and_nowhere_else(platform, executor, spec, caplog):
    value = "correct-horse-battery"
    program = "import os; print(os.environ['TOKEN'][:7])"
    spec = replace(spec, command=(sys.executable, "-c", program), secrets=Secrets({"TOKEN": value}))
    with caplog.at_level("DEBUG"):
        assert value not in executor.describe(spec)
        job = executor.submit(spec)
        status = wait_for(executor, job)
    assert list(executor.logs(job)) == ["correct"]
    (call,) = platform.calls(job)
    entries = [piece for entries in platform.servicer._dicts.values() for pair in entries.items() for piece in pair]
    seen = [call.input.SerializeToString(), *entries]
    seen.append(platform.servicer.functions[call.function_id].definition.SerializeToString())
    assert not [text for text in seen if value.encode() in text]
    assert value not in caplog.text + repr(job) + repr(status) + "".join(platform.servicer._apps)


def test_a_job_stands_where_it_is_told_to_on_the_first_gpu_that_is_free(platform, executor, spec):
    placed = replace(spec, resources=Resources("H100,A100-80GB", 1, region="eu-west", cloud="aws"))
    described = executor.describe(placed)
    assert "gpu ['H100', 'A100-80GB'], region eu-west, cloud aws" in described
    (call,) = platform.calls(executor.submit(placed))
    definition = platform.servicer.functions[call.function_id].definition
    assert platform.servicer.ranks[call.function_id] == ["H100", "A100-80GB"]
    assert list(definition.scheduler_placement.regions) == ["eu-west"]
    assert definition.cloud_provider_str == "aws"
    (call,) = platform.calls(executor.submit(replace(spec, site="b", resources=Resources(nonpreemptible=True))))
    definition = platform.servicer.functions[call.function_id].definition
    assert definition.scheduler_placement.nonpreemptible


def test_an_image_of_a_private_registry_is_pulled_with_the_secret_that_is_named(platform, executor, spec):
    private = replace(spec, image="ghcr.io/me/private:1", registry_secret="my-registry")
    assert "ghcr.io/me/private:1 (with the secret my-registry)" in executor.describe(private)
    executor.submit(private)
    assert platform.servicer.registries == {"FROM ghcr.io/me/private:1": "my-registry"}


def test_an_image_that_can_not_be_built_is_refused_and_leaves_no_job(executor, spec):
    with pytest.raises(BadInput, match=r"Modal refuses it \(.*no such image.*\): check the image's name"):
        executor.submit(replace(spec, image=f"{BAD_IMAGE}/nothing:1"))
    assert executor.find(spec.run) == []


def test_a_refused_token_is_one_clear_line(platform, spec, monkeypatch):
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-wrong")
    executor = platform.executor()
    with pytest.raises(BadInput, match=r"Modal refuses it \(Token .*: run `modal token set`, or set MODAL_TOKEN_ID"):
        executor.submit(spec)


# Logs


def test_the_same_line_twice_is_two_lines_and_errors_are_among_them(executor, spec):
    program = (
        "import sys, time\n"
        "for n in range(3):\n"
        "    print('same', flush=True); print('wrong', file=sys.stderr, flush=True); time.sleep(0.7)"
    )
    job = executor.submit(replace(spec, command=(sys.executable, "-c", program)))
    assert list(executor.logs(job, follow=True)) == ["same", "wrong"] * 3


def test_an_entry_that_arrives_late_is_not_missed(platform, executor, spec):
    job = executor.submit(replace(spec, command=SLEEP))
    lines = executor.logs(job, follow=True)
    assert next(lines) == "up"
    (call,) = platform.calls(job)
    late = type(call.log[0])()
    late.CopyFrom(call.log[0])
    late.data = "late\n"
    call.log.append(late)
    assert next(lines) == "late"
    executor.cancel(job)
    assert list(lines) == []
