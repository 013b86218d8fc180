"""`composer-prime keygen`: a private file, one public line, and how the run's owner admits it."""

import stat
import tomllib

from composer_prime.sync.signatures import SigningKey, check_public, verify
from tests.cli.command_line import assert_refused


def test_keygen_writes_the_private_key_and_prints_the_public_one_as_its_only_output(cli, tmp_path):
    path = tmp_path / "a.pem"
    answer = cli("keygen", path)
    assert answer.code == 0 and answer.out.count("\n") == 1
    public = check_public(answer.out.strip())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert verify(public, b"message", SigningKey.load(path).sign(b"message"))
    assert path.read_text().splitlines()[1] not in answer.out + answer.err


def test_the_hint_holds_the_lines_for_a_site_and_for_an_owner_and_the_command_that_admits_it(cli, tmp_path):
    answer = cli("keygen", tmp_path / "a.pem")
    public = answer.out.strip()
    site, command, owner = answer.err.splitlines()
    assert f'[site]: key_file = "{tmp_path / "a.pem"}"' in site and "[outer]" in owner
    assert command.endswith(f": composer-prime admit STORE --site a --public {public} --key OWNER.KEY")
    assert tomllib.loads(f"[outer]\n{owner.rpartition(': ')[2]}") == {"outer": {"owner": public}}


def test_a_second_key_at_the_same_path_is_refused_and_the_first_stays(cli, tmp_path):
    path = tmp_path / "a.pem"
    cli("keygen", path)
    before = path.read_bytes()
    assert_refused(cli("keygen", path), "never overwritten")
    assert path.read_bytes() == before
