"""What memory a process may have: the machine's, or what a control group leaves of it."""

from pathlib import Path

import pytest

from composer_prime.errors import MachineUnfit
from composer_prime.sites import memory


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `meminfo`, `own` and `groups/` stand for what the kernel says."""
    for name, place in (("MEMINFO", "meminfo"), ("OWN_CGROUP", "own"), ("CGROUPS", "groups")):
        monkeypatch.setattr(memory, name, tmp_path / place)
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    return tmp_path


def limit(file: Path, value: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(value)


def test_what_the_kernel_calls_available_is_free(machine: Path) -> None:
    assert memory.memory()[1] == 4000 * 1024


def test_the_lowest_limit_of_the_own_groups_and_those_above_counts(machine: Path) -> None:
    (machine / "own").write_text("1:cpu:/else\n0::/job/step\n")
    limit(machine / "groups/job/memory.max", "1000\n")
    limit(machine / "groups/job/step/memory.max", "max\n")
    limit(machine / "groups/else/memory.max", "1\n")
    limit(machine / "memory.max", "1\n")
    assert memory.memory() == (1000, 1000)


def test_the_older_kind_of_group_counts_too(machine: Path) -> None:
    (machine / "own").write_text("4:memory:/docker/7\n")
    limit(machine / "groups/memory/memory.limit_in_bytes", "2000\n")
    assert memory.memory() == (2000, 2000)
    limit(machine / "groups/memory/memory.usage_in_bytes", "900\n")
    limit(machine / "groups/memory/memory.stat", "cache 500\ntotal_inactive_file 400\n")
    assert memory.memory() == (2000, 1500)


def test_what_a_group_holds_is_not_free_but_for_files_that_nobody_reads(machine: Path) -> None:
    (machine / "own").write_text("0::/job\n")
    limit(machine / "groups/job/memory.max", "1000\n")
    limit(machine / "groups/job/memory.current", "700\n")
    limit(machine / "groups/job/memory.stat", "anon 500\ninactive_file 200\n")
    assert memory.memory() == (1000, 500)


def test_where_nothing_is_told_all_there_is_counts_and_a_model_is_taken(machine: Path) -> None:
    (machine / "meminfo").unlink()
    total, free = memory.memory()
    assert total == free > 0
    memory.check_memory([1000], momentum=True)


def test_a_model_that_does_not_fit_is_refused_with_need_and_limit(machine: Path) -> None:
    memory.check_memory([68_000], momentum=False)
    memory.check_memory([20_000] * 4, momentum=False)
    with pytest.raises(MachineUnfit, match=r"needs 0\.00 GiB .*80,000 parameters, outer\.fragments 1\), and 0\.00 GiB"):
        memory.check_memory([80_000], momentum=False)
