"""Every token has one fate (rule 7)."""

from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.sync.ledger import FragmentLedger

EVENTS = st.lists(
    st.one_of(
        st.integers(0, 1000).map(lambda tokens: ("train", tokens)),
        st.sampled_from([("capture", 0), ("taken", 0), ("missed", 0), ("drop", 0)]),
    ),
    max_size=60,
)


def play(events) -> FragmentLedger:
    ledger, out = FragmentLedger(), False
    for name, tokens in events:
        if name == "train":
            ledger.train(tokens)
        elif name == "capture" and not out:
            ledger.capture()
            out = True
        elif name == "taken" and out:
            ledger.settle_taken()
            out = False
        elif name == "missed" and out:
            ledger.miss_round()
            ledger.release_capture()
            out = False
        elif name == "drop":
            ledger.drop()
            out = False
    return ledger


@settings(max_examples=500, derandomize=True)
@given(EVENTS)
def test_trained_is_merged_plus_dropped_plus_carried_after_any_history(events):
    ledger = play(events)
    assert ledger.trained == sum(tokens for name, tokens in events if name == "train")
    assert ledger.trained == ledger.merged + ledger.dropped + ledger.carried
    assert ledger.carried == ledger.pending + ledger.captured
    assert min(ledger.merged, ledger.dropped, ledger.pending, ledger.captured) >= 0


def test_work_that_missed_a_round_is_offered_again_with_what_came_since():
    ledger = FragmentLedger()
    ledger.train(5)
    assert ledger.capture() == (5, 1)
    ledger.train(7)
    ledger.miss_round()
    ledger.release_capture()
    assert ledger.capture() == (12, 2)
    assert ledger.settle_taken() == 12 and ledger.merged == 12 and ledger.missed_rounds == 0


@settings(max_examples=200, derandomize=True)
@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_a_book_restored_from_the_bucket_counts_what_is_in_neither_as_dropped(merged, carried, lost):
    ledger = FragmentLedger()
    ledger.restore(trained=merged + carried + lost, merged=merged, carried=carried, steps=3)
    assert (ledger.merged, ledger.captured, ledger.dropped) == (merged, carried, lost)
    assert ledger.trained == ledger.merged + ledger.dropped + ledger.carried
