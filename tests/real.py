"""Real tests start processes or servers, or wait. All others are refused that, so that `make test` stays quick.

A test is real by its own mark `real`, `slow` or `s3`, by its folder or file, by a fixture, or by the kind of store that
it is given; the tables below say so for most. `pytest --quick` leaves them out, but for those of ALWAYS.
"""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

FOLDERS = """
bench
cli: launch launch_elsewhere launch_hostile_bucket replay replay_ask
contracts: executor_contract executor_contract_faults executor_contract_fleet executor_contract_logs
executors: cache_variables dry_run_replica hf_jobs launching modal_deploy modal_jobs model_access
executors: packages prime_rl_jobs proxies redacting run_anywhere shim sky sky_recorded smoke ssh supervisor_job
export: hub server serving vllm
gateway: invitations limits members requests serving several training
infra
integration
integrations: torchft_processes
outer: late_device
servers
sites/prime_rl: launch pairs_env probing settings stamping_env
sites: agreement average chat_templates clean device inference_contract inference_engines inference_process intact
sites: inference_vllm local_run local_run_teachers model monitors orchestrator preflight processes rollouts
sites: spared_weights start supervisor template_renderer waits weights whole_folder whole_weights
sites/tools
store: file_store hf_store lying_servers s3_store transfers
sync: parameters ranks
teachers: pool vllm_teacher
traces/ask: asking batch ceiling database forecast killed lost settings
traces: asking_storm serve
volunteers: behind_gateway caches commands consent doctor fuzz host hostile join join_command
"""
"""Of whose tests every one is real: a folder a line, or a folder and its files without `test_` and `.py`."""
TESTS = """
ablate/test_harm.py::test_a_continued_run_has_its_teacher_where_it_was_or_says_what_to_do
ablate/test_harm.py::test_a_teacher_that_ends_instead_is_told_with_its_last_words
ablate/test_held_out.py::test_weights_of_another_model_are_refused
cli/test_commands.py::test_the_console_script_answers_bad_input_without_a_traceback
cli/test_plan.py::test_the_link_is_an_option_beside_the_overrides
cli/test_verify_and_status.py::test_status_needs_no_torch_and_loads_little
contracts/test_codec_contract.py::test_processes_and_vector_instructions_change_no_byte
contracts/test_store_contract.py::test_of_two_racing_processes_exactly_one_wins
contracts/test_store_contract.py::test_a_writer_killed_by_sigkill_leaves_whole_objects_and_all_that_were_confirmed
envs/test_tiny_policy.py::test_what_is_learned_has_the_tokens_of_a_sites_rollout
executors/test_as_the_recipe_says.py::test_what_can_not_be_checked_is_refused_unless_that_is_said
executors/test_gpu_memory.py::test_the_command_refuses_a_recipe_that_does_not_fit_and_starts_nothing
outer/test_arithmetic.py::test_the_value_is_the_same_in_a_process_with_other_vector_instructions
outer/test_fragments.py::test_a_plan_is_the_same_in_another_process_and_needs_no_torch
simulation/test_planted_bugs.py::test_a_failing_seed_is_shrunk_and_its_command_shows_the_same_violation
simulation/test_simulation.py::test_a_seed_is_the_same_run_in_another_process_that_hashes_otherwise
simulation/test_simulation.py::test_the_page_has_every_cell_of_the_printed_table
sites/prime_rl/test_toml.py::test_a_site_beside_others_gets_every_port_under_the_versions_name
sites/prime_rl/test_toml.py::test_rendering_leaves_the_recipe_as_it_is
sites/prime_rl/test_toml.py::test_weights_and_rollouts_on_disk_need_no_port
sites/prime_rl/test_what_ran.py::test_a_run_writes_its_versions_column_and_leaves_the_others
sites/prime_rl/topk/test_said.py::test_a_loss_that_no_table_is_said_to_imports_nothing_of_it
store/test_gateway_store.py
sync/test_signatures.py::test_neither_torch_nor_cryptography_is_imported_before_a_key_is_used
test_architecture.py::test_help_answers_at_once
test_architecture.py::test_the_light_modules_import_no_torch_also_not_through_others
test_bearer.py::test_every_route_but_health_wants_the_token
test_redaction.py
test_visible.py::test_what_a_command_s_process_prints_by_itself_is_spelled
traces/ask/test_pace.py::test_a_pause_that_is_too_long_stops_the_teacher_at_once
traces/ask/test_pace.py::test_a_server_with_windows_and_no_retry_after_answers_all_and_nothing_is_given_up
traces/ingest/test_oddities.py::test_harbors_converter_is_given_the_session_where_it_looks_for_it
traces/ingest/test_oddities.py::test_what_harbor_can_not_convert_is_refused
traces/ingest/test_store.py::test_a_store_is_sound_after_a_kill_and_the_same_command_finishes_it
traces/pairs/test_shell.py::test_commands_of_one_form_do_the_same_in_bash
"""
"""Real tests in files whose other tests are not."""
FIXTURES = frozenset(
    ["seaweed", "moto", "gcs", "rclone", "faulty", "cued", "scripted", "gateway", "platform", "late", "hub"]
)
"""Fixtures that start processes or servers."""
KINDS = {"seaweed", "moto", "gs", "az", "rclone", "gateway memory", "gateway file"}
"""Parameters that make `store_uri` start a server."""
MARKS = ("real", "slow", "s3")
ALWAYS = """
integration/test_two_sites.py
contracts/test_store_contract.py::test_of_two_racing_processes_exactly_one_wins
contracts/test_store_contract.py::test_a_writer_killed_by_sigkill_leaves_whole_objects_and_all_that_were_confirmed
sites/test_supervisor.py::test_a_supervisor_killed_with_sigkill_leaves_no_process
sites/test_rollouts.py::test_a_rollout_is_rewarded_for_the_answer_the_server_gave
sites/tools/test_state.py
cli/test_launch.py::test_ps_logs_and_cancel_need_the_buckets_uri_alone
executors/test_ssh.py
gateway/test_members.py
traces/ask/test_ceiling.py
volunteers/test_join_command.py
test_architecture.py
"""
"""Real tests that `make test` runs too: a two-site run, S3, a kill -9, a launch, and one of each other kind."""

MOST_SLEEP_S = 0.05

_refusing = False


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="leave out real tests, but for those of tests/real.py's ALWAYS"
    )


def guard() -> None:
    """Put a question before each act that only real tests may do."""
    _guard(
        subprocess.Popen, "__init__", "start a process", lambda _, *given, **named: _command(*given, **named), _counts
    )
    _guard(BaseProcess, "start", "start a process", lambda process: process.name)
    for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp"):
        _guard(os, name, "start a process", lambda *given, **named: given[:2])
    for name, act in (("listen", "serve"), ("connect", "connect"), ("connect_ex", "connect")):
        _guard(socket.socket, name, act, _address)
    _guard(time, "sleep", f"sleep over {MOST_SLEEP_S * 1000:.0f} ms", lambda s: s, lambda s: s > MOST_SLEEP_S)


def _command(*given: Any, **named: Any) -> Any:
    return given[0] if given else named["args"]


def _counts(_: object, *given: Any, **named: Any) -> bool:
    """Not verifiers' own question to git, whose checkout it is, when it builds its first trace."""
    return "rev-parse" not in _command(*given, **named)


def _address(connection: socket.socket, *given: Any) -> object:
    return given[0] if given and not isinstance(given[0], int) else connection.family.name


def _guard(
    owner: Any, name: str, act: str, said: Callable[..., object], applies: Callable[..., bool] = lambda *_, **__: True
) -> None:
    """Make `owner.name` fail the test that calls it, if that one isn't real."""
    original = getattr(owner, name)

    def guarded(*given: Any, **named: Any) -> Any:
        if _refusing and applies(*given, **named):
            what = f"{act} ({said(*given, **named)})"
            pytest.fail(
                f"a test without the mark `real` must not {what}: give it pytest.mark.real, or add its folder, file or "
                "fixture to tests/real.py; make test leaves it to make test-all then"
            )
        return original(*given, **named)

    setattr(owner, name, guarded)


def paths(table: str) -> list[str]:
    """The folders, files and tests, below tests/, that a table's lines stand for."""
    found = []
    for line in table.split("\n"):
        folder, _, files = line.partition(": ")
        found += [f"{folder}/test_{file}.py" for file in files.split()] or [folder] * bool(folder)
    return found


REAL = [*paths(FOLDERS), *paths(TESTS)]


def named(test: str, paths: list[str]) -> bool:
    """Whether a test, by its id, is one of these, or in one."""
    name = test.removeprefix("tests/")
    return any(name.startswith(path) and name[len(path) : len(path) + 1] in ("", "/", ":", "[") for path in paths)


def is_real(item: pytest.Item) -> bool:
    """Whether a test may start processes and servers, and sleep."""
    given = getattr(getattr(item, "callspec", None), "params", {}).values()
    return (
        any(item.get_closest_marker(mark) for mark in MARKS)
        or named(item.nodeid, REAL)
        or not FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
        or any(isinstance(value, str) and value in KINDS for value in given)
    )


@pytest.hookimpl(tryfirst=True)  # before pytest looks for what -m names
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the tables name; with --quick, leave out what is real."""
    for item in items:
        if is_real(item):
            item.add_marker("real")
    if config.getoption("quick"):
        always = paths(ALWAYS)
        left = {item for item in items if item.get_closest_marker("real") and not named(item.nodeid, always)}
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=list(left))


@contextmanager
def refusing(on: bool = True) -> Iterator[None]:
    """Refuse what only real tests may do, to this whole process."""
    global _refusing
    before, _refusing = _refusing, on
    try:
        yield
    finally:
        _refusing = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with refusing(bool(item.config.getoption("quick")) and not is_real(item)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with refusing(bool(item.config.getoption("quick")) and not is_real(item)):
        return (yield)
