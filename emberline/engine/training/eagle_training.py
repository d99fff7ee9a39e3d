"""Training an EAGLE-3 head on replies that the target model wrote itself.

Training-time test: the head is unrolled over its own outputs as it will be when it drafts, `depth` tokens from every
position at once. At draft step s, row i stands for the token s positions behind its root i: it attends to the roots up
to i, whose hidden states came from the target, and to the rows of its own chain at steps 1 .. s.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.kernels.backend import MLP, GroupedQueryAttention
from emberline.models.decoder import Decoder
from emberline.models.eagle3 import Eagle3Head

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    steps: int = 2000
    batch: int = 32  # sequences
    depth: int = 6  # draft tokens that are unrolled
    decay: float = 0.8  # of the loss, from one draft token to the next
    learning_rate: float = 1e-3
    warmup: int = 100  # steps
    clip: float = 0.5  # norm of the gradient
    report_every: int = 100  # steps
    seed: int = 0


@dataclass(slots=True)
class TargetOutputs:
    """Outputs of the target for sequences of one padded length. All tensors are on the training device."""

    token_ids: Tensor  # int64 [sequences, length]
    in_reply: Tensor  # bool [sequences, length]: the target wrote this token
    taps: Tensor  # [sequences, length, 3 * hidden]
    hidden: Tensor  # [sequences, length, hidden]: normed, the LM head's input
    best: Tensor  # int64 [sequences, length]: the target's most likely next token

    def __len__(self) -> int:
        return len(self.token_ids)

    def take(self, rows: Tensor) -> "TargetOutputs":
        return TargetOutputs(*(t[rows] for t in (self.token_ids, self.in_reply, self.taps, self.hidden, self.best)))


@dataclass(slots=True)
class Curve:
    """Loss and accepted length on held-out sequences, as training went on."""

    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)  # tokens of a verification, the bonus token included
    seconds: list[float] = field(default_factory=list)  # since training began


def draft_vocabulary(replies: Iterable[Tensor], vocab_size: int, size: int) -> Tensor:
    """The `size` most frequent token ids of the replies, ascending."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in replies:
        counts += torch.bincount(ids.cpu(), minlength=vocab_size)
    ranked = torch.argsort(counts, descending=True, stable=True)[:size]
    return ranked.sort().values


def set_vocabulary(head: Eagle3Head, ids: Tensor) -> None:
    head.d2t.copy_(ids.to(head.d2t.device) - torch.arange(len(ids), device=head.d2t.device))


@torch.no_grad()
def start_from(head: Eagle3Head, target: Decoder) -> None:
    """Begin as the target's own end: its last layer, where that has the head's shape, its norm and its LM head.

    The head then draws from the last tap alone, which is nearly the final state; training adds the rest.
    """
    hidden, last = head.config.hidden_size, target.layers[-1]
    head.lm_head.weight.copy_(target.head.weight[_draft_ids(head)])
    head.norm.copy_(target.norm)
    head.fc.weight.zero_()
    head.fc.weight[:, -hidden:] = torch.eye(hidden)
    attn, mlp = last.attention, last.feed_forward
    layer = head.layer
    own = (layer.q_proj, layer.k_proj, layer.v_proj)
    rows = [part.weight.shape[0] for part in own]
    if isinstance(attn, GroupedQueryAttention) and attn.qkv.weight.shape[0] == sum(rows):
        for part, weight in zip(own, attn.qkv.weight.split(rows)):
            part.weight[:, hidden:] = weight
        layer.o_proj.weight.copy_(attn.output.weight)
        layer.hidden_norm.copy_(attn.norm)
    if isinstance(mlp, MLP) and mlp.down.weight.shape == layer.down_proj.weight.shape:
        gate, up = mlp.gate_up.weight.chunk(2)
        layer.gate_proj.weight.copy_(gate)
        layer.up_proj.weight.copy_(up)
        layer.down_proj.weight.copy_(mlp.down.weight)
        layer.mlp_norm.copy_(mlp.norm)


def train(
    head: Eagle3Head,
    embedding: Tensor,
    lm_head: Tensor,
    data: TargetOutputs,
    held_out: TargetOutputs,
    settings: TrainingSettings,
    report: Callable[[str], None] = _log.info,
) -> Curve:
    """Train in place. `embedding` and `lm_head` are the target's matrices [vocab, hidden]."""
    device = embedding.device
    generator = torch.Generator().manual_seed(settings.seed)
    matrices = [p for p in head.parameters() if p.dim() > 1]
    vectors = [p for p in head.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings))
    target_rows = lm_head[_draft_ids(head)]
    curve, began_s = Curve(), time.monotonic()

    def measure(n_steps: int) -> None:
        held_loss, accepted = evaluate(head, embedding, target_rows, held_out, settings)
        curve.steps.append(n_steps)
        curve.loss.append(round(held_loss, 4))
        curve.accepted.append(round(accepted, 4))
        curve.seconds.append(round(time.monotonic() - began_s, 1))
        report(f"step {n_steps}: loss {held_loss:.3f}, accepted length {accepted:.3f}, {curve.seconds[-1]:.0f} s")

    measure(0)
    for step in range(settings.steps):
        rows = torch.randint(len(data), (settings.batch,), generator=generator).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, _ = unrolled(head, embedding, target_rows, data.take(rows), settings.depth, settings.decay)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        last = step + 1 == settings.steps
        if last or (step + 1) % settings.report_every == 0:
            measure(step + 1)
    return curve


def _rate(step: int, settings: TrainingSettings) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    warmup = min(settings.warmup, settings.steps)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, settings.steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0)))


@torch.no_grad()
def evaluate(
    head: Eagle3Head, embedding: Tensor, target_rows: Tensor, data: TargetOutputs, settings: TrainingSettings
) -> tuple[float, float]:
    """Loss, and the mean number of tokens that a verification of `depth` greedy draft tokens yields.

    Replies must be the target's greedy ones: a draft is right where it is the token that follows.
    """
    losses, accepted, n = 0.0, 0.0, 0
    for start in range(0, len(data), settings.batch):
        part = data.take(torch.arange(start, min(start + settings.batch, len(data)), device=embedding.device))
        with torch.autocast(embedding.device.type, torch.bfloat16, enabled=embedding.device.type == "cuda"):
            loss, right = unrolled(head, embedding, target_rows, part, settings.depth, settings.decay)
        roots = part.in_reply[:, 1:-1] & part.in_reply[:, 2:]  # a draft after token i + 1 continues a reply
        leading = torch.cumprod(right.int(), dim=0).sum(0)[:, :-2]
        losses += loss.item() * len(part)
        accepted += leading[roots].sum().item()
        n += int(roots.sum().item())
    return losses / len(data), 1 + accepted / max(1, n)


def unrolled(
    head: Eagle3Head, embedding: Tensor, target_rows: Tensor, data: TargetOutputs, depth: int, decay: float
) -> tuple[Tensor, Tensor]:
    """The loss over `depth` draft steps, and which greedy drafts are right: bool [depth, batch, length].

    At draft step s (from 0), row i embeds token i + 1 + s and predicts the target's distribution behind it.
    """
    length = data.token_ids.shape[1]
    ids = _draft_ids(head)
    to_draft = torch.full((embedding.shape[0],), -1, dtype=torch.int64, device=ids.device)
    to_draft[ids] = torch.arange(len(ids), device=ids.device)
    hidden = head.combine(data.taps)
    positions = torch.arange(1, length + 1, device=ids.device)
    keys, values, losses, right = [], [], [], []
    weights = [decay**step for step in range(depth)]
    with torch.no_grad():
        target = F.softmax(F.linear(data.hidden, target_rows).float(), dim=-1)
    for step in range(depth):
        tokens = _ahead(data.token_ids, 1 + step)
        q, k, v = head.layer.attention_inputs(embedding[tokens], hidden, positions + step)
        keys.append(k)
        values.append(v)
        hidden = head.layer.finish(chain_attention(q, keys, values), hidden)
        logits = head.logits(hidden).float()
        counted = _ahead(data.in_reply, 2 + step, fill=False) & (to_draft[_ahead(data.best, 1 + step)] >= 0)
        right.append((ids[logits.argmax(-1)] == _ahead(data.token_ids, 2 + step)) & counted)
        n = max(0, length - 1 - step)  # rows whose token exists
        cross = F.cross_entropy(logits[:, :n].flatten(0, 1), target[:, 1 + step :].flatten(0, 1), reduction="none")
        losses.append(weights[step] * (cross * counted[:, :n].flatten()).sum() / counted.sum().clamp(min=1))
    return torch.stack(losses).sum() / sum(weights), torch.stack(right)


def chain_attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Rows attend to the roots before them (keys[0], causal) and to their own chain (keys[1:], the same row).

    q: [batch, rows, heads, dim]; keys and values: [batch, rows, kv_heads, dim] each.
    """
    group = q.shape[2] // keys[0].shape[2]
    scale = q.shape[-1] ** -0.5
    q = q.transpose(1, 2)  # [batch, heads, rows, dim]
    spread = [each.transpose(1, 2).repeat_interleave(group, dim=1) for each in (*keys, *values)]
    k, v = spread[: len(keys)], spread[len(keys) :]
    rows = q.shape[2]
    causal = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()
    scores = [(q @ k[0].transpose(-1, -2)).float().masked_fill(~causal, -torch.inf)]
    scores += [(q * each).sum(-1, keepdim=True).float() for each in k[1:]]
    weights = (torch.cat(scores, dim=-1) * scale).softmax(-1).to(v[0].dtype)
    out: Tensor = weights[..., :rows] @ v[0]
    for step, each in enumerate(v[1:]):
        out = out + weights[..., rows + step, None] * each
    return out.transpose(1, 2)


def _ahead(x: Tensor, n: int, fill: bool | None = None) -> Tensor:
    """x[:, i + n] at row i; behind the end the last entry, or `fill`."""
    n = min(n, x.shape[1])
    tail = x[:, -1:].expand(-1, n, *x.shape[2:]) if fill is None else x.new_full((len(x), n, *x.shape[2:]), fill)
    return torch.cat([x[:, n:], tail], dim=1)


def _draft_ids(head: Eagle3Head) -> Tensor:
    return head.target_ids
