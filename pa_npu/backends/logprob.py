"""Log-prob and entropy of target tokens from hidden states, without ever holding the logits of all rows.

The LM head, the temperature, the vocabulary-parallel log-softmax and their backward are one
autograd function over chunks of rows. Forward costs one MAX and one stacked SUM all-reduce per
chunk over the tensor-parallel group; backward recomputes a chunk's logits from the hidden states
and needs no collective but the sum of the hidden states' gradient. The last chunk's logits are
kept, because backward starts with them; so one chunk's logits exist at a time, and a microbatch of
one chunk recomputes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def vocab_parallel_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    cap: float | None = None,
    chunk: int = 2048,
    group: dist.ProcessGroup | None = None,
    entropy: bool = True,
    entropy_grad: bool = False,
    reduce_hidden_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p(target) [rows], entropy [rows]) of softmax(logits / temperature), fp32 (fp64 for fp64
    input).

    logits: hidden @ weight.T, or cap * tanh(hidden @ weight.T / cap) with a soft cap.

    hidden: [rows, hidden_size], the same on all ranks of `group`.
    weight: [rows of the LM head on this rank, hidden_size]; equally many on every rank, in rank
    order.
    vocab_size: rows over all ranks that are tokens; those beyond are padding and no part of the
    softmax.
    targets: int64 [rows], ids in the whole vocabulary. chunk: rows at a time.
    entropy: compute it, else zeros are returned. entropy_grad: whether gradients flow through it.
    reduce_hidden_grad: sum the gradient of `hidden` over `group`; False where the caller's backward
    does (SP).
    """
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    first_token = 0 if group is None else dist.get_rank(group) * weight.shape[0]
    if vocab_size <= first_token:
        raise ValueError(
            f"vocab_size: {vocab_size} tokens leave none for the rank that starts at "
            f"{first_token}; use fewer"
        )
    weight = weight[: vocab_size - first_token]
    settings = (
        1.0 / temperature,
        cap,
        chunk,
        group,
        first_token,
        entropy,
        entropy and entropy_grad,
        reduce_hidden_grad,
    )
    result: tuple[torch.Tensor, torch.Tensor] = _ChunkedLogprob.apply(
        hidden, weight, targets, settings
    )
    return result


class _ChunkedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        settings: tuple[Any, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inverse_temperature, cap, chunk, group, first_token, want_entropy, entropy_grad, _ = (
            settings
        )
        num_rows = hidden.shape[0]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        local_targets, is_local = _localise(targets, first_token, weight.shape[0])
        logprobs = torch.empty(num_rows, dtype=wide, device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        maxima, log_sums = torch.empty_like(logprobs), torch.empty_like(logprobs)
        kept = None
        for start in range(0, num_rows, chunk):
            rows = slice(start, min(start + chunk, num_rows))
            kept = None  # before the next chunk's logits exist
            logits = _logits(hidden[rows], weight, inverse_temperature, wide, cap)
            maximum = logits.amax(-1)
            if group is not None:
                dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            shifted = logits.sub_(maximum.unsqueeze(-1))
            picked = (
                shifted.gather(-1, local_targets[rows].unsqueeze(-1)).squeeze(-1) * is_local[rows]
            )
            exponentials = shifted.exp()
            sums = [exponentials.sum(-1), picked]
            if want_entropy:
                sums.append(exponentials.mul_(shifted).sum(-1))
            total = torch.stack(sums)
            if group is not None:
                dist.all_reduce(total, group=group)
            log_sum = total[0].log()
            logprobs[rows] = total[1] - log_sum
            if want_entropy:
                entropy[rows] = log_sum - total[2] / total[0]
            maxima[rows], log_sums[rows] = maximum, log_sum
            kept = shifted
            del logits, shifted, exponentials, sums
        ctx.save_for_backward(hidden, weight, local_targets, is_local, maxima, log_sums, entropy)
        ctx.settings = settings
        ctx.kept = kept if any(ctx.needs_input_grad[:2]) else None
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden, weight, local_targets, is_local, maxima, log_sums, entropy = ctx.saved_tensors
        inverse_temperature, cap, chunk, group, _, _, entropy_grad, reduce_hidden_grad = (
            ctx.settings
        )
        grad_logprobs, grad_entropy = grads
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        num_rows = hidden.shape[0]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = (
            _WeightGradient(weight, num_chunks=-(-num_rows // chunk)) if need_weight else None
        )
        shifted, ctx.kept = ctx.kept, None
        for start in reversed(range(0, num_rows, chunk)):
            rows = slice(start, min(start + chunk, num_rows))
            if shifted is None:
                shifted = _logits(hidden[rows], weight, inverse_temperature, maxima.dtype, cap)
                shifted.sub_(maxima[rows].unsqueeze(-1))
            log_softmax = shifted - log_sums[rows].unsqueeze(-1)
            # of the cap: 1 - tanh^2, and the tanh is the capped logit over the cap
            slope = (
                None
                if cap is None
                else (shifted + maxima[rows].unsqueeze(-1))
                .div_(inverse_temperature * cap)
                .square_()
                .neg_()
                .add_(1)
            )
            shifted = None
            # d log p(t) / d logit_j = [j = t] - p_j;  d entropy / d logit_j = -p_j (log p_j +
            #                                          entropy)
            down = grad_logprobs[rows]
            if entropy_grad:
                softmax = log_softmax.exp()
                factor = log_softmax.add_(entropy[rows].unsqueeze(-1)).mul_(
                    grad_entropy[rows].unsqueeze(-1)
                )
                grad_logits = softmax.mul_(factor.add_(down.unsqueeze(-1)).neg_())
            else:
                grad_logits = log_softmax.exp_().mul_(-down.unsqueeze(-1))
            grad_logits.scatter_add_(
                -1, local_targets[rows].unsqueeze(-1), (down * is_local[rows]).unsqueeze(-1)
            )
            if slope is not None:
                grad_logits.mul_(slope)
            grad_narrow = grad_logits.mul_(inverse_temperature).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_narrow @ weight
            if grad_weight is not None:
                grad_weight.add(grad_narrow, hidden[rows])
            del log_softmax, grad_logits, grad_narrow  # before the next chunk's logits exist
        if grad_hidden is not None and group is not None and reduce_hidden_grad:
            dist.all_reduce(grad_hidden, group=group)
        return grad_hidden, None if grad_weight is None else grad_weight.result(), None, None


def _localise(
    targets: torch.Tensor, first_token: int, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Target ids relative to this rank's tokens (0 where foreign), and whether they are its own."""
    local = targets - first_token
    is_local = (local >= 0) & (local < num_tokens)
    return local.masked_fill(~is_local, 0), is_local


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    inverse_temperature: float,
    dtype: torch.dtype,
    cap: float | None,
) -> torch.Tensor:
    """A chunk's scaled logits in `dtype`; rounded to the weight's type first, as the engine
    computes them.
    """
    logits = (hidden @ weight.t()).to(dtype)
    if cap is not None:
        logits = logits.div_(cap).tanh_().mul_(cap)
    return logits if inverse_temperature == 1.0 else logits.mul_(inverse_temperature)


class _WeightGradient:
    """Sum of the chunks' gradients of the LM head; several are summed in fp32, because bf16 would
    lose small ones.
    """

    def __init__(self, weight: torch.Tensor, num_chunks: int) -> None:
        self._dtype = weight.dtype
        is_narrow = weight.dtype in (torch.bfloat16, torch.float16)
        self._sum_dtype = torch.float32 if is_narrow and num_chunks > 1 else weight.dtype
        self._sum: torch.Tensor | None = None
        self._shape, self._device = weight.shape, weight.device

    def add(self, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
        if self._sum is None:
            self._sum = (grad_logits.t() @ hidden).to(self._sum_dtype)
        elif self._sum_dtype == self._dtype:
            self._sum.addmm_(grad_logits.t(), hidden)
        else:
            self._sum += grad_logits.t() @ hidden

    def result(self) -> torch.Tensor:
        if self._sum is None:  # no rows
            return torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._sum.to(self._dtype)
