"""`composer-prime keygen`: a private file, one public line, and how the run's owner admits it."""

import stat
import tomllib

import pytest
import typer
from typer.testing import CliRunner

from composer_prime.cli.owner import keygen
from composer_prime.errors import ConfigError
from composer_prime.sync.signatures import SigningKey, check_public, verify


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("keygen")(keygen)
    return app


def test_keygen_writes_the_private_key_and_prints_the_public_one_as_its_only_output(app, tmp_path):
    path = tmp_path / "a.pem"
    answer = CliRunner().invoke(app, [str(path)])
    assert answer.exit_code == 0 and answer.stdout.count("\n") == 1
    public = check_public(answer.stdout.strip())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert verify(public, b"message", SigningKey.load(path).sign(b"message"))


def test_the_hint_holds_the_lines_for_a_site_and_for_an_owner_and_the_command_that_admits_it(app, tmp_path):
    answer = CliRunner().invoke(app, [str(tmp_path / "a.pem")])
    public = answer.stdout.strip()
    site, command, owner = answer.stderr.splitlines()
    assert f'[site]: key_file = "{tmp_path / "a.pem"}"' in site and "[outer]" in owner
    assert command.endswith(f": composer-prime admit STORE --site a --public {public} --key OWNER.KEY")
    assert tomllib.loads(f"[outer]\n{owner.rpartition(': ')[2]}") == {"outer": {"owner": public}}


def test_the_private_key_is_never_printed(app, tmp_path):
    path = tmp_path / "a.pem"
    answer = CliRunner().invoke(app, [str(path)])
    assert path.read_text().splitlines()[1] not in answer.output


def test_a_second_key_at_the_same_path_is_refused_and_the_first_stays(app, tmp_path):
    path = tmp_path / "a.pem"
    CliRunner().invoke(app, [str(path)])
    before = path.read_bytes()
    answer = CliRunner().invoke(app, [str(path)])
    assert isinstance(answer.exception, ConfigError) and "never overwritten" in str(answer.exception)
    assert answer.stdout == "" and path.read_bytes() == before
