"""Log-prob and entropy of target tokens from hidden states, without ever holding the logits of all rows.

The LM head, the temperature, the vocabulary-parallel log-softmax and their backward are one
autograd function over chunks of rows. Forward costs one MAX and one stacked SUM all-reduce per
chunk over the tensor-parallel group; backward recomputes a chunk's logits from the hidden states
and needs no collective but the sum of the hidden states' gradient. The last chunk's logits are
kept, because backward starts with them; so one chunk's logits exist at a time, and a microbatch of
one chunk recomputes nothing.

Beside the targets, further tokens of every row may be scored: those that are given, or the most
likely ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Of the log-prob of all tokens that are no choice of their row: below it they count as if they had
# it, so that nothing divides by a sum that is 0.
_LEAST_LOG_REST = -60.0


class RowScores(NamedTuple):
    """Scores of N rows, fp32 (fp64 for fp64 input).

    logprobs: [N], of the targets. entropy: [N]; zeros where nobody asked.
    choices: int64 [N, k], tokens of every row, no two alike. choice_logprobs: [N, k + 1], theirs,
    and last that of all other tokens together. Both None where nobody asked.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    choices: torch.Tensor | None = None
    choice_logprobs: torch.Tensor | None = None


def score_rows(
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
    choices: torch.Tensor | None = None,
    most_likely: MostLikely | None = None,
) -> RowScores:
    """Log-probs and entropy of softmax(logits / temperature).

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
    choices: int64 [rows, k], tokens whose log-probs are wanted too, with gradient; no two of a row
    alike. most_likely: choose them, in place of `choices`.
    """
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    first_token = 0 if group is None else dist.get_rank(group) * weight.shape[0]
    if vocab_size <= first_token:
        raise ValueError(
            f"vocab_size: {vocab_size} tokens leave none for the rank that starts at "
            f"{first_token}; use fewer"
        )
    if most_likely is not None and most_likely.count > min(most_likely.below, vocab_size):
        raise ValueError(
            f"most_likely: {most_likely.count} tokens of {min(most_likely.below, vocab_size)}; "
            "ask for fewer"
        )
    settings = _Settings(
        inverse_temperature=1.0 / temperature,
        cap=cap,
        chunk=chunk,
        group=group,
        first_token=first_token,
        entropy=entropy,
        entropy_grad=entropy and entropy_grad,
        reduce_hidden_grad=reduce_hidden_grad,
        most_likely=most_likely,
    )
    weight = weight[: vocab_size - first_token]
    scores = RowScores(*_ChunkedLogprob.apply(hidden, weight, targets, choices, settings))
    return scores if choices is None else scores._replace(choices=choices)


@dataclass(frozen=True)
class MostLikely:
    """The `count` most likely tokens of a row, of those with an id below `below`."""

    count: int
    below: int


@dataclass(frozen=True)
class _Settings:
    """See score_rows. first_token: of this rank's part of the vocabulary."""

    inverse_temperature: float
    cap: float | None
    chunk: int
    group: dist.ProcessGroup | None
    first_token: int
    entropy: bool
    entropy_grad: bool
    reduce_hidden_grad: bool
    most_likely: MostLikely | None


class _ChunkedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        choices: torch.Tensor | None,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        group, first_token = settings.group, settings.first_token
        num_rows = hidden.shape[0]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        local_targets, is_local = _localise(targets, first_token, weight.shape[0])
        logprobs = torch.empty(num_rows, dtype=wide, device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        maxima, log_sums = torch.empty_like(logprobs), torch.empty_like(logprobs)
        if settings.most_likely is not None:
            choices = targets.new_empty(num_rows, settings.most_likely.count)
        choice_logprobs = None
        if choices is not None:
            choice_logprobs = logprobs.new_empty(num_rows, choices.shape[1] + 1)
        kept = None
        for start in range(0, num_rows, settings.chunk):
            rows = slice(start, min(start + settings.chunk, num_rows))
            kept = None  # before the next chunk's logits exist
            logits = _logits(hidden[rows], weight, settings.inverse_temperature, wide, settings.cap)
            maximum = logits.amax(-1)
            if group is not None:
                dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            shifted = logits.sub_(maximum.unsqueeze(-1))
            picked = (
                shifted.gather(-1, local_targets[rows].unsqueeze(-1)).squeeze(-1) * is_local[rows]
            )
            exponentials = shifted.exp()
            sums = [exponentials.sum(-1), picked]
            if settings.most_likely is not None and choices is not None:
                choices[rows] = _most_likely(shifted, settings.most_likely, first_token, group)
            if choices is not None:
                sums += _of_choices(shifted, exponentials, choices[rows], first_token)
            if settings.entropy:
                sums.append(exponentials.mul_(shifted).sum(-1))
            total = torch.stack(sums)
            if group is not None:
                dist.all_reduce(total, group=group)
            log_sum = total[0].log()
            logprobs[rows] = total[1] - log_sum
            if choice_logprobs is not None:
                width = choice_logprobs.shape[1]
                of_choices = total[2 : 2 + width]
                of_choices[-1].log_()
                choice_logprobs[rows] = (of_choices - log_sum).t()
                choice_logprobs[rows, -1].clamp_(min=_LEAST_LOG_REST)
            if settings.entropy:
                entropy[rows] = log_sum - total[-1] / total[0]
            maxima[rows], log_sums[rows] = maximum, log_sum
            kept = shifted
            del logits, shifted, exponentials, sums
        log_rests = None if choice_logprobs is None else choice_logprobs[:, -1].clone()
        ctx.save_for_backward(
            hidden,
            weight,
            local_targets,
            is_local,
            maxima,
            log_sums,
            entropy,
            choices,
            log_rests,
        )
        ctx.settings = settings
        ctx.kept = kept if any(ctx.needs_input_grad[:2]) else None
        if not settings.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        chosen = choices if settings.most_likely is not None else None
        return logprobs, entropy, chosen, choice_logprobs

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        hidden, weight, local_targets, is_local = ctx.saved_tensors[:4]
        maxima, log_sums, entropy, choices, log_rests = ctx.saved_tensors[4:]
        settings: _Settings = ctx.settings
        forward = _ForwardPass(
            local_targets=local_targets,
            is_local=is_local,
            maxima=maxima,
            log_sums=log_sums,
            entropy=entropy,
            choices=choices,
            log_rests=log_rests,
            settings=settings,
        )
        chunk, group = settings.chunk, settings.group
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
                shifted = forward.shifted_logits(rows, hidden[rows], weight)
            grad_logits = forward.gradient(rows, shifted, grads).to(weight.dtype)
            shifted = None
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight.add(grad_logits, hidden[rows])
            del grad_logits  # before the next chunk's logits exist
        if grad_hidden is not None and group is not None and settings.reduce_hidden_grad:
            dist.all_reduce(grad_hidden, group=group)
        grad = None if grad_weight is None else grad_weight.result()
        return grad_hidden, grad, None, None, None


@dataclass(frozen=True, eq=False)
class _ForwardPass:
    """The results of the forward pass that backward needs beside its inputs.

    local_targets, is_local: as _localise returns them. maxima: [rows], of the logits.
    log_sums: [rows], log of the sum of exp(logit - maximum). log_rests: [rows], log-prob of all
    tokens that are no choice.
    """

    local_targets: torch.Tensor
    is_local: torch.Tensor
    maxima: torch.Tensor
    log_sums: torch.Tensor
    entropy: torch.Tensor
    choices: torch.Tensor | None
    log_rests: torch.Tensor | None
    settings: _Settings

    def shifted_logits(
        self, rows: slice, hidden: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Returns a chunk's logits less their rows' maxima, computed again."""
        settings = self.settings
        logits = _logits(
            hidden, weight, settings.inverse_temperature, self.maxima.dtype, settings.cap
        )
        return logits.sub_(self.maxima[rows].unsqueeze(-1))

    def gradient(
        self, rows: slice, shifted: torch.Tensor, grads: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Returns the gradient at a chunk's products of hidden states and LM head, [rows, tokens of
        this rank].

        shifted: their logits less the maxima, which are overwritten.
        grads: those at the outputs of the forward pass, for all rows.
        """
        settings = self.settings
        grad_logprobs, grad_entropy, _, grad_choices = grads
        slope = None if settings.cap is None else self._slope_of_cap(rows, shifted, settings.cap)
        log_softmax = shifted.sub_(self.log_sums[rows].unsqueeze(-1))
        # d log p(t) / d logit_j = [j = t] - p_j
        # d entropy / d logit_j = -p_j (log p_j + entropy)
        down = grad_logprobs[rows]
        if self.choices is not None:
            down = down + grad_choices[rows].sum(-1)
        if settings.entropy_grad:
            softmax = log_softmax.exp()
            factor = log_softmax.add_(self.entropy[rows].unsqueeze(-1))
            factor.mul_(grad_entropy[rows].unsqueeze(-1)).add_(down.unsqueeze(-1)).neg_()
        else:
            softmax = log_softmax.exp_()
            factor = -down.unsqueeze(-1)
        if self.choices is None or self.log_rests is None:
            grad_logits = softmax.mul_(factor)
        else:
            grad_logits = _with_choices(
                softmax,
                factor,
                grad_choices[rows],
                self.log_rests[rows],
                self.choices[rows],
                settings.first_token,
            )
        at_targets = (grad_logprobs[rows] * self.is_local[rows]).unsqueeze(-1)
        grad_logits.scatter_add_(-1, self.local_targets[rows].unsqueeze(-1), at_targets)
        if slope is not None:
            grad_logits.mul_(slope)
        return grad_logits.mul_(settings.inverse_temperature)

    def _slope_of_cap(self, rows: slice, shifted: torch.Tensor, cap: float) -> torch.Tensor:
        """Returns the soft cap's derivative, 1 - tanh^2; the tanh is the capped logit over the
        cap.
        """
        capped = shifted + self.maxima[rows].unsqueeze(-1)
        tanh = capped.div_(self.settings.inverse_temperature * cap)
        return tanh.square_().neg_().add_(1)


def _most_likely(
    shifted: torch.Tensor,
    most_likely: MostLikely,
    first_token: int,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Returns the most likely tokens of each row over all ranks, int64 [rows, count]; the same on
    all ranks.

    shifted: [rows, tokens of this rank], logits less the row's maximum.
    """
    count = most_likely.count
    choosable = shifted[:, : max(0, most_likely.below - first_token)]
    values, ids = choosable.topk(min(count, choosable.shape[1]), dim=-1)
    if group is None:
        return ids
    ids = ids + first_token
    missing = count - values.shape[1]
    values = torch.nn.functional.pad(values, (0, missing), value=float("-inf"))
    ids = torch.nn.functional.pad(ids, (0, missing))
    num_ranks = dist.get_world_size(group)
    all_values = [torch.empty_like(values) for _ in range(num_ranks)]
    all_ids = [torch.empty_like(ids) for _ in range(num_ranks)]
    dist.all_gather(all_values, values.contiguous(), group=group)
    dist.all_gather(all_ids, ids.contiguous(), group=group)
    best = torch.cat(all_values, dim=-1).topk(count, dim=-1).indices
    return torch.cat(all_ids, dim=-1).gather(-1, best)


def _of_choices(
    shifted: torch.Tensor, exponentials: torch.Tensor, choices: torch.Tensor, first_token: int
) -> list[torch.Tensor]:
    """Returns this rank's part of the choices' shifted logits, [rows] each, and of the sum of the
    exponentials of all others.

    The others are summed by themselves, since 1 minus the choices' part has no digits where they
    have nearly all. `exponentials` is changed and put back.
    """
    local, is_local = _localise(choices, first_token, shifted.shape[1])
    picked = exponentials.gather(-1, local) * is_local
    exponentials.scatter_add_(-1, local, -picked)  # exactly 0
    rest = exponentials.sum(-1)
    exponentials.scatter_add_(-1, local, picked)
    return [*(shifted.gather(-1, local) * is_local).unbind(-1), rest]


def _with_choices(
    softmax: torch.Tensor,
    factor: torch.Tensor,
    grad_choices: torch.Tensor,
    log_rest: torch.Tensor,
    choices: torch.Tensor,
    first_token: int,
) -> torch.Tensor:
    """Returns softmax * factor with the choices' own part of the gradient, [rows, tokens of this
    rank].

        d log p(c) / d logit_j    = [j = c] - p_j
        d log rest / d logit_j    = [j is no choice] p_j / rest - p_j

    factor: [rows, tokens] or [rows, 1], with the -p_j of both. grad_choices: [rows, k + 1].
    `softmax` is overwritten.
    """
    local, is_local = _localise(choices, first_token, softmax.shape[1])
    picked = softmax.gather(-1, local) * is_local
    of_choices = factor if factor.shape[1] == 1 else factor.gather(-1, local)
    at_choices = picked * of_choices + grad_choices[:, :-1] * is_local
    # the choices have no part in the rest, and p_j / rest may be large
    softmax.scatter_add_(-1, local, -picked)
    of_rest = grad_choices[:, -1] * torch.exp(-log_rest)
    grad_logits = softmax.mul_(factor + of_rest.unsqueeze(-1))
    return grad_logits.scatter_add_(-1, local, at_choices)


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
    """Returns a chunk's scaled logits in `dtype`; rounded to the weight's type first, as the engine
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
