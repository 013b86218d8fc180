"""Packing changes nothing but the cost: same logprobs, same gradients, every token in its place once."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from composer_prime.errors import SiteError
from composer_prime.sites.embedded.packing import pack, trainer_logprobs
from composer_prime.teachers.candidates import Candidates
from composer_prime.teachers.carrier import pack as pack_streams
from tests.sites.tiny_policy import logprobs_alone, random_policy, random_sample, random_samples

SEQ_LEN = 32


def unpacked(batch):
    """Each packed sample's streams, as a dict of lists."""
    names = [field.name for field in dataclasses.fields(batch) if field.name not in ("seq_lens", "candidates")]
    pieces = zip(*(batch.split(getattr(batch, name)) for name in names), strict=True)
    return [{name: piece.tolist() for name, piece in zip(names, one, strict=True)} for one in pieces]


@pytest.mark.parametrize("seed", range(5))
def test_every_sample_is_packed_once_and_whole(seed):
    samples = random_samples(seed, 30, with_ref=True)
    found = [one for batch in pack(samples, SEQ_LEN, micro_tokens=100) for one in unpacked(batch)]
    by_tokens = {tuple(one["input_ids"]): one for one in found}
    assert len(found) == len(samples) == len(by_tokens)
    for sample in samples:
        one = by_tokens[tuple(sample.token_ids)]
        assert one["position_ids"] == list(range(len(sample.token_ids)))
        assert one["loss_mask"] == sample.mask
        assert one["advantages"] == sample.advantages
        assert one["temperatures"] == sample.temperatures
        assert one["inference_logprobs"] == pytest.approx(sample.logprobs)
        assert one["ref_logprobs"] == pytest.approx(sample.ref_logprobs)


def test_packing_is_first_fit_and_rows_are_as_wide_as_the_longest_sample():
    rng = random.Random(0)
    lengths = [5, 9, 4, 20, 11, 2]
    (batch,) = pack([random_sample(rng, length) for length in lengths], SEQ_LEN)
    assert batch.seq_lens == ((20,), (11, 9), (5, 4, 2))
    assert batch.input_ids.shape == (3, 20)


def test_rows_are_stacked_up_to_the_token_limit_and_a_long_one_stands_alone():
    samples = [random_sample(random.Random(seed), 10) for seed in range(7)]
    assert [batch.input_ids.shape for batch in pack(samples, SEQ_LEN, micro_tokens=35)] == [(3, 10), (3, 10), (1, 10)]
    assert [batch.input_ids.shape[0] for batch in pack(samples, SEQ_LEN, micro_tokens=5)] == [1] * 7


def test_a_sample_longer_than_a_row_is_refused_with_the_remedy():
    with pytest.raises(SiteError, match=r"33 tokens.*seq_len \(32\): raise seq_len"):
        pack([random_sample(random.Random(0), 33)], SEQ_LEN)


def test_the_first_token_of_a_sample_is_never_trained_on():
    sample = random_sample(random.Random(1), 6)
    (batch,) = pack([dataclasses.replace(sample, mask=[True] * 6)], SEQ_LEN)
    assert batch.loss_mask.tolist() == [[False, True, True, True, True, True]]


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": False}, {"attn_implementation": "eager"}])
def test_packed_logprobs_equal_those_of_each_sample_alone(overrides):
    model = random_policy(**overrides)
    samples = random_samples(3, 40)
    alone = {tuple(sample.token_ids): logprobs_alone(model, sample) for sample in samples}
    batches = pack(samples, SEQ_LEN, micro_tokens=200)
    assert max(len(lengths) for batch in batches for lengths in batch.seq_lens) > 1
    for batch in batches:
        logprobs = trainer_logprobs(model, batch)[0].detach()
        assert logprobs[~batch.loss_mask].abs().max() == 0.0
        streams = (batch.input_ids, batch.loss_mask, logprobs)
        for tokens, trained, found in zip(*map(batch.split, streams), strict=True):
            wanted = torch.tensor(alone[tuple(tokens.tolist())])[trained]
            torch.testing.assert_close(found[trained], wanted, rtol=0, atol=1e-5)


def test_the_head_computes_logits_for_trained_tokens_alone():
    model = random_policy()
    seen = []
    model.lm_head.register_forward_hook(lambda _head, _inputs, output: seen.append(output.shape))
    samples = random_samples(5, 9)
    (batch,) = pack(samples, SEQ_LEN)
    trainer_logprobs(model, batch)
    assert seen == [(1, sum(sum(sample.mask) for sample in samples), model.config.vocab_size)]
    assert model(input_ids=batch.input_ids).logits.shape == (*batch.input_ids.shape, model.config.vocab_size)


def test_a_micro_batch_without_trained_tokens_gives_zeros_that_can_be_backpropagated():
    model = random_policy()
    sample = random_sample(random.Random(6), 5)
    (batch,) = pack([dataclasses.replace(sample, mask=[False] * 5)], SEQ_LEN)
    logprobs, _ = trainer_logprobs(model, batch)
    logprobs.sum().backward()
    assert logprobs.tolist() == [[0.0] * 5]


def taught_sample(ids, *, temperature=1.0):
    """Of six tokens; the policy sampled the last, to which a replay teacher gives `ids` equal chances."""
    sample = random_sample(random.Random(7), 6)
    said = Candidates.none(6, len(ids))
    said.ids[5], said.logprobs[5] = ids, -np.log(np.float32(2 * len(ids)))
    carried = pack_streams(said, None, 1)
    mask = [False] * 5 + [True]
    return dataclasses.replace(sample, mask=mask, temperatures=[temperature] * 6, candidates=carried)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_candidates_logprobs_are_those_of_temperature_one_whatever_the_sampling_was(temperature):
    model, ids = random_policy(), [3, 1, 4]
    sample = taught_sample(ids, temperature=temperature)
    (batch,) = pack([sample], SEQ_LEN)
    _, taught = trainer_logprobs(model, batch)
    assert taught is not None
    wanted = model(torch.tensor([sample.token_ids])).logits[0, 4].log_softmax(-1)[ids]
    torch.testing.assert_close(taught.student_logprobs, wanted[None], rtol=0, atol=1e-5)


def test_a_batch_that_names_ids_beyond_the_vocabulary_is_trained_on_without_them():
    model = random_policy()
    size = model.config.vocab_size
    found = []
    for ids in ([3, size - 1, size], [3, size - 1, 2**31 - 2]):
        (batch,) = pack([taught_sample(ids)], SEQ_LEN)
        _, taught = trainer_logprobs(model, batch)
        assert taught is not None
        assert taught.teacher_logprobs.isfinite().tolist() == [[True, True, False]]
        taught.student_logprobs.sum().backward()
        found.append(taught.student_logprobs)
    assert torch.equal(*found) and found[0].isfinite().all()


def test_candidates_keep_no_further_copy_of_the_logits():
    model, sample = random_policy(vocab_size=50), taught_sample([3, 1, 4])

    def num_kept(sample):
        wide = set()

        def keep(tensor):
            if tensor.shape == (1, model.config.vocab_size):  # one token is trained on
                wide.add(tensor.untyped_storage().data_ptr())
            return tensor

        (batch,) = pack([sample], SEQ_LEN)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _alive = trainer_logprobs(model, batch)
        return len(wide)

    assert num_kept(sample) == num_kept(dataclasses.replace(sample, candidates=None)) == 1


def test_a_stream_that_is_not_wanted_costs_nothing():
    (batch,) = pack([taught_sample([3, 1])], SEQ_LEN)
    assert trainer_logprobs(random_policy(), batch, {"hint"})[1] is None
