"""The bench against GradientMail: refusals, and how its sites are let go and heard, with a stand-in for it.

GradientMail itself needs Python 3.12 and an environment of its own: docs/benchmarks.md has what a real run printed.
"""

import sys
from pathlib import Path

import pytest

from composer_prime.errors import BadInput, SiteError
from tests.bench.round import peers
from tests.bench.round.peers import PeerBench, find_peer, measure_peer

BENCH = PeerBench(params=1000, codec="bf16", poll_s=0.1)

STAND_IN = """
import json, sys
orders = json.loads(sys.argv[1])
for number in range(orders["rounds"]):
    print("ready", flush=True)
    sys.stdin.readline()
    print(number + orders["index"] / 4, flush=True)
"""


def test_without_an_interpreter_the_bench_says_how_to_make_one() -> None:
    with pytest.raises(BadInput, match=r"python3.12 -m venv .* 'gradientmail\[s3\]==.*--gradientmail-python"):
        peers.main(None)


def test_an_interpreter_without_gradientmail_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"No module named 'gradientmail'.*pip install"):
        find_peer(Path(sys.executable))
    with pytest.raises(BadInput, match=r"can't be run \(No such file or directory\): make it once"):
        find_peer(tmp_path / "python")


def test_a_codec_that_gradientmail_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_peer", lambda python: (python, "GradientMail 0"))
    with pytest.raises(BadInput, match="no codec int8: compare with one of fp32, bf16"):
        peers.main(Path("python"), codec="int8")


def test_a_round_takes_as_long_as_its_slower_site() -> None:
    assert measure_peer(BENCH, [sys.executable, "-c", STAND_IN], "prefix", repeats=2) == [0.25, 1.25, 2.25]


def test_a_site_that_ends_early_is_an_error() -> None:
    with pytest.raises(SiteError, match="ended with 3 in the middle of a round"):
        measure_peer(BENCH, [sys.executable, "-c", "raise SystemExit(3)"], "prefix")
    with pytest.raises(SiteError, match="ended with 1 after its last round"):
        measure_peer(BENCH, [sys.executable, "-c", STAND_IN + "raise SystemExit(1)"], "prefix")


def test_orders_name_the_codec_as_gradientmail_does() -> None:
    orders = BENCH.orders("runs/1", 1, rounds=2)
    assert (orders["site"], orders["delta_dtype"], orders["rounds"], orders["params"]) == ("b", "BF16", 2, 1000)
    assert PeerBench(1000, "fp32", 0.1).orders("runs/1", 0, 2)["delta_dtype"] is None
