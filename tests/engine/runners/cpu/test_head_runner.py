"""A draft head behind the CPU engine: its drafts are those of the plain head, and tokens are those without it."""

import pytest
import torch

from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.cpu.torch_runner import TorchRunner, allocate_pool
from emberline.engine.speculation.head_drafter import MAX_DEPTH, HeadDrafter
from emberline.engine.speculation.speculator import Speculator
from emberline.engine.training.eagle_training import chain_attention
from emberline.engine.worker.build import build_scheduler
from emberline.kernels.reference import TorchBackend
from emberline.kv.cache import KVCache
from emberline.models.decoder import Decoder, StepInputs
from emberline.models.draft_head import DraftHead
from emberline.models.eagle3 import Eagle3Config, Eagle3Head
from emberline.models.registry import ARCHITECTURES
from emberline.protocol.token_ids import unpack
from tests.engine.fakes import request
from tests.engine.runners.cpu.test_torch_runner import run, tokens
from tests.engine.speculation.test_real_models import CONFIGS, VOCAB, OneThreadBackend, answers, plain_answers
from tests.models.random_checkpoint import RandomCheckpoint

CONFIG = CONFIGS["full"]


class EagerSpeculator(Speculator):
    """Drafts in every step, whether it pays or not."""

    def begin_step(self, n_running):
        super().begin_step(n_running)
        self.drafts = True
        return MAX_DEPTH if self._head is not None else 0

    def choose(self, seq, cells, n_guessed):
        return 0 if n_guessed else len(cells)


def head_of(seed=0, sure=1.0):
    torch.manual_seed(seed)
    head = Eagle3Head(Eagle3Config.of(CONFIG, 40))
    head.d2t.copy_(torch.arange(40))  # ids 0, 2, 4 …
    with torch.no_grad():
        head.lm_head.weight *= sure
    return head


def loop_of(backend, head=None, n_blocks=60, max_running=3, drafter=HeadDrafter):
    model = Decoder(RandomCheckpoint(CONFIG), backend(), ARCHITECTURES[CONFIG.architecture])
    limits = Limits(context_len=100, vocab_size=VOCAB, eos_ids=(0,), max_running=max_running, token_budget=64)
    drafting = None if head is None else DraftHead(head, model)
    groups = model.kv_groups if drafting is None else (*model.kv_groups, drafting.kv_group)
    sizes = [n_blocks] * len(groups)
    cache = KVCache(groups, sizes, chunk=limits.token_budget)
    speculation = None if head is None else EagerSpeculator([drafter()], 0.0)
    runner = TorchRunner(model, sizes, limits, head=drafting)
    return StepLoop(build_scheduler(cache, limits, "x", speculation=speculation), runner), model


@pytest.mark.parametrize("backend", [TorchBackend, OneThreadBackend])
def test_tokens_are_those_without_a_head(backend):
    plain, _ = plain_answers("full", backend)
    loop, _ = loop_of(backend, head_of(), n_blocks=10)
    drafted, _ = answers(loop)
    assert drafted == plain
    assert loop.load.preemptions > 0


def plain_drafts(model, head, ids, depth):
    """What the head drafts behind `ids`, from the whole sequence at once, greedily."""
    pools = [allocate_pool(group, 8, torch.device("cpu")) for group in model.kv_groups]
    n, ints = len(ids) - 1, torch.int32  # the last token is not computed yet
    step = StepInputs(
        token_ids=torch.tensor(ids[:-1], dtype=ints),
        positions=torch.arange(n, dtype=ints),
        query_starts=torch.tensor([0, n], dtype=ints),
        context_lens=torch.tensor([n], dtype=ints),
        block_tables=[torch.arange(1, 8, dtype=ints)[None] for _ in pools],
        sample_tokens=torch.empty(0, dtype=torch.int64),
    )
    _, taps = model.tapped(step, pools, head.config.taps)
    weight = TorchBackend().load_matrix([RandomCheckpoint(CONFIG).weight("token_embd.weight")]).weight
    combined = head.combine(torch.cat(taps, dim=-1))
    hidden = torch.cat([torch.zeros(1, CONFIG.hidden_size), combined])[None]
    drafts, tokens = [], list(ids)
    for _ in range(depth):
        q, k, v = head.layer.attention_inputs(weight[torch.tensor(tokens)][None], hidden, torch.arange(len(tokens)))
        out = head.layer.finish(chain_attention(q, [k], [v]), hidden)
        drafts.append(2 * int(head.logits(out[:, -1:])[0, 0].argmax()))
        tokens.append(drafts[-1])
        hidden = torch.cat([hidden, out[:, -1:]], dim=1)
    return drafts


@torch.inference_mode()
def test_drafts_are_those_of_the_plain_head():
    """Also behind accepted and rejected drafts, and prompts in several chunks."""
    head = head_of(seed=4, sure=3.0)
    seen = []

    class Watched(HeadDrafter):
        def propose(self, seqs, before):
            for seq, draft in super().propose(seqs, before):
                seen.append((unpack(bytes(seq.ids)), unpack(draft.ids)))
                yield seq, draft

    loop, model = loop_of(TorchBackend, head, max_running=1, drafter=Watched)
    deltas = run(loop, request("a", [(5 * n) % VOCAB for n in range(70)], max_tokens=24, temperature=0.0))
    assert len(tokens(deltas["a"])) > 4
    assert len(seen) > 4
    for ids, drafts in seen:
        assert drafts == plain_drafts(model, head, ids, len(drafts))


def test_drafts_of_sampled_requests_use_their_noise():
    """A head that knows the target's distribution exactly would be accepted always: here, hot random logits agree more
    often with the request's noise than they could by chance."""
    head = head_of(seed=5, sure=0.0)  # all tokens of its vocabulary alike: the noise decides
    loop, _ = loop_of(OneThreadBackend, head, max_running=1)
    drafted = accepted = 0
    verified = EagerSpeculator.verified

    def count(self, seq, n_drafted, n_accepted):
        nonlocal drafted, accepted
        drafted, accepted = drafted + 1, accepted + (n_accepted > 0)
        verified(self, seq, n_drafted, n_accepted)

    loop.scheduler.speculation.verified = count.__get__(loop.scheduler.speculation)
    run(loop, *(request(str(n), [n + 3] * 5, max_tokens=40, temperature=30.0, seed=n) for n in range(6)))
    assert drafted > 60
    assert accepted > 0.2 * drafted  # by chance: 1 in 97


def test_a_head_that_drafts_invalid_numbers_is_left_out(caplog):
    loop, _ = loop_of(OneThreadBackend, head_of())
    plain, _ = plain_answers("full", OneThreadBackend)
    loop.runner.head.head._norm[:] = torch.nan
    drafted, _ = answers(loop)
    assert drafted == plain
    assert [record.message for record in caplog.records].count(
        "the draft head gives invalid numbers: it is not used any more"
    ) == 1


def test_a_request_with_invalid_logits_fails_alone():
    loop, model = loop_of(TorchBackend, head_of())
    forward = model.forward_tapped

    def poisoned(step, kv, taps):
        logits, states = forward(step, kv, taps)
        rows = torch.searchsorted(step.query_starts[1:].contiguous(), step.sample_tokens.int(), right=True)
        is_bad = step.token_ids[step.query_starts[:-1].long()][rows] == 50  # rows that begin with it
        return logits.masked_fill(is_bad[:, None], torch.nan), states

    model.forward_tapped = poisoned
    deltas = run(loop, request("bad", [50], max_tokens=30), request("good", [5, 6, 7], max_tokens=30))
    assert deltas["bad"][-1].error.message == "the model produced invalid numbers"
    plain = run(loop_of(TorchBackend)[0], request("good", [5, 6, 7], max_tokens=30))
    assert tokens(deltas["good"]) == tokens(plain["good"])
