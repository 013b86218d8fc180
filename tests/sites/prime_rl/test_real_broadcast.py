"""Upstream's NCCL broadcast, over a fake in NCCL's place: what it sends after a round is the masters."""

import os
from pathlib import Path

import pytest

from composer_prime.sites.prime_rl import versions
from tests.patience import wait_until
from tests.sites.prime_rl.comparing import assert_same, differs
from tests.sites.prime_rl.fake_nccl import answer, received
from tests.sites.prime_rl.launched import WRAPPED, announced
from tests.sites.prime_rl.real_runs import feed, real_site, save_model, upstream

pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("PRIME_RL_SRC"), reason="PRIME_RL_SRC names no PRIME-RL checkout"),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_nccl_sends_after_a_round_is_what_the_other_site_broadcasts(ranks: int, tmp_path: Path) -> None:
    if upstream() is not versions.MAIN:
        pytest.skip("PRIME-RL before 559b447 broadcasts nothing on fake data; only 559b447 is fed")
    model, uri = save_model(tmp_path / "model"), announced(tmp_path / "bucket", inner_steps=2, quorum=2)
    loss = {"type": "custom", "import_path": WRAPPED, "kwargs": {"inner": "tests.sites.prime_rl.fake_nccl.my_loss"}}
    first = real_site(tmp_path, "a", model, uri, ranks, loss=loss, weight_broadcast={"type": "nccl"})
    first.env["NCCL_MESSAGES"] = str(tmp_path / "messages")
    second = real_site(tmp_path, "b", model, uri)
    feed(first, second)
    first.start()
    second.start()
    wait_until(lambda: answer(first.folder) or first.has_ended(), "the end of the first site")
    first.finish()
    second.finish()
    sent = list(received(tmp_path / "messages"))
    assert len(sent) == 4  # the last step's weights are sampled by nobody
    for step in (0, 2):
        assert_same(sent[step], second.broadcast(step))
    assert differs(sent[3], second.broadcast(3))
    assert first.masters() == second.masters()
