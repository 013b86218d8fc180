"""The hook in a stand-in trainer with upstream's order of calls: real processes, real ranks, a bucket in a folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from composer_prime.store import open_store
from composer_prime.sync.verifying import Verifier
from tests.patience import wait_until
from tests.sites.prime_rl.comparing import assert_same
from tests.sites.prime_rl.launched import HOOKED, OWN, PLAIN, WRAPPED, announced, outer_env
from tests.sites.prime_rl.standin_runs import Trainer, site
from tests.sites.prime_rl.turns import assert_turns_left_out

pytestmark = pytest.mark.slow


def result(trainer: Trainer) -> dict[str, Any]:
    return json.loads((trainer.folder / "outer" / "result.json").read_text())


def metrics(trainer: Trainer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]


def masters(trainer: Trainer) -> list[dict[str, Any]]:
    return result(trainer)["masters"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A site that has trained a run of its own to the end, undisturbed."""
    folder = tmp_path_factory.mktemp("alone")
    trainer = site(folder, "a", announced(folder / "bucket")).start()
    trainer.finish()
    return trainer


def test_sites_of_one_and_two_ranks_end_with_the_same_masters_and_weights(tmp_path: Path) -> None:
    uri = announced(tmp_path / "bucket", fragments=2, sync_delay=1, codec="int8", quorum=2)
    first, second = site(tmp_path, "a", uri).start(), site(tmp_path, "b", uri, num_ranks=2).start()
    outputs = first.finish(), second.finish()
    assert "joined" in outputs[0] and "joined" in outputs[1]
    assert masters(first) == masters(second)
    assert [one["version"] for one in masters(first)] == [3, 3]
    assert_same(first.broadcast(8), second.broadcast(8))
    with pytest.raises(AssertionError):
        assert_same(first.broadcast(3), second.broadcast(3))
    verifier = Verifier(open_store(uri))
    assert verifier.is_closed
    verifier.check(0, lambda version: None)


def test_a_checkpoint_resumes_at_another_number_of_ranks(tmp_path: Path) -> None:
    uri = announced(tmp_path / "bucket", rounds=3)
    trainer = site(tmp_path, "a", uri, num_ranks=2).start()
    assert "max_steps is reached" in trainer.finish()
    trainer.start(resume=8, max_steps=12).finish()
    assert [one["version"] for one in masters(trainer)] == [4]


def test_a_late_site_starts_from_the_masters_before_its_first_broadcast(alone: Trainer, tmp_path: Path) -> None:
    uri = announced(tmp_path / "bucket", rounds=3)
    first = site(tmp_path, "a", uri).start()
    first.finish()
    late = site(tmp_path, "c", uri, model={"seed": 7}).start()
    output = late.finish()
    assert_same(late.broadcast(0), first.broadcast(8))
    assert "run_ended" in output
    assert_same(late.broadcast(8), late.broadcast(4))
    assert [one["version"] for one in masters(late)] == [4]
    assert [result(one)["steps_left"] for one in (alone, late)] == [False, True]


def test_without_an_outer_run_nothing_is_touched(tmp_path: Path) -> None:
    stock = Trainer(tmp_path / "stock", config={"loss": {"import_path": PLAIN}}).start()
    hooked = Trainer(tmp_path / "hooked", config={"loss": {"import_path": HOOKED}}).start()
    stock.finish()
    hooked.finish()
    for step in range(9):
        assert_same(stock.broadcast(step), hooked.broadcast(step))
    assert not (hooked.folder / "outer").exists() and not (hooked.folder / "metrics.jsonl").exists()
    files = [sorted(path.name for path in one.folder.rglob("*")) for one in (stock, hooked)]
    assert files[0] == files[1]


def test_only_adapters_travel_where_only_adapters_train(tmp_path: Path) -> None:
    uri = announced(tmp_path / "bucket")
    trainer = site(tmp_path, "a", uri, model={"adapters_only": True}).start()
    trainer.finish()
    names = [parameter.name for parameter in Verifier(open_store(uri)).run.manifest.parameters]
    assert names and all("layers" in name for name in names)


def test_a_run_that_has_ended_is_refused(alone: Trainer, tmp_path: Path) -> None:
    uri = alone.env["COMPOSER_PRIME_OUTER"]
    late = site(tmp_path, "b", uri).start()
    code, output = late.wait()
    assert code == 2 and "has ended" in output and "create RECIPE --from" in output
    assert not (late.folder / "broadcasts").exists()


def test_resuming_in_another_run_is_refused_in_one_line(alone: Trainer, tmp_path: Path) -> None:
    other = announced(tmp_path / "bucket", inner_steps=2)
    site(tmp_path, "x", other).start().finish()
    moved = Trainer(alone.folder, 1, alone.env | {"COMPOSER_PRIME_OUTER": other}, config=alone.config)
    before = alone.broadcast(4)
    code, output = moved.start(resume=4).wait()
    lines = [line for line in output.splitlines() if line.startswith("composer-prime: ")]
    assert code == 2 and len(lines) == 1
    assert f"belongs to another run, 'run', than {other}: " in lines[0] and "create RECIPE --from" in lines[0]
    assert_same(alone.broadcast(4), before)


def test_another_layout_of_the_weights_is_refused_with_the_difference(alone: Trainer, tmp_path: Path) -> None:
    fresh = announced(tmp_path / "bucket")
    site(tmp_path, "a", fresh, max_steps=4).start().finish()
    code, output = site(tmp_path, "b", fresh, model={"width": 8}).start().wait()
    assert code == 2, output
    assert "parameter embed.weight: run 11x6, model 11x8" in output and "model.fusions" in output
    assert "Traceback" not in output


def test_ranks_that_do_not_reach_each_other_say_what_to_set(tmp_path: Path) -> None:
    """As on nodes whose names lead nowhere: after upstream has made its own group, gloo finds no way."""
    lost = tmp_path / "lost_interface.py"
    lost.write_text("import os\nos.environ['GLOO_SOCKET_IFNAME'] = 'nowhere0'\ndef loss(inputs): ...\n")
    loss = {"type": "custom", "import_path": WRAPPED, "kwargs": {"inner": "lost_interface.loss"}}
    uri = announced(tmp_path / "bucket")
    trainer = Trainer(tmp_path / "a", 2, outer_env(uri, "a"), config={"loss": loss}, path=(tmp_path,)).start()
    code, _ = trainer.wait()
    assert code == 1
    for rank in range(2):
        (line,) = [line for line in trainer.output(rank).splitlines() if line.startswith("composer-prime: ")]
        assert line.startswith(f"composer-prime: rank {rank} of this site's 2 doesn't reach the others over gloo: ")
        assert "GLOO_SOCKET_IFNAME (nowhere0)" in line


def test_the_trainers_own_time_leaves_the_outer_loops_turns_out(tmp_path: Path) -> None:
    uri, times = announced(tmp_path / "bucket", inner_steps=2, rounds=4, quorum=2), tmp_path / "times"
    loss = {"type": "custom", "import_path": WRAPPED, "kwargs": {"inner": f"{OWN}.my_loss"}}
    first = site(tmp_path, "a", uri, loss=loss, log_times=True)
    first.env["TIMES_FILE"] = str(times)
    first.start()
    wait_until((first.folder / "broadcasts" / "step_1.safetensors").exists, "a step of the first site")
    second = site(tmp_path, "b", uri).start()  # the first one's turn waits until this one offers
    first.finish()
    second.finish()
    assert_turns_left_out(times, metrics(first))


def test_a_machine_without_the_memory_is_refused_before_the_first_broadcast(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 1 kB\n")
    (tmp_path / "small_machine.py").write_text(
        f"from pathlib import Path\nfrom composer_prime.plan import memory\n"
        f"memory.MEMINFO = Path({str(tmp_path / 'meminfo')!r})\ndef loss(inputs): ...\n"
    )
    loss = {"type": "custom", "import_path": WRAPPED, "kwargs": {"inner": "small_machine.loss"}}
    uri = announced(tmp_path / "bucket")
    trainer = Trainer(tmp_path / "a", 2, outer_env(uri, "a"), config={"loss": loss}, path=(tmp_path,)).start()
    code, output = trainer.wait()
    (line,) = [line for line in output.splitlines() if line.startswith("composer-prime: ")]
    assert code == 2 and "the outer loop holds 0.00 GiB of memory" in line and "(276 parameters" in line
    assert not (trainer.folder / "broadcasts").exists()
