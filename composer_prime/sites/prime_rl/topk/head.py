"""The policy's logits at a few ids a token, beside a head that makes its own: no full logits, in either direction.

`z = softcap(h . W + b) / T` costs k + 1 columns a token. Its log-probability follows from the head's own of the token
that stands there: `logp[id] = z[id] - lse`, with `lse = z[token] - trainer_logprob`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ROWS = 512
"""Rows worked on at a time. With 9 ids a row and H = 4096, their columns of W are 38 MB in bf16; the backward pass
holds products of the same shape in fp32 beside them, 75 MB."""


@dataclass(frozen=True)
class Lookup:
    """Which logits are wanted: of `rows[i]` those at the ids `used[slots[i]]`.

    rows    int64 (m,); indices of hidden states; one may come twice
    used    int64 (u,); distinct ids, so that W's gradient is summed over u rows, not over the vocabulary
    slots   int64 (m, c); indices into `used`
    """

    rows: Tensor
    used: Tensor
    slots: Tensor

    @classmethod
    def of(cls, rows: Tensor, ids: Tensor) -> "Lookup":
        """From ids (m, c). To be called on the CPU: on a GPU, finding the distinct ones would wait for it."""
        used, slots = torch.unique(ids, return_inverse=True)
        return cls(rows, used, slots)

    def to(self, device: torch.device) -> "Lookup":
        """The same on a device."""
        return Lookup(*(one.to(device, non_blocking=True) for one in (self.rows, self.used, self.slots)))

    def parts(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(which rows, their hidden states' indices, their slots), `CHUNK_ROWS` at a time."""
        for start in range(0, len(self.rows), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            yield part, self.rows[part], self.slots[part]


class _LogitsAt(torch.autograd.Function):
    """The logits of a lookup before the temperature; keeps neither the columns of W nor anything as wide as V."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lookup: Lookup,
        softcap: float | None,
        known: Tensor | None,
    ) -> Tensor:
        wide = torch.promote_types(torch.float32, weight.dtype)
        logits = hidden.new_empty(lookup.slots.shape, dtype=wide)
        for part, rows, slots in lookup.parts():
            ids = lookup.used[slots]
            if known is not None:
                logits[part] = known[rows.unsqueeze(1), ids].to(wide)
                continue
            # In W's own dtype, as the head multiplies: another rounding than its lse has would let sum p exceed 1.
            here = torch.bmm(weight[ids], hidden[rows].unsqueeze(2)).squeeze(2)
            here = (here if bias is None else here + bias[ids]).to(wide)
            logits[part] = here if softcap is None else softcap * torch.tanh(here / softcap)
        ctx.save_for_backward(hidden, weight, bias, logits)
        ctx.lookup, ctx.softcap = lookup, softcap
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, logits = ctx.saved_tensors
        lookup: Lookup = ctx.lookup
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if ctx.softcap is not None:
            grad = grad * (1 - (logits / ctx.softcap).square())
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        # Frequent ids are summed thousands of times, which bf16 would lose: in fp32, and over the ids in use alone.
        sums = grad.new_zeros(len(lookup.used), hidden.shape[1]) if needs_weight else None
        for part, rows, slots in lookup.parts():
            if grad_hidden is not None:
                columns = weight[lookup.used[slots]]
                here = torch.bmm(grad[part].to(weight.dtype).unsqueeze(1), columns).squeeze(1)
                grad_hidden.index_add_(0, rows, here.to(hidden.dtype))
            if sums is not None:
                products = grad[part].unsqueeze(2) * hidden[rows].to(grad.dtype).unsqueeze(1)
                sums.index_add_(0, slots.flatten(), products.flatten(0, 1))
        grad_weight = None if sums is None else _spread(sums, lookup.used, weight)
        grad_bias = None
        if needs_bias:
            per_id = grad.new_zeros(len(lookup.used)).index_add_(0, lookup.slots.flatten(), grad.flatten())
            grad_bias = _spread(per_id, lookup.used, bias)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _spread(sums: Tensor, used: Tensor, like: Tensor) -> Tensor:
    """The sums at their ids in zeros of a parameter's shape and dtype."""
    return torch.zeros_like(like).index_copy_(0, used, sums.to(like.dtype))


def logits_at(
    hidden: Tensor,
    weight: Tensor,
    lookup: Lookup,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: Tensor | None = None,
    known: Tensor | None = None,
) -> Tensor:
    """`softcap(h . W + b) / T` at the ids of a lookup: (m, c), fp32 at least.

    hidden       (n, H)
    weight       (V, H), of hidden's dtype; bias (V,)
    softcap      bounds logits as Gemma does: `softcap * tanh(logit / softcap)`
    temperature  (n,); None: 1
    known        (n, V): the logits before the temperature, where the head has made them. Values are read from these,
                 so that they are its own to the bit; gradients go to hidden, weight and bias all the same

    Gradients are those of the dense product, within rounding: W's are summed in fp32. Once differentiable.
    """
    seen = None if known is None else known.detach()
    logits = _LogitsAt.apply(hidden, weight, bias, lookup, softcap, seen)
    return logits if temperature is None else logits / temperature[lookup.rows].unsqueeze(1).to(logits.dtype)


def logprobs_of(logits: Tensor, trainer_logprobs: Tensor) -> Tensor:
    """(m, k), nats: log-probabilities at the ids of `logits[:, 1:]`.

    logits            (m, k + 1), over the temperature; the first column is of the token that stands there
    trainer_logprobs  (m,): the head's own of that token, at the same temperature
    """
    lse = logits[:, 0] - trainer_logprobs
    return logits[:, 1:] - lse.unsqueeze(1)
