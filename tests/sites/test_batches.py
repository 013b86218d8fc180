"""What the orchestrator writes the trainer reads, whole or not at all."""

import json
import random

import pytest

from composer_prime.errors import CorruptObject, SiteError
from composer_prime.sites.embedded.batches import TrainingSample, batch_folder, read_batch, write_batch


def make_sample(rng: random.Random, *, with_ref: bool = False) -> TrainingSample:
    length = rng.randint(1, 9)

    def halves() -> list[float]:
        return [rng.randint(-20, 0) / 2 for _ in range(length)]  # exact in fp32

    return TrainingSample(
        token_ids=[rng.randrange(265) for _ in range(length)],
        mask=[rng.random() < 0.5 for _ in range(length)],
        logprobs=halves(),
        temperatures=[1.0] * length,
        advantages=halves(),
        env_name=rng.choice(["reverse-letters", "sort-letters"]),
        reward=rng.randint(0, 4) / 4,
        policy_version=rng.randint(0, 5),
        ref_logprobs=halves() if with_ref else None,
    )


def test_a_batch_comes_back_as_it_was_written(tmp_path):
    rng = random.Random(0)
    samples = [make_sample(rng, with_ref=index % 2 == 0) for index in range(20)]
    write_batch(tmp_path, 3, samples)
    assert read_batch(tmp_path, 3) == samples
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_3"]


def test_without_teachers_no_teacher_stream_is_written(tmp_path):
    samples = [make_sample(random.Random(1))]
    write_batch(tmp_path, 0, samples)
    assert read_batch(tmp_path, 0) == samples
    assert b"ref_logprobs" not in (batch_folder(tmp_path, 0) / "batch.safetensors").read_bytes()


def test_a_batch_that_is_not_there_reads_as_none(tmp_path):
    assert read_batch(tmp_path / "rollouts", 0) is None
    write_batch(tmp_path, 1, [make_sample(random.Random(2))])
    assert read_batch(tmp_path, 0) is None


def test_a_second_write_replaces_the_first(tmp_path):
    rng = random.Random(3)
    first, second = [make_sample(rng)], [make_sample(rng), make_sample(rng)]
    write_batch(tmp_path, 0, first)
    write_batch(tmp_path, 0, second)
    assert read_batch(tmp_path, 0) == second
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_0"]


def test_streams_of_different_lengths_are_refused():
    with pytest.raises(SiteError, match="'logprobs': 1"):
        TrainingSample([1, 2], [True, True], [0.0], [1.0, 1.0], [0.0, 0.0], "env", 0.0, 0)


@pytest.mark.parametrize("damage", ["cut", "meta", "count"])
def test_a_damaged_batch_is_an_error_that_names_the_folder(tmp_path, damage):
    folder = write_batch(tmp_path, 0, [make_sample(random.Random(5))])
    tensors, meta = folder / "batch.safetensors", folder / "meta.json"
    if damage == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-3])
    elif damage == "meta":
        meta.write_text(meta.read_text()[:-3])
    else:
        record = json.loads(meta.read_text())
        record["samples"][0]["num_tokens"] += 1
        meta.write_text(json.dumps(record))
    with pytest.raises(CorruptObject, match="step_0"):
        read_batch(tmp_path, 0)
