"""Secrets are cut out of traces before anything is written, and counted by kind."""

import json
from pathlib import Path

import pytest

from composer_prime.redaction import FORMS, HIDDEN, PRIVATE_KEY
from composer_prime.traces.ingest.intake import find_files, ingest
from composer_prime.traces.ingest.records import entries_of
from composer_prime.traces.ingest.secret_patterns import ENVIRONMENT, SecretCutter
from composer_prime.traces.ingest.store import TraceStore
from tests.traces.ingest.claude_session import SECRET, write

KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow{}==\n-----END RSA PRIVATE KEY-----"
EXAMPLES = {
    "Anthropic key": ("sk-ant-api03-" + "aB3" * 10, HIDDEN),
    "OpenAI key": ("sk-proj-" + "aB3_" * 10, HIDDEN),
    "token by its prefix": ("hf_" + "aBc" * 11, HIDDEN),
    "Stripe key": ("sk_" + "live_" + "aB3d" * 6, HIDDEN),
    "SendGrid key": ("SG." + "aB3d" * 5 + "." + "aB3d" * 10, HIDDEN),
    "JSON web token": ("eyJ" + "hbGciOi" * 3 + ".eyJ" + "zdWIi" * 4 + ".c2ln", HIDDEN),
    "Azure key": ("AccountKey=" + "aB3/" * 21 + "==", f"AccountKey={HIDDEN}"),
    "value of a secret's name": ("DB_PASSWORD=hunter22", f"DB_PASSWORD={HIDDEN}"),
    "GitHub token": ("ghp_" + "a1B2" * 9, HIDDEN),
    "AWS key": ("AKIA" + "ABCD1234" * 2, HIDDEN),
    "AWS secret key": ("aws_secret_access_key = " + "aB3/" * 10, "aws_secret_access_key = " + HIDDEN),
    "Google key": ("AIza" + "aB3_-" * 7, HIDDEN),
    "webhook": ("https://discord.com/api/webhooks/" + "aB3_" * 9, f"https://discord.com/api/webhooks/{HIDDEN}"),
    "Slack token": ("xoxb-123456789012-abcdef", HIDDEN),
    "private key": (KEY, HIDDEN),
    "bearer token": ("Authorization: Bearer abc.def-ghi_jkl123", "Authorization: Bearer " + HIDDEN),
    "password in a URL": ("postgres://me:pa55:word@host/db", f"postgres://me:{HIDDEN}@host/db"),
}


def test_every_pattern_has_its_example() -> None:
    assert set(EXAMPLES) == {*FORMS, PRIVATE_KEY}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_secret_is_cut_and_counted_however_it_is_nested(kind: str) -> None:
    given, left = EXAMPLES[kind]
    inner = json.dumps({"output": f"see: {given} there"})
    cutter = SecretCutter({})
    cut = cutter.json(json.dumps({"plain": f"see: {given} there", "arguments": inner}))
    assert json.loads(cut)["plain"] == f"see: {left} there"
    assert json.loads(json.loads(cut)["arguments"]) == {"output": f"see: {left} there"}
    assert +cutter.counts == {kind: 2}
    assert SecretCutter({}).json(cut) == cut


def test_a_key_in_code_goes_with_all_its_lines() -> None:
    code = 'key = (\n    "-----BEGIN EC PRIVATE KEY-----\\n"\n    "MIIEow\\n"\n    "-----END EC PRIVATE KEY-----"\n)'
    assert SecretCutter({}).text(code) == f'key = (\n    "{HIDDEN}"\n)'


def test_a_key_that_was_cut_off_goes_too() -> None:
    cut = SecretCutter({}).text("-----BEGIN PRIVATE KEY-----\nMIIEow\nAAAA and so on: it ends here")
    assert "MIIE" not in cut


def test_values_of_the_environment_are_cut() -> None:
    cutter = SecretCutter({"COMPOSER_PRIME_SECRETS": "MINE", "MINE": 'quo"ted-value'})
    assert json.loads(cutter.json(json.dumps({"a": 'x quo"ted-value y'}))) == {"a": f"x {HIDDEN} y"}
    assert +cutter.counts == {ENVIRONMENT: 1}


def test_no_file_of_a_store_holds_a_secret(tmp_path: Path) -> None:
    main = write(tmp_path / "logs")
    store = TraceStore(tmp_path / "store", is_new=True)
    (report,) = ingest(find_files([main]), store, named=[main])
    assert report.secrets == {"Anthropic key": 1}
    assert SECRET.encode() in main.read_bytes()
    assert not any(SECRET in str(session.to_json()) for session in store.sessions())
    assert any(HIDDEN in node.message["content"] for session in store.sessions() for node in session.nodes)


def test_a_secret_in_values_that_run_on_is_counted_once() -> None:
    cutter = SecretCutter({})
    value = json.dumps({"said": SECRET}, indent=1).encode()
    assert [entry.value for entry in entries_of(value + value, cutter)] == [{"said": HIDDEN}] * 2
    assert cutter.counts.total() == 2
