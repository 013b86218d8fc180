"""One family of those of `python -m tests.sites.family_run`: latent attention, experts, a template that writes turns
anew, a beginning that tokenizer and template both write, and a padding token that is the end."""

from pathlib import Path

import pytest

from tests.sites.family_run import SOURCES, STEPS, play


@pytest.mark.slow
def test_a_model_of_another_family_is_played_resumed_and_exported_as_it_was_broadcast(tmp_path: Path) -> None:
    row = play("deepseek-v3", tmp_path)
    assert row.ok and row.logits == "equal" and 0 < row.resumed_at < STEPS
    assert all(row.rollouts[kind] >= STEPS for kind in SOURCES)
    assert row.further == row.rollouts["turns"] and row.calls > 0
