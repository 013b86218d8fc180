"""Whole local runs with stand-in roles: what ends them, what they leave, how they go on."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from composer_prime import metrics
from composer_prime.config import Recipe, RunPaths, SiteSettings
from composer_prime.errors import BadInput, ConfigError, SiteRevoked
from composer_prime.metrics import MetricsTape
from composer_prime.sites.embedded.folder import check_same_recipe, claim_run_folder, claim_site_folder
from composer_prime.sites.embedded.local_run import Surroundings, _View, run_local, run_site
from composer_prime.sites.embedded.ports import claim_port, is_free
from composer_prime.sites.embedded.processes import catch_interrupt
from composer_prime.sites.embedded.supervisor import SiteState, SiteSupervisor, lock_site
from composer_prime.sites.preflight import Found
from tests.patience import wait_until
from tests.sites.fake_site import all_gone, fake_roles, pid_of, small_recipe

DONE = "steps=8 ending=result"


def surroundings(tmp_path: Path, console: Console | None = None, model: str = "", **roles: object) -> Surroundings:
    """A run of stand-ins, shown to nobody; the model is a folder that is there at once."""
    answer = model or f"print('building'); print({str(tmp_path / 'model')!r})"
    return Surroundings(
        console=console or Console(file=io.StringIO()),
        role_command=fake_roles(**roles),  # type: ignore[arg-type]
        model_command=lambda recipe: [sys.executable, "-c", answer],
        rehearse=lambda recipe, site: Found([], [], []),
    )


def summary_of(recipe: Recipe) -> dict:
    return json.loads(RunPaths.of(recipe).summary.read_text())


def note_trained(recipe: Recipe, site: str, *steps: int) -> None:
    """As the site's trainer does after each step."""
    with MetricsTape(RunPaths.of(recipe).site(site).tape("trainer")) as tape:
        for step in steps:
            tape.log(step, **{metrics.TRAIN_TOKENS: 100})


def test_a_run_ends_with_a_summary_and_a_picture(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    shown = io.StringIO()
    assert run_local(recipe, False, surroundings(tmp_path, Console(file=shown, width=160), trainer=DONE)) == 0
    paths = RunPaths.of(recipe)
    summary = summary_of(recipe)
    assert list(summary["sites"]) == ["a", "b"]
    assert summary["masters_equal"] is True
    assert summary["sites"]["b"]["finished"] and summary["sites"]["b"]["steps"] == 8
    assert paths.reward_plot.read_bytes().startswith(b"\x89PNG")
    assert "site=a state=done step=8/8 reward=0.875" in shown.getvalue()
    assert "v4:abababab" in shown.getvalue()
    assert SiteSettings.load(paths.site("a").root).model_dir == tmp_path / "model"
    ports = {SiteSettings.load(paths.site(site).root).inference_port for site in "ab"}
    assert len(ports) == 2


def test_a_site_that_crashes_does_not_stop_the_other(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    shown = io.StringIO()
    roles = {"a": DONE, "b": "steps=2 ending=exit:1"}
    code = run_local(recipe, False, surroundings(tmp_path, Console(file=shown), trainer=roles))
    assert code == 1
    assert "site b failed: b/trainer ended with exit code 1" in shown.getvalue() and "line 24" in shown.getvalue()
    sites = summary_of(recipe)["sites"]
    assert sites["a"]["finished"] and not sites["b"]["finished"]


def test_a_revoked_site_ends_in_the_line_that_says_so(tmp_path: Path) -> None:
    said = str(SiteRevoked.of("c"))
    trainer = "ending=exit:2 last=" + said.replace(" ", "_")
    with pytest.raises(SiteRevoked) as ended:
        run_site(small_recipe(tmp_path), "c", False, surroundings(tmp_path, trainer=trainer))
    assert str(ended.value) == said


def test_a_site_that_was_revoked_while_it_trained_is_shown_as_such(tmp_path: Path) -> None:
    """Its own line is said, and `failed` would make its owner look for a fault."""
    recipe, shown = small_recipe(tmp_path), io.StringIO()
    run_site(recipe, "c", False, surroundings(tmp_path, trainer="ending=exit:1"))
    note_trained(recipe, "c", 0)
    trainer = "ending=exit:2 last=" + str(SiteRevoked.of("c")).replace(" ", "_")
    run_site(recipe, "c", True, surroundings(tmp_path, Console(file=shown, width=160), trainer=trainer))
    assert "site=c state=revoked" in shown.getvalue() and "state=failed" not in shown.getvalue()


def test_a_site_that_comes_back_is_starting_until_it_trains(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    run_site(recipe, "c", False, surroundings(tmp_path, trainer="ending=exit:1"))
    note_trained(recipe, "c", 0, 1)
    back = SiteSupervisor(SiteSettings.load(RunPaths.of(recipe).site("c").root))
    back.state, view = SiteState.RUNNING, _View([back])
    state, numbers = view.look()["c"]
    assert (state, numbers.step) == ("starting", 2)
    note_trained(recipe, "c", 1)
    state, numbers = view.look()["c"]
    assert (state, numbers.step) == ("running", 2), "a step that it trained once more"


def test_resume_continues_the_unfinished_site_and_leaves_the_finished_one(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    run_local(recipe, False, surroundings(tmp_path, trainer={"a": DONE, "b": "ending=exit:1"}))
    paths = RunPaths.of(recipe)
    result_of_a = paths.site("a").result.stat()
    assert run_site(recipe, "b", True, surroundings(tmp_path, trainer=DONE)) == 0
    assert SiteSettings.load(paths.site("b").root).resume
    assert run_local(recipe, True, surroundings(tmp_path, trainer="ending=exit:1")) == 0
    assert paths.site("a").result.stat() == result_of_a
    assert all(site["finished"] for site in summary_of(recipe)["sites"].values())


def test_a_resume_beside_the_live_run_is_refused_before_a_model_is_made(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    run_local(recipe, False, surroundings(tmp_path, trainer={"a": DONE, "b": "ending=exit:1"}))
    made = tmp_path / "made"
    there = surroundings(tmp_path, model=f"open({str(made)!r}, 'w'); print({str(tmp_path / 'model')!r})", trainer=DONE)
    with lock_site(RunPaths.of(recipe).site("b")):
        with pytest.raises(BadInput, match=r"site b is already running in .*--run\.name"):
            run_local(recipe, True, there)
        assert not made.exists()
    assert run_local(recipe, True, there) == 0 and made.exists()


def test_a_site_started_by_hand_joins_the_folder_and_the_summary(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    run_local(recipe, False, surroundings(tmp_path, trainer=DONE))
    assert run_site(recipe, "c", False, surroundings(tmp_path, trainer=DONE)) == 0
    assert list(summary_of(recipe)["sites"]) == ["a", "b", "c"]
    settings = {site: SiteSettings.load(RunPaths.of(recipe).site(site).root) for site in "abc"}
    assert [each.data_shard for each in settings.values()] == [0, 1, 2]
    assert len({each.sampling_seed for each in settings.values()}) == 3
    assert len({each.run_uri for each in settings.values()}) == 1
    with pytest.raises(BadInput, match="already holds a site c"):
        run_site(recipe, "c", False, surroundings(tmp_path))


def test_a_folder_with_a_run_is_refused_and_clean_empties_it(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    run_local(recipe, False, surroundings(tmp_path, trainer=DONE))
    left_over = RunPaths.of(recipe).bucket / "fake" / "manifest.json"
    left_over.parent.mkdir(parents=True, exist_ok=True)
    left_over.touch()
    old_site = RunPaths.of(recipe).site("z").root
    old_site.mkdir()
    with pytest.raises(BadInput, match=r"already holds another run.*--resume.*--clean.*--run\.name"):
        run_local(recipe, False, surroundings(tmp_path))
    clean = small_recipe(tmp_path, clean=True)
    assert run_local(clean, False, surroundings(tmp_path, trainer=DONE)) == 0
    assert not left_over.exists() and not old_site.exists()


def test_clean_deletes_no_folder_that_is_not_a_runs(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, clean=True)
    precious = RunPaths.of(recipe).root / "thesis.txt"
    precious.parent.mkdir()
    precious.touch()
    with pytest.raises(BadInput, match="holds files but no run"):
        run_local(recipe, False, surroundings(tmp_path))
    assert precious.exists()


def test_sites_that_start_at_once_share_a_new_run_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "getpid", threading.get_native_id)  # a process each
    for attempt in range(40):
        recipe = small_recipe(tmp_path / str(attempt))
        start = threading.Barrier(8)

        def claim(site: str, recipe=recipe, start=start) -> None:
            start.wait()
            claimed = claim_site_folder(recipe, site, False)
            claimed.take()
            paths = claimed.paths
            paths.site(site).root.mkdir(parents=True)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(claim, "abcdefgh"))
        assert sorted(site.name for site in RunPaths.of(recipe).sites.iterdir()) == list("abcdefgh")


def test_a_run_is_resumed_for_more_steps(tmp_path: Path) -> None:
    run_local(small_recipe(tmp_path), False, surroundings(tmp_path, trainer=DONE))
    run_local(small_recipe(tmp_path, max_steps=12), True, surroundings(tmp_path, trainer=DONE))
    assert SiteSettings.load(RunPaths.of(small_recipe(tmp_path)).site("a").root).recipe.max_steps == 12


def test_resuming_another_recipe_is_refused_with_the_difference(tmp_path: Path) -> None:
    run_local(small_recipe(tmp_path), False, surroundings(tmp_path, trainer=DONE))
    with pytest.raises(ConfigError, match=r"seq_len \(77, there: 512\)"):
        run_local(small_recipe(tmp_path, seq_len=77), True, surroundings(tmp_path))
    with pytest.raises(ConfigError, match=r"outer\.lr \(0\.5, there: 1\.0\)"):
        outer = {"inner_steps": 4, "fragments": 2, "lr": 0.5}
        run_site(small_recipe(tmp_path, outer=outer), "c", False, surroundings(tmp_path))
    assert run_local(small_recipe(tmp_path, clean=True, ckpt={"interval": 3}), True, surroundings(tmp_path)) == 0


def taken(recipe: Recipe) -> RunPaths:
    claim = claim_run_folder(recipe, False)
    claim.take()
    return claim.paths


def test_a_resume_on_another_device_is_refused_where_it_would_make_another_first_policy(tmp_path: Path) -> None:
    hinted = small_recipe(tmp_path, hints={})
    paths = taken(hinted)
    with pytest.raises(ConfigError, match=r"site\.device \(cuda, there: cpu\)"):
        check_same_recipe(small_recipe(tmp_path, hints={}, site={"device": "cuda"}), paths)
    check_same_recipe(small_recipe(tmp_path, hints={}, site={"threads": 2}), paths)
    other = taken(small_recipe(tmp_path / "without"))
    check_same_recipe(small_recipe(tmp_path / "without", site={"device": "cuda"}), other)


def test_a_person_is_told_how_far_a_teacher_was_heard(tmp_path: Path) -> None:
    recipe, out = small_recipe(tmp_path), io.StringIO()
    run_local(recipe, False, surroundings(tmp_path, trainer=DONE))
    with MetricsTape(RunPaths.of(recipe).site("a").tape("orchestrator")) as tape:
        for step, share in enumerate([1.0] * 8 + [0.0] * 8):
            told = {"weight": share, "probes": 2}
            tape.log(step, **{metrics.teacher_metric("hints", what): value for what, value in told.items()})
    run_local(recipe, True, surroundings(tmp_path, Console(file=out, width=120), trainer=DONE))
    line = "site a: teacher hints was heard at 100% of its turns at first and at 0% at last; 32 rollouts compared it"
    assert line in out.getvalue()


def test_a_bucket_with_a_run_of_the_name_is_refused(tmp_path: Path) -> None:
    outer = {"inner_steps": 4, "fragments": 2, "store": str(tmp_path / "store")}
    (tmp_path / "store" / "fake").mkdir(parents=True)
    (tmp_path / "store" / "fake" / "manifest.json").touch()
    with pytest.raises(BadInput, match="already holds the run fake"):
        run_local(small_recipe(tmp_path, outer=outer), False, surroundings(tmp_path))


def test_a_store_that_other_processes_do_not_see_is_refused(tmp_path: Path) -> None:
    outer = {"inner_steps": 4, "fragments": 2, "store": "memory://x"}
    with pytest.raises(ConfigError, match="lives in one process"):
        run_local(small_recipe(tmp_path, outer=outer), False, surroundings(tmp_path))


def test_a_model_that_is_none_is_bad_input_in_one_line(tmp_path: Path) -> None:
    refuse = "import sys; sys.stderr.write('loading\\nmodel.name (x) is no model\\n'); sys.exit(2)"
    with pytest.raises(BadInput, match=r"^model: model\.name \(x\) is no model$"):
        run_local(small_recipe(tmp_path), False, surroundings(tmp_path, model=refuse))


def test_bad_input_before_the_first_step_ends_all_sites_with_one_error(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    shown = io.StringIO()
    with pytest.raises(BadInput, match=r"^b/orchestrator: widget \(7\) must be at most 3: lower it$"):
        run_local(recipe, False, surroundings(tmp_path, Console(file=shown), orchestrator={"b": "ending=exit:2"}))
    assert "widget" not in shown.getvalue()


def test_a_fixed_port_is_counted_up_over_the_sites(tmp_path: Path) -> None:
    port = next(port for port in (claim_port(None, set()) for _ in range(100)) if is_free(port + 1))
    recipe = small_recipe(tmp_path, inference={"server": {"port": port}})
    run_local(recipe, False, surroundings(tmp_path, trainer=DONE))
    settings = [SiteSettings.load(RunPaths.of(recipe).site(site).root) for site in "ab"]
    assert [each.inference_port for each in settings] == [port, port + 1]


RUN = """
import sys; from pathlib import Path
from rich.console import Console
from composer_prime.sites.embedded.local_run import run_local
from tests.sites.fake_site import small_recipe
from tests.sites.test_local_run import surroundings
tmp_path = Path({folder!r})
sys.exit(run_local(small_recipe(tmp_path), False, surroundings(tmp_path, {more})))
"""
"""A run in a process of its own."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_cleanly_and_says_how_to_resume(tmp_path: Path, number: int) -> None:
    code = RUN.format(folder=str(tmp_path), more='Console(width=200), trainer="steps=2"')
    paths = RunPaths.of(small_recipe(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        pids = [pid_of(paths.site(site), role) for site in "ab" for role in ("trainer", "orchestrator")]
        os.kill(run.pid, number)
        said, _ = run.communicate()
    assert run.returncode == 130
    assert "--resume" in said
    assert all_gone(pids)
    assert all((paths.site(site).root / "ended" / "trainer").exists() for site in "ab")
    assert json.loads(paths.summary.read_text())["sites"]["a"]["steps"] == 2


def test_who_starts_a_site_for_others_says_how_it_goes_on(tmp_path: Path) -> None:
    recipe, shown = small_recipe(tmp_path), io.StringIO()
    paths = RunPaths.of(recipe).site("c")

    def interrupt() -> None:
        pid_of(paths, "trainer")
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    started = surroundings(tmp_path, Console(file=shown, width=200), trainer="steps=2")
    assert run_site(recipe, "c", False, replace(started, continuing=None)) == 130
    helper.join()
    assert "stopping" in shown.getvalue() and "--resume" not in shown.getvalue()


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with catch_interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert not interrupt.is_set
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with catch_interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert interrupt.is_set
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupt_while_the_model_is_built_ends_the_build(tmp_path: Path) -> None:
    started = tmp_path / "started"
    build = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = RUN.format(folder=str(tmp_path), more=f"model={build!r}")
    with subprocess.Popen([sys.executable, "-c", code]) as run:
        wait_until(lambda: started.exists() and started.read_text(), "the build runs")
        run.send_signal(signal.SIGINT)
    assert run.returncode == 130
    assert all_gone([int(started.read_text())])
