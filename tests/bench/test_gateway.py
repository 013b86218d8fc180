"""The bench of a gateway measures real processes, with its connections as they are and as they were once."""

import pytest

from composer_prime.bench import gateway


@pytest.mark.slow
def test_both_gateways_answer_every_kind_of_request(capsys: pytest.CaptureFixture[str]) -> None:
    gateway.main(requests=20)
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*gateway.ARMS, *gateway.ASKED))
    assert "20 requests of each kind to each gateway, in turn; load " in printed
