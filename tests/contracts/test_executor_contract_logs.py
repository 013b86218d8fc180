"""What every platform promises of a job's output: whole, in order, live, after the end; and that no secret is shown."""

from contextlib import closing

import pytest

from composer_prime.executors.base import Executor, JobState, Secrets
from composer_prime.redaction import HIDDEN, SECRET_NAMES_VARIABLE, Redactor
from tests.executors import fixtures
from tests.executors.jobs import FOREVER, REPOSITORY, Stage, await_end, run_to_end
from tests.executors.platforms import LoopbackPlatform

platform, executor, stage = fixtures.platform, fixtures.executor, fixtures.stage
taking, replacing = fixtures.taking, fixtures.replacing

KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQ\nEFAASCBKcwggSjAgEAAoIBAQ\n-----END PRIVATE KEY-----"
TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz"


def test_both_outputs_are_in_the_log_in_their_order(executor: Executor, stage: Stage) -> None:
    code = "[print(f'{n}', file=(sys.stdout, sys.stderr)[n % 2], flush=True) for n in range(20)]"
    job, _ = run_to_end(executor, stage.spec(code))
    assert sorted(executor.logs(job), key=int) == [str(n) for n in range(20)]
    evens = [line for line in executor.logs(job) if int(line) % 2 == 0]
    assert evens == [str(n) for n in range(0, 20, 2)]


def test_lines_are_seen_while_the_job_runs(executor: Executor, stage: Stage) -> None:
    job = executor.submit(stage.spec("say('one'); wait('go'); say('two')"))
    lines = executor.logs(job, follow=True)
    assert next(lines) == "one"
    assert executor.poll(job).state is JobState.RUNNING
    stage.mark("go")
    assert list(lines) == ["two"]


def test_a_running_jobs_log_can_be_read_without_following(executor: Executor, stage: Stage) -> None:
    job = executor.submit(stage.spec("say('one'); mark('up'); wait('go')"))
    stage.await_mark("up")
    following = executor.logs(job, follow=True)
    assert next(following) == "one"  # now it has arrived where the platform keeps logs
    assert list(executor.logs(job)) == ["one"]
    stage.mark("go")
    assert list(following) == []


def test_follow_ends_with_the_job_and_misses_nothing(executor: Executor, stage: Stage) -> None:
    job = executor.submit(stage.spec("wait('go'); [say(n) for n in range(200)]; sys.exit(9)"))
    lines = executor.logs(job, follow=True)
    stage.mark("go")
    assert list(lines) == [str(n) for n in range(200)]
    assert await_end(executor, job).exit_code == 9


def test_a_reader_that_went_away_reads_again_from_the_start(executor: Executor, stage: Stage) -> None:
    job = executor.submit(stage.spec("say('one'); say('two'); wait('go'); say('three')"))
    lines = executor.logs(job, follow=True)
    assert next(lines) == "one"
    lines.close()  # type: ignore[attr-defined]
    stage.mark("go")
    await_end(executor, job)
    assert list(executor.logs(job)) == ["one", "two", "three"]


def test_two_readers_both_get_everything(platform: LoopbackPlatform, executor: Executor, stage: Stage) -> None:
    job = executor.submit(stage.spec("say('one'); wait('go'); say('two')"))
    with closing(platform.executor()) as other:
        readers = [executor.logs(job, follow=True), other.logs(job, follow=True)]
        assert [next(reader) for reader in readers] == ["one", "one"]
        stage.mark("go")
        assert [list(reader) for reader in readers] == [["two"], ["two"]]


ODD = "é ß 漢字 العربية 🙂\u2028\x85 end"


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(
    ("text", "lines"),
    [("", []), ("one\ntwo", ["one", "two"]), ("\n\none\n\ntwo\n", ["", "", "one", "", "two"]), (f"{ODD}\n", [ODD])],
    ids=["nothing", "no last end", "empty lines", "every language"],
)
def test_a_log_is_read_line_by_line(
    executor: Executor, stage: Stage, text: str, lines: list[str], follow: bool
) -> None:
    job, _ = run_to_end(executor, stage.spec("sys.stdout.buffer.write(sys.argv[2].encode())", arguments=(text,)))
    assert list(executor.logs(job, follow=follow)) == lines


def test_ten_thousand_lines_and_one_of_a_mebibyte_come_whole_and_in_order(executor: Executor, stage: Stage) -> None:
    job, _ = run_to_end(executor, stage.spec("[print(f'line {n}') for n in range(10_000)]; print('x' * 2**20)"))
    *lines, last = executor.logs(job)
    assert lines == [f"line {n}" for n in range(10_000)] and (len(last), set(last)) == (2**20, {"x"})


def test_bytes_that_are_no_text_do_not_break_the_log(executor: Executor, stage: Stage) -> None:
    job, status = run_to_end(executor, stage.spec("sys.stdout.buffer.write(b'a\\xff\\xfeb\\nnext\\n')"))
    first, second = executor.logs(job)
    assert status.state is JobState.SUCCEEDED
    assert (first[0], first[-1], second) == ("a", "b", "next")


def test_the_log_of_a_cancelled_job_can_be_read(executor: Executor, stage: Stage) -> None:
    job = executor.submit(stage.spec(f"say('one'); {FOREVER}"))
    lines = executor.logs(job, follow=True)
    assert next(lines) == "one"
    executor.cancel(job)
    assert list(lines) == [] and list(executor.logs(job)) == ["one"]


def test_follow_ends_when_the_machine_is_taken_back(taking: LoopbackPlatform, executor: Executor, stage: Stage) -> None:
    job = executor.submit(stage.spec(f"say('one'); {FOREVER}"))
    lines = executor.logs(job, follow=True)
    assert next(lines) == "one"
    taking.preempt(job)
    assert list(lines) == [] and list(executor.logs(job)) == ["one"]


def test_follow_goes_on_with_the_machine_that_replaces_one(
    replacing: LoopbackPlatform, executor: Executor, stage: Stage
) -> None:
    job = executor.submit(stage.spec("count('starts'); say(os.stat(HERE / 'starts').st_size); wait('go'); say('end')"))
    lines = executor.logs(job, follow=True)
    assert next(lines) == "1"
    replacing.preempt(job)
    assert next(lines) == "2"
    stage.mark("go")
    assert list(lines) == ["end"] and list(executor.logs(job)) == ["2", "end"]


def test_logs_of_attempts_do_not_mix(executor: Executor, stage: Stage) -> None:
    jobs = [
        run_to_end(executor, stage.spec("say(sys.argv[2])", attempt=n, arguments=(f"attempt {n}",)))[0] for n in (1, 2)
    ]
    assert [list(executor.logs(job)) for job in jobs] == [["attempt 1"], ["attempt 2"]]


REPLICA = """
sys.path.insert(0, sys.argv[2])
from composer_prime.cli import main
from composer_prime.errors import ExecutorError
from composer_prime.launch.redacting import redact_output
token, key = os.environ["TOKEN"], os.environ["KEY"]
def command():
    redact_output()
    for n in range(10_000):
        print(f"{n} {token} {token[:8]}", "https://u:" + token + "@host" if n % 3 else repr([token]), sep="|")
    print(key)
    print("\\n".join("INFO " + line for line in key.splitlines()), flush=True)
    os.system("echo below $TOKEN")
    raise ExecutorError("ended by " + token)
main.app = command
main.main()
"""
"""As `composer-prime replica` runs a site."""


def test_no_secret_is_in_the_platforms_own_log_of_a_replicas_ten_thousand_lines(
    executor: Executor, stage: Stage
) -> None:
    secrets = {"TOKEN": TOKEN, "KEY": KEY}
    env = {SECRET_NAMES_VARIABLE: ",".join(secrets)}
    job, status = run_to_end(executor, stage.spec(REPLICA, secrets=secrets, env=env, arguments=(str(REPOSITORY),)))
    assert status.exit_code == 1
    shown = list(executor.logs(job))
    text = "\n".join(shown)
    assert TOKEN not in text and KEY not in text
    assert not [line for line in KEY.splitlines() if line in text]
    numbers = [line.split()[0] for line in shown if HIDDEN in line and line[0].isdigit()]
    assert numbers == [str(n) for n in range(10_000)]
    assert shown[-2:] == [f"below {HIDDEN}", f"composer-prime: ended by {HIDDEN}"]


def test_a_secret_is_cut_out_wherever_writes_tear_it(executor: Executor, stage: Stage) -> None:
    torn = [(1, 1, 1, 1, 1, 1, 9), (3, 4), (60, 5), (4096,)]
    code = """
text = ("." * 50 + os.environ["TOKEN"] + "\\n") * 3
for sizes in eval(sys.argv[2]):
    place = 0
    while place < len(text):
        for size in sizes:
            os.write(1, text[place : place + size].encode())
            place += size
"""
    spec = stage.spec(code, secrets={"TOKEN": TOKEN}, arguments=(str(torn),))
    job, _ = run_to_end(executor, spec)
    assert list(spec.secrets.redact_lines(executor.logs(job))) == ["." * 50 + HIDDEN] * 3 * len(torn)


# --- what cuts them out, alone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [["abcdef", "abcdefghij"], ["xabcde", "abcdefgh"], ["aaaaaa", "aaaaaaab"]], ids=str)
def test_values_that_overlap_leave_nothing_of_each_other(values: list[str]) -> None:
    text = f"-{values[1]}-{values[0]}-{values[0]}{values[1][-2:]}".encode()
    whole = Redactor(values)
    expected = whole.feed(text) + whole.flush()
    for size in range(1, len(text)):
        redactor = Redactor(values)
        pieces = [redactor.feed(text[start : start + size]) for start in range(0, len(text), size)]
        shown = b"".join([*pieces, redactor.flush()])
        assert shown == expected and not any(value.encode() in shown for value in values), f"chunks of {size}"


def test_a_short_value_is_a_word_like_any_other() -> None:
    assert Secrets({"FLAG": "1", "LEVEL": "debug"}).redact("1 debug") == "1 debug"


def test_an_access_key_s_id_is_a_name_and_stays() -> None:
    keys = Secrets({"AWS_ACCESS_KEY_ID": "composer", "AWS_SECRET_ACCESS_KEY": KEY, "AWS_SESSION_TOKEN": TOKEN})
    assert keys.redact(f"composer-prime {KEY} {TOKEN}") == f"composer-prime {HIDDEN} {HIDDEN}"
    assert list(keys.redact_lines(["composer-prime replica"])) == ["composer-prime replica"]


def test_lines_come_out_as_they_come_in() -> None:
    source = iter(["one", f"with {TOKEN}", "hf_Ab", "last"])
    lines = Secrets({"TOKEN": TOKEN}).redact_lines(source)
    assert next(lines) == "one"
    assert list(source) == [f"with {TOKEN}", "hf_Ab", "last"], "a line was held back though it held no beginning"
