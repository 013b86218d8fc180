"""One door out: no text for people or third parties holds a secret, a control character, or somebody else's HTML."""

import asyncio
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from composer_prime import redaction
from composer_prime.config.teachers import HintWriterConfig
from composer_prime.errors import BadInput
from composer_prime.hints.writer import HintWriter
from composer_prime.metrics import MetricsTape
from composer_prime.redaction import HIDDEN, Redactor, secret_values
from composer_prime.sites.embedded.conversations import MAX_TEXT, Conversation, Message, append, read
from composer_prime.sites.embedded.processes import Child
from composer_prime.store import keys, open_store
from composer_prime.sync.tape import Tape
from composer_prime.traces.ask.questions import Wording
from composer_prime.traces.ingest.intake import read_file
from composer_prime.traces.ingest.secret_patterns import SecretCutter
from composer_prime.traces.states import TraceState
from composer_prime.visible import markdown, shown
from tests.architecture import REPOSITORY
from tests.cli.command_line import call
from tests.patience import PATIENCE_S
from tests.planted_secrets import BY_FORM, ENVIRONMENT, assigned, found_in
from tests.servers.in_thread import serving_app

EVERYTHING = f"{assigned(ENVIRONMENT)}{json.dumps(ENVIRONMENT)}\n" + "".join(
    f"see {one}.\n" for one in BY_FORM.values()
)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("around", ["{}", "see {} there", '{{"x": "{}"}}', "rejected ({}).", "https://h/p?x={}"])
def test_a_secret_is_known_by_its_form_wherever_it_stands(around: str) -> None:
    for kind, secret in BY_FORM.items():
        assert secret not in Redactor([]).text(around.format(secret)), kind


@pytest.mark.parametrize(
    "around",
    ["Authorization: Bearer {}", "Authorization: Basic {}", "https://b.s3.aws.com/x?X-Amz-Expires=60&X-Amz-Signature={}",
     "  password: {}", '{{"client_secret": "{}"}}', "api_key = '{}'", "https://h/?sig={}"],
)  # fmt: skip
def test_a_secret_is_known_by_what_stands_before_it(around: str) -> None:
    secret = "a7" + "Bc9d" * 8
    assert secret not in Redactor([]).text(around.format(secret))


@pytest.mark.parametrize("write", [assigned, repr, json.dumps, lambda values: json.dumps(json.dumps(values))])
def test_a_foreign_environment_is_known_by_its_variables_names(write) -> None:
    values = {name: value for name, value in ENVIRONMENT.items() if " " not in value}
    assert found_in(Redactor([]).text(write(values))) == []


@pytest.mark.parametrize(
    "text",
    [
        "step=12 tokens=123456789 num_tokens=4096 key=rounds/0/1/offers/a.json sha256=" + "ab12" * 16,
        "max_completion_tokens: 20481024 token_ids=[1, 2, 3] sort_key=lambda pair: pair.value",
        "password = getpass.getpass(prompt) if token is None else token.strip()",
        "the secret of good rollouts, tokenizer.json, monkey: banana, compass=/usr/share/compass",
        "PASS tests/test_key.py::test_a_token_passes  https://example.org/a:b/c@d",
    ],
)
def test_everyday_lines_stay(text: str) -> None:
    assert Redactor([]).text(text) == text and Redactor([]).feed(f"{text}\n".encode()) == f"{text}\n".encode()


def test_values_of_eight_characters_are_cut_by_their_variables_names_and_shorter_ones_are_words() -> None:
    environment = {
        "MY_API_KEY": "eightchr",
        "OTHER_TOKEN": "seven77",
        "PWD": "/home/me/work",
        "TOKENIZERS_PARALLELISM": "disabled",
    }
    assert secret_values(environment) == ["eightchr"]


@pytest.mark.parametrize(
    "spell", [repr, json.dumps, lambda data: json.dumps(repr(data)), lambda data: repr(repr(data))]
)
def test_a_value_with_quotes_in_it_is_cut_as_python_and_json_write_it_and_inside_each_other(spell) -> None:
    value = """hün"ter\\two-geheim'x"""
    assert "geheim" not in Redactor([value]).text(spell({"ODD": value, "more": json.dumps({"ODD": value})}))


def test_a_process_s_log_holds_no_secret_and_no_control_character(tmp_path: Path, planted: None) -> None:
    text = EVERYTHING + "\x1b[2J\x1b]0;title\x07 gone\r\nnext\tline\n"
    child = Child("tool", [sys.executable, "-c", f"print({text!r}, flush=True)"], tmp_path / "log", env={})
    assert child.wait(PATIENCE_S) == 0
    log = (tmp_path / "log").read_text()
    assert found_in(log) == [] and HIDDEN in log
    assert "\\x1b[2J\\x1b]0;title\\x07 gone\nnext\tline\n" in log.replace("\r\n", "\n")
    assert not set(log) & set(map(chr, {*range(32), 127} - {9, 10, 13}))


def test_a_private_key_that_comes_in_pieces_is_cut_whole(tmp_path: Path) -> None:
    key = "-----BEGIN RSA PRIVATE " + "KEY-----\n" + "MIIEow+/9\n" * 20 + "-----END RSA PRIVATE " + "KEY-----"
    text = f"before\n{key}\nafter\n".encode()
    for size in (1, 7, 40, 1000):
        redactor = Redactor([])
        pieces = [redactor.feed(text[start : start + size]) for start in range(0, len(text), size)]
        assert b"".join([*pieces, redactor.flush()]) == f"before\n{HIDDEN}\nafter\n".encode(), size


def test_without_the_library_a_bare_machine_still_knows_values_and_the_core_s_forms(tmp_path: Path) -> None:
    bare = tmp_path / "redaction.py"
    bare.write_bytes(Path(redaction.__file__).read_bytes())
    left = subprocess.run(
        [sys.executable, "-I", "-S", str(bare)],
        input=EVERYTHING.encode(),
        capture_output=True,
        env=ENVIRONMENT,
        check=True,
    )
    only_by_library = {BY_FORM[kind] for kind in ("telegram", "mailchimp", "discord", "square")}
    assert set(found_in(left.stdout.decode())) <= only_by_library and left.stderr == b""


def test_conversations_are_written_without_secrets(tmp_path: Path, planted: None) -> None:
    said = Message("tool", EVERYTHING, calls=(f"env({json.dumps(ENVIRONMENT)})",))
    append(tmp_path / "conversations.jsonl", [Conversation(0, "box", 1.0, (said,))])
    assert found_in((tmp_path / "conversations.jsonl").read_text()) == []
    (back,) = read(tmp_path / "conversations.jsonl")
    assert back.messages[0].role == "tool" and HIDDEN in back.messages[0].text and EVERYTHING in said.text


def test_event_logs_and_metrics_hold_no_secret(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path / 'bucket'}")
    tape = Tape(store, "a", 0, ENVIRONMENT)
    tape.write("failed", why=EVERYTHING, tokens=12)
    tape.flush()
    (key,) = store.list(keys.tape_prefix("a"))
    assert found_in(store.get(key).decode()) == [] and b'"tokens": 12' in store.get(key)
    with MetricsTape(tmp_path / "tape.jsonl", ENVIRONMENT) as metrics:
        metrics.log(0, **{f"reward/{secret}": 1.0 for secret in BY_FORM.values()})
    assert found_in((tmp_path / "tape.jsonl").read_text()) == []


def test_traces_are_stored_and_teachers_asked_without_secrets(planted: None) -> None:
    record = json.dumps({"type": "tool", "content": EVERYTHING, "input": ENVIRONMENT})
    assert found_in(SecretCutter(dict(os.environ)).json(record)) == []
    call = {"id": "1", "type": "function", "function": {"name": "env", "arguments": json.dumps(ENVIRONMENT)}}
    messages = [{"role": "user", "content": EVERYTHING}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    state = TraceState("1", 0, None, messages=tuple(messages), tools=(), action={}, author=None, reward=None)
    assert found_in(Wording().body(state, {"model": "gpt"}).decode()) == []


def test_a_secret_beside_its_name_in_json_is_none_of_a_trace(tmp_path: Path) -> None:
    """Nothing of it is in this machine's environment, and few of its values have a form."""
    spoken = {name: f"{value} it's {{$!}}" for name, value in ENVIRONMENT.items()}
    for values in (ENVIRONMENT, spoken):
        record = {"tool_use": {"input": {"env": values}}, "token": " hello", "key": "rounds/0/1/offers/a.json"}
        cut = SecretCutter({}).json(json.dumps(record))
        assert found_in(cut) == [] and json.loads(cut).keys() == record.keys()
        assert found_in(json.dumps(Redactor([]).data(record))) == []
        assert json.loads(cut)["token"] == " hello" and json.loads(cut)["key"] == "rounds/0/1/offers/a.json"


def test_a_secret_that_a_cut_would_tear_is_gone_first(tmp_path: Path, planted: None) -> None:
    secret = ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]
    said = Message("tool", "x" * (MAX_TEXT - 20) + secret, calls=("y" * (MAX_TEXT - 20) + secret,))
    append(tmp_path / "conversations.jsonl", [Conversation(0, "box", 1.0, (said,))])
    text = (tmp_path / "conversations.jsonl").read_text()
    assert secret[:8] not in text and len(text) < 2.2 * MAX_TEXT
    line = b'"a": "' + b",".join([b"p" * 50] * 1300) + b"," + BY_FORM["github"].encode() + b"," + b"q" * 1300
    redactor = Redactor([])
    shown_line = b"".join(redactor.feed(line[place : place + 97]) for place in range(0, len(line), 97))
    assert BY_FORM["github"].encode() not in shown_line + redactor.flush()


def test_the_writer_of_hints_reads_no_secret(planted: None) -> None:
    asked = []

    async def answer(request: Request) -> JSONResponse:
        asked.append((await request.body()).decode())
        return JSONResponse({"choices": [{"message": {"content": "look again"}}]})

    async def write(url: str) -> str:
        writer = HintWriter(HintWriterConfig(base_url=url, model="m"), dict(os.environ))
        hint = await writer.write(EVERYTHING, json.dumps(ENVIRONMENT), "z" * 1990 + EVERYTHING)
        await writer.close()
        return hint

    with serving_app(Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])) as port:
        assert asyncio.run(write(f"http://127.0.0.1:{port}")) == "look again"
    (said,) = asked
    assert "zzz" in said and found_in(said) == []


def test_a_plan_shows_no_key_of_its_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (REPOSITORY / "recipes/local/one_site.toml").read_text()
    keyed = text.replace('id = "reverse-letters"', f'id = "reverse-letters"\napi_key = "{BY_FORM["anthropic"]}"')
    (tmp_path / "recipe.toml").write_text(keyed)
    answer = call(capsys, monkeypatch, "plan", str(tmp_path / "recipe.toml"))
    assert answer.code == 0 and "reverse-letters" in answer.out and BY_FORM["anthropic"] not in answer.out


def test_a_trace_store_is_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "old").touch(mode=0o644)
    code = (
        "import sys; from pathlib import Path\n"
        "from composer_prime.private import keep_private\n"
        "from composer_prime.traces.ingest.store import TraceStore\n"
        "keep_private(); TraceStore(Path(sys.argv[1]) / 'store', is_new=True)\n"
    )
    subprocess.run([sys.executable, "-c", f"import os; os.umask(0o022)\n{code}", str(tmp_path)], check=True)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]}
    assert modes <= {0o600, 0o700}


def test_keys_of_other_makes_and_addresses_that_are_keys_are_cut() -> None:
    body = "\n".join(["mQENBF" + "aZ09+/" * 10] * 8)
    pgp = f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{body}\n-----END PGP PRIVATE KEY BLOCK-----"
    hook, dsn = (
        "https://discord.com/api/webhooks/1234567890/" + "aB3_" * 12,
        "https://" + "0af1" * 8 + "@o1.ingest.sentry.io/2",
    )
    text = Redactor(secret_values({"SMTPPASS": "hunter2hunter2"})).text(f"{pgp}\n{hook}\n{dsn}\nhunter2hunter2")
    assert not any(part in text for part in ("mQENBF", "aB3_", "0af1", "hunter2")) and "o1.ingest.sentry.io" in text


def test_a_file_of_traces_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "session.jsonl").open("wb") as file:
        file.truncate(5 * 2**30)
    with pytest.raises(BadInput, match="5368709120 bytes, of 1073741824 at most"):
        read_file(tmp_path / "session.jsonl")


def test_what_the_command_line_prints_holds_no_secret(planted: None) -> None:
    assert found_in(shown(EVERYTHING, lines=True)) == []


def test_a_report_takes_no_markup_from_a_failed_runs_last_words() -> None:
    said = "<img src=x onerror=alert(1)> | [click](http://x) `code` ![](http://y)"
    left = markdown(said)
    assert not any(mark in left for mark in ("<img", "`", "[click](", "![](")) and "onerror" in left and "\\|" in left


def test_a_runs_files_are_the_users_own_and_the_buckets_are_not(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from composer_prime.private import keep_private\n"
        "from composer_prime.metrics import MetricsTape\n"
        "from composer_prime.store import open_store\n"
        "keep_private(); keep_private()\n"
        "MetricsTape(Path(sys.argv[1]) / 'run/tape.jsonl').close()\n"
        "open_store('file://' + sys.argv[1] + '/shared/bucket').put('a/b', b'x')\n"
    )
    script = f'umask 022; exec {sys.executable} -c "$0" {tmp_path}'
    subprocess.run(["sh", "-c", script, code], check=True)
    modes = {str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in sorted(tmp_path.rglob("*"))}
    assert {name: mode for name, mode in modes.items() if name.startswith("run")} == {
        "run": 0o700,
        "run/tape.jsonl": 0o600,
    }
    shared = {"shared": 0o755, "shared/bucket": 0o755, "shared/bucket/a": 0o755, "shared/bucket/a/b": 0o644}
    assert {name: mode for name, mode in modes.items() if name.startswith("shared")} == shared
