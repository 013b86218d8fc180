"""The adapter in a loop of upstream's order, in plain torch: what is read, what is refused, and what it adds."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_prime.config.distill import DistillConfig, Schedule
from composer_prime.errors import ConfigError
from composer_prime.sites.prime_rl.topk.adapter import OUTPUT, Adapter, Ranks
from composer_prime.sites.prime_rl.topk.taught import read
from tests.sites.prime_rl.topk import forward_kl
from tests.sites.prime_rl.topk.carried import drawn, stream
from tests.sites.prime_rl.topk.heads import FusedOutputLinear, VanillaOutputLinear

V, H, K, LENGTHS = 50, 8, 4, [7, 9, 8]
N = sum(LENGTHS)
STARTS = [0, 7, 16]
EACH = DistillConfig(hint_tau=1.0, replay_tau=1.0)


@pytest.fixture(autouse=True)
def loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward KL of the tests, so that what is compared is the adapter."""
    module = ModuleType("composer_prime.losses.distill")
    vars(module).update(DistillInputs=forward_kl.DistillInputs, distill_loss=forward_kl.distill_loss)
    monkeypatch.setitem(sys.modules, "composer_prime.losses.distill", module)


def batch(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A packed row of three sequences: replay and hinted teachers at every other token and at the row's half.

    Two tokens of each prompt aren't trained, but for the first of the second sequence, which is stamped too.
    """
    generator = torch.Generator().manual_seed(seed)
    ids, logprobs = drawn(N, K, V, seed)
    places = torch.arange(N)
    ids[(places % 2 == 0) & (places != N // 2)] = -1
    ids[5, 2:] = -1
    logprobs[ids < 0] = -torch.inf
    mask = torch.ones(1, N, dtype=torch.bool)
    for start in STARTS:
        mask[0, start : start + 2] = False
    mask[0, 7] = True
    return {
        "input_ids": torch.randint(V, (1, N), generator=generator),
        "loss_mask": mask,
        "temperatures": torch.ones(1, N),
        "sequence_lengths": LENGTHS,
        "rl_weights": None,
        "routed_experts": stream(ids, logprobs, places >= 12).unsqueeze(0),
    } | changes


@dataclass
class Progress:
    """Upstream's counter."""

    step: int = 1


class Loop:
    """One step of upstream's, from its batches to its gradient, with the adapter or without."""

    def __init__(
        self, head: nn.Module, config: DistillConfig | None, ranks: Ranks | None = None, step: int = 1
    ) -> None:
        torch.manual_seed(1)
        self.head = head
        self.embed = nn.Embedding(V, H, dtype=torch.float64)
        self.outputs: list[dict[str, Tensor]] = []

        class DataLoader:
            """Upstream's loader, of the batches it is made with."""

            def __init__(self, dp_world_size: int, batches: list[Any]) -> None:
                self.batches = batches

            def get_batch(self) -> list[Any]:
                """One step's."""
                return self.batches

        self.names: dict[str, Any] = {
            "DataLoader": DataLoader,
            "forward": self.forward,
            "compute_loss": compute_loss,
        }
        if config is not None:
            progress = Progress(step)
            Adapter(config, head, Ranks(), lambda: progress).put_into(self.names)

    def forward(self, model: Any, input_ids: Tensor, *, labels: Tensor, temperature: Tensor) -> dict[str, Tensor]:
        """As upstream's: through the head, as a module."""
        hidden = torch.tanh(self.embed(input_ids))
        self.outputs.append(self.head(hidden, labels, temperature=temperature))
        return {name: value for name, value in self.outputs[-1].items() if name != OUTPUT}

    def losses(self, *batches: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """(loss, metrics) of each micro batch."""
        for given in self.names["DataLoader"](1, list(batches)).get_batch():
            labels, temperature = given["input_ids"].roll(-1, 1), given["temperatures"]
            out = self.names["forward"](None, given["input_ids"], labels=labels, temperature=temperature)
            logprobs = out.get("logprobs")
            if logprobs is None:
                every = (out["logits"] / temperature.unsqueeze(-1)).log_softmax(-1)
                logprobs = every.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
            shifted = logprobs.roll(1, 1)[0]
            rl = given["loss_mask"][0] & (True if given["rl_weights"] is None else given["rl_weights"][0] != 0)
            yield self.names["compute_loss"](
                trainer_logprobs=shifted.split(LENGTHS), loss_mask=rl.split(LENGTHS), rl_scale=max(int(rl.sum()), 1)
            )

    def gradients(self, *batches: dict[str, Any]) -> list[Tensor]:
        """Of embedding and head, summed over the micro batches."""
        for loss, _ in self.losses(*batches):
            loss.backward()
        return [p.grad for p in (*self.embed.parameters(), *self.head.parameters()) if p.grad is not None]


def compute_loss(trainer_logprobs: Any, loss_mask: Any, rl_scale: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Some loss: minus the trained log-probabilities."""
    total = sum((-(one * mask).sum() for one, mask in zip(trainer_logprobs, loss_mask, strict=True)), torch.zeros(()))
    return total / rl_scale, {"own": torch.ones(1)}  # pyright: ignore[reportReturnType]


def head(kind: Callable[..., nn.Module]) -> nn.Module:
    """A head of fixed weights, in fp64."""
    torch.manual_seed(0)
    return kind(H, V, bias=False, dtype=torch.float64)


def whole_term(loop: Loop, given: dict[str, Any], hint: float, replay: float, other: int = 1) -> Tensor:
    """The term by its definition: every sequence by itself, the whole vocabulary, token by token."""
    carried, rl = given["routed_experts"][0], given["rl_weights"]
    num_rl = max(int((given["loss_mask"] & (True if rl is None else rl != 0)).sum()), 1)
    total = torch.zeros((), dtype=torch.float64)
    weight = loop.head.weight
    assert isinstance(weight, Tensor)
    for start, length in zip(STARTS, LENGTHS, strict=True):
        hidden = torch.tanh(loop.embed(given["input_ids"][0, start : start + length]))
        logprobs = (hidden @ weight.t()).log_softmax(-1)
        for place in range(start + 1, start + length):
            for pair in range(0, carried.shape[1], 2):
                stored, bits = carried[place, pair], carried[place, pair + 1]
                if stored[0] == 0 or not given["loss_mask"][0, place]:
                    continue
                filled = stored != 0
                teacher = bits.view(torch.float32)[filled].double()
                student = logprobs[place - start - 1, stored[filled].abs().long() - 1]
                each = forward_kl.forward_kl(student.unsqueeze(0), teacher.unsqueeze(0)).sum()
                in_rl = rl is None or rl[0, place] != 0
                total = total + (hint if stored[0] < 0 else replay) * each / (num_rl if in_rl else other)
    return total


def assert_adds(kind: Callable[..., nn.Module], given: dict[str, Any], config: DistillConfig, **whole: Any) -> None:
    """The gradient with the adapter is the stock one and that of the whole term."""
    ours = Loop(head(kind), config).gradients(given)
    reference = Loop(head(kind), None)
    reference.gradients(given)
    whole_term(reference, given, **whole).backward()
    theirs = [p.grad for p in (*reference.embed.parameters(), *reference.head.parameters())]
    for mine, yours in zip(ours, theirs, strict=True):
        assert yours is not None
        torch.testing.assert_close(mine, yours, rtol=0, atol=1e-6 * yours.abs().max().item())


@pytest.mark.parametrize("kind", [FusedOutputLinear, VanillaOutputLinear])
def test_the_gradient_is_that_of_the_whole_vocabulary(kind: Callable[..., nn.Module]) -> None:
    assert_adds(kind, batch(), DistillConfig(hint_tau=0.7, replay_tau=2.0), hint=0.7, replay=2.0)


def test_a_token_may_have_both_teachers() -> None:
    first = batch()["routed_experts"][0]
    ids, logprobs = drawn(N, K, V, 9)
    second = stream(ids, logprobs, torch.ones(N, dtype=torch.bool))
    given = batch(routed_experts=torch.cat([first, second], dim=1).unsqueeze(0))
    assert_adds(FusedOutputLinear, given, DistillConfig(hint_tau=0.5), hint=0.5, replay=1.0)


def test_tokens_without_rl_loss_are_averaged_among_themselves() -> None:
    weights = torch.ones(1, N)
    weights[0, 16:] = 0
    # Of the last sequence 19, 21 and 23 are taught; 17 is its prompt.
    assert_adds(FusedOutputLinear, batch(rl_weights=weights), EACH, hint=1.0, replay=1.0, other=3)
    none = batch(rl_weights=torch.zeros(1, N))
    others = len(read(none) or ())
    assert others == 10
    assert_adds(FusedOutputLinear, none, EACH, hint=1.0, replay=1.0, other=others)


def test_each_micro_batch_gets_its_own_candidates() -> None:
    given = [batch(0), batch(1, routed_experts=None), batch(2)]
    ours = Loop(head(FusedOutputLinear), EACH).gradients(*given)
    reference = Loop(head(FusedOutputLinear), None)
    reference.gradients(*given)
    (whole_term(reference, given[0], 1.0, 1.0) + whole_term(reference, given[2], 1.0, 1.0)).backward()
    grad = reference.head.weight.grad
    assert isinstance(grad, Tensor)
    torch.testing.assert_close(ours[1], grad, rtol=0, atol=1e-6 * grad.abs().max().item())


def test_the_terms_of_two_context_parallel_ranks_add_up_to_the_whole_one() -> None:
    given, loop = batch(), Loop(head(FusedOutputLinear), None)
    hidden = torch.tanh(loop.embed(given["input_ids"]))
    labels, ones = given["input_ids"].roll(-1, 1), given["temperatures"]
    logprobs = loop.head(hidden, labels, temperature=ones)["logprobs"].roll(1, 1)[0]
    terms = []
    for cp_rank, part in enumerate((slice(0, N // 2), slice(N // 2, N))):
        own = head(FusedOutputLinear)
        adapter = Adapter(EACH, own, Ranks(None, cp_rank, 2), Progress)
        adapter.start_batch([given])
        adapter.next_forward(N // 2)
        own(hidden[:, part], labels[:, part], temperature=ones[:, part])
        # Upstream counts a token on each of the two.
        said = adapter.term(logprobs, 2 * int(given["loss_mask"].sum()))
        assert said is not None
        terms.append(said[0])
    torch.testing.assert_close(sum(terms), whole_term(loop, given, 1.0, 1.0))


@pytest.mark.parametrize("kind", [FusedOutputLinear, VanillaOutputLinear])
def test_without_a_teacher_loss_metrics_and_gradient_are_stock_to_the_bit(kind: Callable[..., nn.Module]) -> None:
    padding = torch.zeros(1, N, 2, K, dtype=torch.int32)
    off = DistillConfig(hint_tau=0.0, replay_tau=0.0)
    for given, config in ((batch(routed_experts=None), None), (batch(routed_experts=padding), None), (batch(), off)):
        ours, stock = Loop(head(kind), config or DistillConfig()), Loop(head(kind), None)
        (mine, said), (yours, says) = next(ours.losses(given)), next(stock.losses(given))
        assert torch.equal(mine, yours) and said.keys() == says.keys() and OUTPUT not in ours.outputs[0]
        for one, other in zip(ours.gradients(given), stock.gradients(given), strict=True):
            assert torch.equal(one, other)


def test_a_weights_schedule_goes_by_upstreams_steps() -> None:
    config = DistillConfig(hint_tau=0.0, replay_tau=Schedule(start=0.0, end=4.0, steps=2))
    stock = next(Loop(head(FusedOutputLinear), None).losses(batch()))[0]
    added = [next(Loop(head(FusedOutputLinear), config, step=step).losses(batch()))[0] - stock for step in (1, 2, 3)]
    assert added[0] == 0 and added[2] > 0
    torch.testing.assert_close(added[2], 2 * added[1])


def test_metrics_say_which_teacher_and_have_one_dimension() -> None:
    _, metrics = next(Loop(head(FusedOutputLinear), DistillConfig()).losses(batch()))
    assert {name: tuple(value.shape) for name, value in metrics.items()} == {
        "own": (1,),
        "distill_hint/distill_kl": (1,),
        "distill_replay/distill_kl": (1,),
    }


def refused(**changes: Any) -> str:
    """The one line that a batch is refused with."""
    with pytest.raises(ConfigError) as raised:
        read(batch(**changes))
    line = str(raised.value)
    assert "\n" not in line
    return line


def test_a_batch_of_another_temperature_is_refused_by_its_value_where_it_is_taught() -> None:
    temperatures = torch.ones(1, N)
    temperatures[0, 4] = 0.6  # nobody teaches it
    assert read(batch(temperatures=temperatures)) is not None
    temperatures[0, 5] = 0.7
    assert "sampled at temperature 0.7" in refused(temperatures=temperatures)


def test_a_candidate_beyond_the_heads_vocabulary_is_refused_by_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    given = batch()
    ids = given["routed_experts"][0, :, 0]
    ids[ids == ids[3, 0]] = V + 1  # carried plus 1
    with pytest.raises(SystemExit):
        list(Loop(head(FusedOutputLinear), DistillConfig()).losses(given))
    assert f"candidate {V}, and the policy's head has the ids 0 to {V - 1}" in capsys.readouterr().err


def test_what_a_router_chose_is_refused_by_its_type() -> None:
    experts = torch.zeros(1, N, 2, 8, dtype=torch.uint8)
    assert f"uint8 (1, {N}, 2, 8)" in refused(routed_experts=experts)


def test_a_sampling_mask_is_refused() -> None:
    assert "sampling_mask_ids" in refused(sampling_mask_ids=torch.zeros(1))


def test_an_unknown_head_is_refused_by_its_name_and_fsdps_class_of_a_known_one_is_not() -> None:
    with pytest.raises(ConfigError, match=r"lm_head: Linear\).*FusedOutputLinear"):
        Adapter(DistillConfig(), nn.Linear(H, V), Ranks(), Progress)
    sharded = head(FusedOutputLinear)
    sharded.__class__ = type("FSDPFused", (FusedOutputLinear,), {})
    Adapter(DistillConfig(), sharded, Ranks(), Progress)


def test_a_trainer_without_what_is_wrapped_is_refused_by_what_it_lacks() -> None:
    adapter = Adapter(DistillConfig(), head(FusedOutputLinear), Ranks(), Progress)
    with pytest.raises(ConfigError, match=r"lacks compute_loss\(trainer_logprobs, rl_scale\)"):
        adapter.put_into({"forward": lambda input_ids, labels: None, "compute_loss": lambda streams: None})
