"""Between PRIME-RL's trainer and its batches, its head and its `compute_loss`: adds the term of `[trainer.distill]`.

    get_batch      reads what is taught, and counts it over all ranks
    forward        says which micro batch the head sees next
    lm_head        gives its logits at the candidates, inside its own call
    compute_loss   adds the term

It is put there while upstream imports its loss: the model stands then, and the loop hasn't looked up its functions.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer_prime.config.distill import DistillConfig, weight_at
from composer_prime.errors import ConfigError
from composer_prime.sites.prime_rl import versions
from composer_prime.sites.prime_rl.outer.steps import Trainer
from composer_prime.sites.prime_rl.saying import ending_in_one_line
from composer_prime.sites.prime_rl.topk.head import Lookup, logits_at, logprobs_of
from composer_prime.sites.prime_rl.topk.taught import Taught, read

logger = logging.getLogger(__name__)

HEADS = ("FusedOutputLinear", "VanillaOutputLinear", "GemmaFusedOutputLinear", "GemmaVanillaOutputLinear")
"""Upstream's heads whose arithmetic is ours."""
OUTPUT = "composer_prime_logits"
"""Our key in the head's output: FSDP2 gathers the parameters again before the backward of what it finds there."""
KINDS = {True: "hint", False: "replay"}

Term = Callable[[Tensor, Taught, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(the policy's log-probabilities (m, k), taught on its device, weights (m,)) -> the sum over tokens, and metrics."""


@dataclass(frozen=True)
class Ranks:
    """Where this rank stands among those that share a batch's rows.

    group       of all ranks with a part of the batch: data and context parallel; None: this one is alone
    cp_rank, cp_size   its slice of each row
    """

    group: Any = None
    cp_rank: int = 0
    cp_size: int = 1

    @classmethod
    def of(cls, parallel_dims: Any) -> "Ranks":
        """By upstream's record."""
        group = parallel_dims.get_mesh("dp_cp").get_group()
        cp_rank = parallel_dims.world_mesh["cp"].get_local_rank() if parallel_dims.cp_enabled else 0
        return cls(group, cp_rank, parallel_dims.cp)

    def sum(self, count: int, device: torch.device) -> int:
        """Over all of them; each must call it."""
        total = torch.tensor(count, device=device)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return int(total)


class Adapter:
    """The term of one trainer process, from its batches to its loss."""

    def __init__(self, config: DistillConfig, head: nn.Module, ranks: Ranks, progress: Callable[[], Any]) -> None:
        check_head(head)
        self._config = config
        self._ranks = ranks
        self._progress = progress
        self._waiting: list[Taught | None] = []
        self._taught: Taught | None = None
        self._lookup: Lookup | None = None
        self._logits: Tensor | None = None
        self._num_other = 1
        self._device = next(head.parameters()).device
        self._num_ids = len(head.weight)  # pyright: ignore[reportArgumentType]
        # First among the hooks: FSDP2's own, which it has put there before, may take the parameters away again.
        head.register_forward_hook(self._after_head, prepend=True, with_kwargs=True)

    def put_into(self, names: dict[str, Any]) -> None:
        """Take the place of a trainer's functions among its module's names. Raises ConfigError where one is missing."""
        check_names(names)
        for name in versions.loaders(names):
            names[name] = self._reading(names[name])
        names["forward"] = self._announcing(names["forward"])
        names["compute_loss"] = self._adding(names["compute_loss"])

    def start_batch(self, batches: list[Mapping[str, Any]]) -> None:
        """Read one step's micro batches, on all ranks. Raises ConfigError for what can't be distilled."""
        weights = self._weights()
        self._waiting = [self._own_share(batch, weights) for batch in batches]
        others = sum(int((~taught.in_rl).sum()) for taught in self._waiting if taught is not None)
        self._num_other = max(self._ranks.sum(others, self._device), 1)

    def next_forward(self, num_rows: int) -> None:
        """Say that the head sees the next micro batch, of so many rows on this rank."""
        assert self._waiting, "forward was called more often than the batch has micro batches"
        self._taught, self._logits, self._lookup = self._waiting.pop(0), None, None
        if self._taught is not None:
            # A token is predicted at the position before it.
            rows = self._taught.places - 1 - self._ranks.cp_rank * num_rows
            ids = torch.cat([self._taught.tokens.unsqueeze(1), self._taught.ids], dim=1)
            self._lookup = Lookup.of(rows, ids)

    def term(self, trainer_logprobs: Tensor, rl_scale: float) -> tuple[Tensor, dict[str, Tensor]] | None:
        """What is to be added to upstream's loss, and metrics of shape (1,); None where nothing is taught.

        trainer_logprobs   (n,), of the whole packed row: upstream's, of the tokens that stand there
        rl_scale           by which upstream divides its RL loss: its tokens, each as often as there are
                           context-parallel ranks, whose gradients it adds up
        """
        if self._taught is None:
            return None
        assert self._logits is not None, "the head wasn't called between forward and compute_loss"
        taught = Taught(*(one.to(trainer_logprobs.device) for one in vars(self._taught).values()))
        student = logprobs_of(self._logits, trainer_logprobs[taught.places])
        num_rl = rl_scale / self._ranks.cp_size
        # Tokens without RL loss are averaged among themselves, as upstream's own parts are: its count leaves them out.
        weights = torch.where(taught.in_rl, 1.0, num_rl / self._num_other)
        total, metrics = student.new_zeros(()), {}
        for hinted, weight in self._weights().items():
            chosen = (self._taught.hinted == hinted).nonzero().flatten().to(student.device)
            if len(chosen):
                loss, said = self._distill(student[chosen], taught[chosen], weights[chosen], weight)
                total = total + loss
                names = {name: f"distill_{KINDS[hinted]}/{name.rpartition('/')[2]}" for name in said}
                metrics |= {names[name]: value.detach().reshape(1) for name, value in said.items()}
        self._taught = self._logits = None
        return total / num_rl, metrics

    def _distill(
        self, student: Tensor, taught: Taught, weights: Tensor, tau: float
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        from composer_prime.losses.distill import DistillInputs, distill_loss

        inputs = DistillInputs(
            student_logprobs=student,
            teacher_logprobs=taught.logprobs,
            mask=torch.ones_like(taught.in_rl),
            weights=weights,
        )
        outputs = distill_loss(inputs, tau=tau, divergence=self._config.divergence, jsd_alpha=self._config.jsd_alpha)
        return outputs.loss, outputs.metrics

    def _weights(self) -> dict[bool, float]:
        """By whether a teacher is hinted, its weight in this step; upstream counts steps from 1."""
        step = self._progress().step - 1
        weights = {True: weight_at(self._config.hint_tau, step), False: weight_at(self._config.replay_tau, step)}
        return {hinted: weight for hinted, weight in weights.items() if weight > 0}

    def _own_share(self, batch: Mapping[str, Any], weights: Mapping[bool, float]) -> Taught | None:
        taught = read(batch)
        if taught is None:
            return None
        num_rows = batch["input_ids"].shape[1] // self._ranks.cp_size
        start = self._ranks.cp_rank * num_rows
        taught = taught.between(start, start + num_rows)
        on = torch.tensor([hinted in weights for hinted in taught.hinted.tolist()], dtype=torch.bool)
        taught = taught[on]
        if not len(taught):
            return None
        if (largest := int(taught.ids.max())) >= self._num_ids:
            raise ConfigError(
                f"a taught token has candidate {largest}, and the policy's head has the ids 0 to {self._num_ids - 1}: "
                "its teacher has another vocabulary; ask one with the policy's tokenizer, or take [trainer.distill] "
                "away"
            )
        return taught

    def _after_head(self, head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The head's output, with our logits in it. Here W is whole and in its dtype, however it is sharded or tied."""
        if self._lookup is None:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        temperature, known = kwargs.get("temperature"), output.get("logits")
        self._logits = logits_at(
            hidden.flatten(0, -2),
            head.weight,  # pyright: ignore[reportArgumentType]
            self._lookup.to(hidden.device),
            bias=getattr(head, "bias", None),
            softcap=getattr(head, "softcap", None),
            temperature=None if temperature is None else temperature.flatten(),
            known=None if known is None else known.flatten(0, -2),
        )
        self._lookup = None
        return {**output, OUTPUT: self._logits}

    def _reading(self, loader: type[Any]) -> type[Any]:
        adapter = self

        class ReadLoader(loader):
            """Upstream's loader, whose batches are read before they are trained on."""

            def get_batch(self) -> list[Any]:
                batches = super().get_batch()
                with ending_in_one_line(every_rank=True):
                    adapter.start_batch(batches)
                return batches

        functools.update_wrapper(ReadLoader, loader, updated=())
        return ReadLoader

    def _announcing(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def announced(model: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            labels = kwargs.get("labels")
            self.next_forward((input_ids if labels is None else labels).shape[1])
            return forward(model, input_ids, *args, **kwargs)

        return announced

    def _adding(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(compute_loss)

        @functools.wraps(compute_loss)
        def added(*args: Any, **kwargs: Any) -> Any:
            loss, metrics = compute_loss(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            term = self.term(torch.cat(list(given["trainer_logprobs"])), given["rl_scale"])
            return (loss, metrics) if term is None else (loss + term[0], metrics | term[1])

        return added


def install(config: DistillConfig, frame: FrameType) -> None:
    """Add the term to the trainer that runs in `frame` and is importing its loss.

    Raises ConfigError where its settings, its head or its functions aren't such that the term can be computed.
    """
    trainer = Trainer.of(frame)
    if getattr(trainer.config, "enable_router_replay", False):
        raise ConfigError(
            "trainer.enable_router_replay must be off with [trainer.distill], whose candidates ride in its field: turn "
            "it off, or take [trainer.distill] away"
        )
    missing = [name for name in ("model", "parallel_dims") if name not in frame.f_locals]
    if missing:
        raise lacking([f"{name} where it makes its loss" for name in missing])
    head = getattr(frame.f_locals["model"], "lm_head", None)
    ranks = Ranks.of(frame.f_locals["parallel_dims"])
    adapter = Adapter(config, check_head(head), ranks, lambda: trainer.progress)
    adapter.put_into(frame.f_globals)
    logger.info("distill: %s", config.model_dump_json())


def check_head(head: Any) -> nn.Module:
    """The head. Raises ConfigError for one whose arithmetic we don't know; FSDP2's class of one of `HEADS` is one."""
    if not any(base.__name__ in HEADS for base in type(head).__mro__):
        raise ConfigError(
            f"the model's head (lm_head: {type(head).__name__}) isn't one that [trainer.distill] knows "
            f"({', '.join(HEADS)}): don't adapt it by LoRA or fuse its loss, or take [trainer.distill] away"
        )
    return head


def check_names(names: Mapping[str, Any]) -> None:
    """Raise ConfigError where a trainer's module lacks what is wrapped."""
    takes = {"forward": ("input_ids", "labels"), "compute_loss": ("trainer_logprobs", "rl_scale")}
    missing = [
        f"{name}({', '.join(parameters)})"
        for name, parameters in takes.items()
        if not callable(names.get(name)) or not {*parameters} <= {*inspect.signature(names[name]).parameters}
    ]
    if missing:
        raise lacking(missing)


def lacking(missing: list[str]) -> ConfigError:
    """The error of a PRIME-RL that lacks something, in one line."""
    return ConfigError(
        f"this PRIME-RL lacks {', '.join(missing)}, which [trainer.distill] needs: install one that was tested "
        f"({versions.TESTED}), or take [trainer.distill] away"
    )
