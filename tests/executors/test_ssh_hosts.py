"""The hosts file: what it may say, what it is refused for, and which host a job goes to."""

from contextlib import closing
from pathlib import Path

import pytest

from composer_prime.errors import BadInput
from composer_prime.executors.base import JobSpec, Resources
from composer_prime.executors.ssh.executor import SshExecutor
from composer_prime.executors.ssh.hosts import Hop, Host, choose, fitting, parse_jump, read_hosts

FULL = """
[defaults]
user = "ubuntu"
key = "~/.ssh/id_ed25519"
env = { HF_HOME = "/data/hf", OMP_NUM_THREADS = "4" }

[hosts.gpu1]
address = "203.0.113.7"
port = 2222
gpus = 8
slots = 2
gpu = "H100"
env = { OMP_NUM_THREADS = "8" }

[hosts.gpu2]
address = "gpu2.internal"
user = "root"
proxy_jump = "me@bastion.example.com:2200,inner"
"""
HERE = Path("hosts.toml")


def hosts_of(tmp_path: Path, text: str) -> dict[str, Host]:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    return read_hosts(path)


def spec(site: str = "a", **resources: str | int) -> JobSpec:
    return JobSpec("run", site, 1, ("true",), 60, resources=Resources(**resources))  # type: ignore[arg-type]


def test_a_hosts_own_values_win_over_the_defaults_and_variables_are_joined(tmp_path: Path) -> None:
    hosts = hosts_of(tmp_path, FULL)
    assert [hosts[name].user for name in ("gpu1", "gpu2")] == ["ubuntu", "root"]
    assert hosts["gpu1"].env == {"HF_HOME": "/data/hf", "OMP_NUM_THREADS": "8"}
    assert hosts["gpu2"].env == {"HF_HOME": "/data/hf", "OMP_NUM_THREADS": "4"}
    assert hosts["gpu1"].gpus_per_slot == 4 and hosts["gpu2"].slots == 1


def test_the_ssh_command_of_a_host_has_its_port_key_and_jumps(tmp_path: Path) -> None:
    hosts = hosts_of(tmp_path, FULL)
    assert hosts["gpu1"].ssh_command() == "ssh -p 2222 -i '~/.ssh/id_ed25519' ubuntu@203.0.113.7"
    assert hosts["gpu2"].ssh_command().startswith("ssh -J me@bastion.example.com:2200,inner -i ")
    assert hosts["gpu2"].hops == (Hop("bastion.example.com", "me", 2200), Hop("inner"))


@pytest.mark.parametrize(
    ("text", "hops"),
    [
        ("bastion", (Hop("bastion"),)),
        ("me@bastion:22", (Hop("bastion", "me", 22),)),
        ("[2001:db8::1]:2200", (Hop("2001:db8::1", None, 2200),)),
        ("a, b@c", (Hop("a"), Hop("c", "b"))),
    ],
)
def test_a_proxy_jump_reads_as_sshs_does(text: str, hops: tuple[Hop, ...]) -> None:
    assert parse_jump(text) == hops


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[hosts.a", "isn't TOML"),
        ("", r"names no host: add \[hosts.gpu1\]"),
        ("hosts = 3", "names no host"),
        ("defaults = 3\n[hosts.a]\naddress = 'x'", "defaults must be a table"),
        ("[hosts.a]\nuser = 'me'", r"hosts.a lacks address: add it there, or to \[defaults\]"),
        ("[hosts.A_b]\naddress = 'x'", r"a host's name \(A_b\) must be lower-case letters"),
        ("[hosts.a]\naddress = 'x'\nadress = 'y'", "hosts.a.adress isn't a known key: did you mean hosts.a.address"),
        ("[hosts.a]\naddress = 'x'\nport = 0", r"hosts.a.port \(0\) must be at least 1"),
        ("[hosts.a]\naddress = 'x'\nport = '22'", r"hosts.a.port \(22\) must be a whole number"),
        ("[hosts.a]\naddress = 'x'\nslots = 0", r"hosts.a.slots \(0\) must be at least 1"),
        ("[hosts.a]\naddress = 'x'\nslots = 4\ngpus = 2", r"gpus \(2\) must be at least slots \(4\)"),
        ("[hosts.a]\naddress = 'x'\nproxy_jump = 'b:99999'", r"proxy_jump \(b:99999\) must be \[user@\]address"),
        ("[hosts.a]\naddress = 'x'\nproxy_jump = 'b c'", "proxy_jump"),
        ("hosts.a = 3", r"hosts.a \(3\) must be a table"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        hosts_of(tmp_path, text)
    assert str(tmp_path / "hosts.toml") in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere.toml can't be read \(No such file or directory\)"):
        read_hosts(tmp_path / "nowhere.toml")


def test_a_job_goes_where_the_smallest_share_of_slots_is_taken(tmp_path: Path) -> None:
    hosts = hosts_of(tmp_path, FULL)
    assert choose(hosts, {"gpu1": 1, "gpu2": 1}, spec()) == "gpu1"
    assert choose(hosts, {"gpu1": 2, "gpu2": 0}, spec()) == "gpu2"
    assert choose(hosts, {"gpu1": 9}, spec()) == "gpu1", "the one that answered"


def test_the_dry_run_says_where_a_job_goes_as_it_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text(FULL)
    with closing(SshExecutor(tmp_path / "hosts.toml")) as executor:
        described = executor.describe(spec())
    assert "smallest share of its slots taken, or with the site's files:\n  gpu1: ssh -p 2222" in described
    assert "free slot" not in described


def test_equals_are_told_apart_by_the_job_alone_and_not_all_alike() -> None:
    hosts = {name: Host(address=name) for name in ("a", "b", "c", "d")}
    backwards = dict(reversed(hosts.items()))
    chosen = [choose(hosts, dict.fromkeys(hosts, 0), spec(f"s{i}")) for i in range(40)]
    assert chosen == [choose(backwards, dict.fromkeys(hosts, 0), spec(f"s{i}")) for i in range(40)]
    assert set(chosen) == set(hosts)


def test_an_unknown_gpu_is_refused_with_the_nearest_there_is(tmp_path: Path) -> None:
    hosts = hosts_of(tmp_path, FULL)
    with pytest.raises(BadInput, match=r"no host in hosts\.toml has the GPU h100: it knows H100"):
        fitting(hosts, Resources(gpu="h100", gpu_count=1), HERE)
    assert list(fitting(hosts, Resources(gpu="H100", gpu_count=4), HERE)) == ["gpu1"]


def test_more_gpus_than_a_slot_has_are_refused_with_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"needs 5 GPUs, and the most .* is 4 \(gpu1: gpus = 8, slots = 2\)"):
        fitting(hosts_of(tmp_path, FULL), Resources(gpu_count=5), HERE)
