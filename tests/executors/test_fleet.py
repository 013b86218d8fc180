"""A launch through its records: started once, found anywhere, started again, ended; on a scripted platform."""

import threading

import pytest

from composer_prime.errors import BadInput, CorruptObject, ExecutorError, StoreError
from composer_prime.executors.base import JobState
from composer_prime.launch import launch_keys
from composer_prime.launch.budget import Limits
from composer_prime.launch.fleet import Stopped
from composer_prime.launch.listing import chosen, merged_logs, rows
from composer_prime.launch.records import LaunchBook, begin_launch, newest_launch, open_launch
from composer_prime.store import keys
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.records import Beat
from tests.executors.launches import SECRET, Scene, empty_bucket


def states(scene: Scene) -> dict[tuple[str, int], str]:
    return {seen.place: seen.state for seen in scene.fleet().look()}


def beat(scene: Scene, site: str, counter: int, state: str = "live") -> None:
    record = Beat(
        site=site,
        incarnation=0,
        counter=counter,
        state=state,  # type: ignore[arg-type]
        versions=(0,),
        inner_step=counter,
        trained_tokens=0,
        pins=(0,),
    )
    scene.store.put(keys.beat(site, 0), record.to_bytes())


# --- starting --------------------------------------------------------------------------------------------------------


def test_racing_supervisors_start_each_site_once() -> None:
    scene = Scene()
    supervisors = [scene.supervisor() for _ in range(4)]
    barrier = threading.Barrier(4)

    def turn(supervisor) -> None:
        barrier.wait()
        supervisor.turn()

    threads = [threading.Thread(target=turn, args=(each,)) for each in supervisors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(scene.platform.jobs) == [scene.job_id("a", 1), scene.job_id("b", 1)]
    assert len(scene.book().attempts()) == 2


def test_a_launcher_killed_after_its_intent_is_made_good_by_the_next() -> None:
    scene = Scene()
    scene.platform.fail = 1  # the submit of a: the intent is written, the job isn't
    fleet = scene.fleet()
    with pytest.raises(ExecutorError):
        fleet.start(scene.plan, "a", 1, 600)
    assert states(scene) == {("a", 1): "not started"}
    scene.supervisor().turn()
    assert states(scene) == {("a", 1): "running", ("b", 1): "running"}


def test_a_launcher_killed_before_it_wrote_the_jobs_id_is_made_good_by_the_next() -> None:
    scene = Scene()
    scene.supervisor().turn()
    scene.store.delete(launch_keys.job(1, "b", 1))
    assert states(scene)["b", 1] == "running"
    assert not scene.store.list(launch_keys.job(1, "b", 1)), "a look wrote"
    scene.supervisor().turn()
    assert scene.store.list(launch_keys.job(1, "b", 1)), "the id was not written down"
    assert len(scene.platform.jobs) == 2


def test_no_secret_is_in_the_bucket_and_its_name_is() -> None:
    scene = Scene()
    scene.supervisor().turn()
    everything = b"".join(scene.store.get(key) for key in scene.store.list(""))
    assert SECRET.encode() not in everything and b"HF_TOKEN" in everything
    spec, _ = scene.platform.jobs[scene.job_id("a", 1)]
    assert spec.secrets.reveal() == {"HF_TOKEN": SECRET} and spec.env["AWS_ENDPOINT_URL"] == "http://127.0.0.1:1"


def test_a_recipe_in_the_bucket_that_was_changed_is_not_run() -> None:
    scene = Scene()
    scene.supervisor().turn()
    book, text = scene.book(), scene.plan.recipe_text.encode()
    sha = sha256_hex(text)
    assert book.kept(launch_keys.recipe, sha) == text
    scene.store.put(launch_keys.recipe(sha), b"max_steps = 1")
    with pytest.raises(CorruptObject, match="sha256 differs"):
        book.kept(launch_keys.recipe, sha)


def test_what_the_platform_refuses_leaves_no_intent(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()

    def refuse(spec: object) -> None:
        raise BadInput("GPU (H1000) is unknown: did you mean H100?")

    monkeypatch.setattr(scene.platform, "check", refuse)
    with pytest.raises(BadInput, match="H100"):
        scene.supervisor().turn()
    assert scene.book().attempts() == [] and scene.platform.jobs == {}


# --- going on --------------------------------------------------------------------------------------------------------


def test_a_run_ends_when_all_its_sites_ended_rightly() -> None:
    scene = Scene()
    supervisor = scene.supervisor()
    supervisor.turn()
    for site in "ab":
        scene.platform.ends(scene.job_id(site, 1), JobState.SUCCEEDED, 0)
    assert supervisor.run(lambda: None) is True
    assert scene.supervisor().run(lambda: None) is True, "another machine sees the same"
    assert len(scene.platform.jobs) == 2


def test_a_site_given_up_makes_the_launch_a_failure_and_others_go_on() -> None:
    scene = Scene(limits=Limits(max_restarts=0))
    supervisor = scene.supervisor()
    supervisor.turn()
    scene.platform.ends(scene.job_id("a", 1), JobState.FAILED, 1)
    assert supervisor.turn() is False
    assert "a: given up: failed, exit code 1" in scene.said
    scene.platform.ends(scene.job_id("b", 1), JobState.SUCCEEDED, 0)
    assert supervisor.run(lambda: None) is False


def test_a_platform_that_is_down_for_a_while_is_asked_again() -> None:
    scene = Scene()
    scene.platform.fail = 2
    turns = iter(range(10))

    def wait() -> None:
        if next(turns) == 4:
            for site in "ab":
                scene.platform.ends(scene.job_id(site, 1), JobState.SUCCEEDED, 0)

    assert scene.supervisor().run(wait) is True
    assert any("trying again" in line for line in scene.said)


def test_a_person_who_leaves_leaves_the_jobs_running() -> None:
    scene = Scene()
    assert scene.supervisor().run(lambda: None, until=lambda: True) is None
    assert set(states(scene).values()) == {"running"}


def test_a_job_that_the_platform_forgot_is_lost_and_started_again_once_its_time_has_passed() -> None:
    scene = Scene()
    supervisor = scene.supervisor()
    supervisor.turn()
    del scene.platform.jobs[scene.job_id("a", 1)]
    for _ in range(3):
        supervisor.turn()
    assert states(scene) == {("a", 1): "unknown", ("b", 1): "running"}
    assert len([line for line in scene.said if "unknown to its platform with this login" in line]) == 1
    scene.later_s = scene.plan.timeout_s + 1
    supervisor.turn()
    assert states(scene)["a", 1] == "lost" and states(scene)["a", 2] == "running"


def test_a_replica_whose_beat_stands_still_is_ended_and_started_again() -> None:
    scene = Scene(limits=Limits(max_restarts=2, hang_after_s=100.0))
    supervisor = scene.supervisor()
    supervisor.turn()
    beat(scene, "a", 1)
    supervisor.turn()
    for ticks, counter in ((50.0, 2), (149.0, 2)):
        scene.ticks = ticks
        beat(scene, "a", counter)
        beat(scene, "b", int(ticks))
        supervisor.turn()
        assert states(scene)["a", 1] == "running", ticks
    scene.ticks = 151.0
    beat(scene, "b", 151)
    supervisor.turn()
    assert scene.platform.cancelled == [scene.job_id("a", 1)]
    supervisor.turn()
    assert states(scene) == {("a", 1): "hung", ("a", 2): "running", ("b", 1): "running"}


def test_a_hanging_job_whose_end_was_not_confirmed_is_ended_by_the_next_supervisor() -> None:
    scene = Scene(limits=Limits(max_restarts=0, hang_after_s=100.0))
    supervisor = scene.supervisor()
    supervisor.turn()
    fleet = scene.fleet()
    (seen, _) = fleet.look()
    assert seen.status is not None
    scene.platform.fail = 1
    assert fleet.condemn(seen, "hung", "no beat").problem == "the platform is down"
    assert scene.platform.cancelled == [] and states(scene)["a", 1] == "running"
    scene.supervisor().turn()
    assert scene.platform.cancelled == [scene.job_id("a", 1)] and states(scene)["a", 1] == "hung"


# --- ending and looking ----------------------------------------------------------------------------------------------


def test_cancel_from_anywhere_ends_every_job_and_stays() -> None:
    scene = Scene()
    supervisor = scene.supervisor()
    supervisor.turn()
    assert [(seen.state, seen.problem) for seen in scene.fleet().cancel()] == [("cancelled", "")] * 2
    assert len(scene.platform.cancelled) == 2
    with pytest.raises(Stopped, match="was stopped"):
        supervisor.turn()
    assert list(scene.stopped_fleet().cancel()) == []


def test_a_job_started_while_somebody_cancels_is_ended_by_who_started_it() -> None:
    scene = Scene()
    book = scene.book()
    scene.platform.on_submit.append(lambda: book.stop())
    with pytest.raises(Stopped):
        scene.supervisor().turn()
    assert scene.platform.cancelled == [f"{book.name}--a--1"] and len(scene.platform.jobs) == 1


def test_a_launch_after_a_cancel_is_a_new_one_with_jobs_of_its_own() -> None:
    scene = Scene()
    scene.supervisor().turn()
    first = scene.book().name
    list(scene.fleet().cancel())
    scene.supervisor(scene.begin()).turn()
    assert scene.book().name != first and scene.book().launch.number == 2
    assert len(scene.platform.jobs) == 4


def test_of_racing_launchers_all_begin_the_same_launch() -> None:
    store, names, barrier = empty_bucket(), [], threading.Barrier(8)

    def begin() -> None:
        barrier.wait()
        names.append(begin_launch(store, "small").name)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 1


def test_a_bucket_without_a_launch_says_what_to_do() -> None:
    assert newest_launch(MemoryStore("empty")) is None
    with pytest.raises(BadInput, match="composer-prime launch"):
        open_launch(MemoryStore("empty2"))


def test_costs_are_summed_from_the_platforms_clock() -> None:
    scene = Scene()
    scene.platform.usd_per_hour = 3.0
    supervisor = scene.supervisor()
    supervisor.check()
    supervisor.turn()
    scene.platform.ends(scene.job_id("a", 1), JobState.SUCCEEDED, 0, seconds=1200)
    supervisor.turn()
    row, _ = rows(scene.fleet().look())
    assert (row.site, row.state, row.exit_code) == ("a", "succeeded", 0)
    assert row.usd == pytest.approx(1.0) and row.seconds == pytest.approx(1200)


def test_logs_of_several_sites_are_told_apart_and_secrets_cut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    scene = Scene()
    scene.supervisor().turn()
    scene.platform.lines = ["one", f"token {SECRET}"]
    fleet = scene.fleet()
    attempts = chosen(scene.book(), None, None)
    lines = [line for each in attempts for line in fleet.logs(each, follow=False)]
    assert lines == ["one", "token [redacted]"] * 2
    named = list(merged_logs(fleet, attempts, follow=True))
    assert sorted(line.partition(" | ")[0] for line in named) == ["a", "a", "b", "b"]


def test_a_site_that_is_not_there_has_no_log() -> None:
    scene = Scene()
    scene.supervisor().turn()
    with pytest.raises(BadInput, match="it has a, b"):
        chosen(scene.book(), "c", None)
    with pytest.raises(BadInput, match="no attempt 7"):
        chosen(scene.book(), "a", 7)


def test_records_that_were_read_once_are_not_read_again() -> None:
    scene = Scene()
    scene.supervisor().turn()
    book = LaunchBook(scene.store, scene.book().launch)
    book.attempts()

    def broken(*_: object) -> bytes:
        raise StoreError("read again")

    scene.store.get = scene.store.get_range = broken  # type: ignore[method-assign]
    assert len(book.attempts()) == 2
