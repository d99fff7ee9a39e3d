"""Stages of a pipeline: the GPU runner's logic with ranks that are threads, and workers and memory of a real GPU."""

import json
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec import structs

from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import Admission, Masks, Row, StepPlan
from emberline.engine.core.rank import Rank
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.ranks.messages import StepResult, to_leader
from emberline.engine.ranks.opening import follower_loop, leader_runner
from emberline.engine.ranks.plan_channel import ConnectionReader, PlanWriter
from emberline.engine.ranks.rank_group import Leader, Member
from emberline.engine.runners.gpu.runner import GpuRunner
from emberline.kv.cache import KVCache
from emberline.kv.transfer.connection import PeerConnection, PeerConnectionLost
from emberline.protocol.frames import Vocabulary
from emberline.protocol.grammar import encode
from emberline.protocol.parallel_layout import Layout
from emberline.protocol.token_ids import pack
from standins.thread_collectives import thread_groups
from tests.engine.client import Client, start
from tests.engine.fakes import VOCAB, expected, request
from tests.engine.grammar.samples import PERSON
from tests.engine.ranks import observed_worker
from tests.engine.ranks.test_rank_worker import request as rank_request
from tests.engine.ranks.test_rank_worker import run as run_ranks
from tests.engine.runners.cpu.test_torch_runner import FULL, WINDOW, run, tokens
from tests.engine.runners.gpu import stage_process
from tests.engine.runners.gpu.host_sampler import HostKernels, HostTable
from tests.engine.runners.gpu.test_runner import Padded
from tests.engine.speculation.standin import StandinSpeculation

N_OUT = 8  # few: near ties end the comparison of a reply
WAIT_S = 60.0  # of a rank that hangs


class Stage(Padded):
    """The first reads the tokens, and passes them on as hidden states; the last says what follows."""

    def __init__(self, layouts, stages):
        super().__init__(layouts)
        self._stages = stages
        self.began = threading.Semaphore(0)  # once for each step
        self.before = lambda: None

    def forward(self, step, kv, taps=None):
        self.began.release()
        self.before()
        stages, hidden = self._stages, step.token_ids.clone()
        if stages.rank:
            stages.recv(hidden, stages.rank - 1)
        logits = super().forward(replace(step, token_ids=hidden), kv)
        if stages.rank == stages.size - 1:
            return logits
        stages.send(hidden, stages.rank + 1)
        return torch.empty(0, VOCAB)


class Pipeline:
    """Rank 0 in this thread, the other stages each in its own; every rank has a GPU runner without a GPU."""

    def __init__(self, n_stages, layouts=(FULL,), n_blocks=40, speculates=False, **limits):
        values = {"context_len": 200, "vocab_size": VOCAB, "eos_ids": (0,), "max_running": 4, "token_budget": 32}
        self.limits = Limits(**values | limits)
        self.layout, self.groups = Layout(pp=n_stages), thread_groups(pp=n_stages)
        self.stages = [Stage(layouts, each.pp) for each in self.groups]
        self.kernels = [HostKernels() for _ in self.stages]
        self.sizes, self.speculates = [n_blocks] * len(layouts), speculates
        pairs = [socket.socketpair() for _ in self.stages[1:]]
        self._ours = [PeerConnection(ours) for ours, _ in pairs]
        self._theirs = [PeerConnection(theirs) for _, theirs in pairs]
        self.leader = Leader(self.layout, self.groups[0], self._ours, PlanWriter(None, self._ours))
        self.runner = leader_runner(self.leader, self._runner(0))
        self.rank = Rank(self.runner, publish=self.leader.publish_plan)
        self.most_in_flight = 0

    def _runner(self, rank):
        return GpuRunner(
            self.stages[rank], self.sizes, self.limits, "cpu", self.kernels[rank], HostTable(),
            samples=rank == self.layout.sampling_rank, steps_in_flight=self.layout.pp, speculates=self.speculates,
        )  # fmt: skip

    @property
    def sampled_rows(self):
        return self.kernels[-1].sampled_rows

    def loop(self, *features):
        """Counts the steps in flight when one is launched."""
        layouts, n_stages = self.stages[0].kv_groups, self.layout.pp
        cache = KVCache(layouts, self.sizes, chunk=self.limits.token_budget)
        scheduler = Scheduler(cache, self.limits, "fake", features, micro_batches=n_stages)
        loop = StepLoop(scheduler, SimpleNamespace(launch=self._launch), n_stages, publish=self.leader.publish_plan)
        self._in_flight = loop._in_flight
        return loop

    def _launch(self, plan):
        sampling = {row.number for row in plan.rows if row.samples}
        for other, _ in self._in_flight:
            assert not sampling & {row.number for row in other.rows if row.samples}, "the same sequence"
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight) + 1)
        return self.runner.launch(plan)

    def __enter__(self):
        self._threads = [
            *(threading.Thread(target=self._follow, args=(rank,), daemon=True) for rank in range(1, self.layout.pp)),
            threading.Thread(target=self._take_reports, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self.leader.close()
        for thread in self._threads[:-1]:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        for connection in self._theirs:
            connection.close()

    def _follow(self, rank):
        connection = self._theirs[rank - 1]
        member = Member(self.layout, rank, self.groups[rank], connection, None)
        loop = follower_loop(member, self._runner(rank), {}, self.layout.pp, lambda: False)
        loop.run(ConnectionReader(connection))

    def _take_reports(self):
        """As the leader's watching thread does, of the last stage."""
        with suppress(PeerConnectionLost):
            while True:
                message = self._ours[-1].receive(to_leader)
                assert isinstance(message, StepResult), message
                self.leader._results.put(message)


@pytest.mark.parametrize("layouts", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
@pytest.mark.parametrize("n_stages", [2, 3])
def test_tokens_are_those_of_one_rank(n_stages, layouts):
    """In batches, chunks, with prefix hits and preemptions."""
    prompts = {f"r{n}": [(n + i * i) % VOCAB for i in range(25 + 9 * n)] for n in range(3)}
    wanted = {id: request(id, ids, max_tokens=40, temperature=0.0) for id, ids in prompts.items()}
    answers = {id: expected(prompts[id], wanted[id].sampling, layouts, 100)[0] for id in prompts}
    with Pipeline(n_stages, layouts, 9, context_len=100) as pipeline:
        loop = pipeline.loop()
        together = run(loop, *wanted.values())
        assert {id: tokens(deltas) for id, deltas in together.items()} == answers
        assert loop.load.preemptions > 0
        again = run(loop, wanted["r2"])["r2"]
        assert tokens(again) == answers["r2"]
        assert again[0].usage.cached_tokens == (len(prompts["r2"]) - 1) // 16 * 16
    assert not any(kernels.sampled_rows for kernels in pipeline.kernels[:-1])


@pytest.mark.parametrize("n_stages", [2, 3])
def test_there_are_as_many_micro_batches_as_stages(n_stages):
    prompts = {f"r{n}": [n + 1, 2] for n in range(4)}
    wanted = {id: request(id, ids, max_tokens=12, ignore_eos=True, temperature=0.0) for id, ids in prompts.items()}
    with Pipeline(n_stages) as pipeline:
        deltas = run(pipeline.loop(), *wanted.values())
    assert pipeline.most_in_flight == n_stages
    for id, ids in prompts.items():
        assert tokens(deltas[id]) == expected(ids, wanted[id].sampling, (FULL,), 200)[0]


@pytest.mark.parametrize("wrong", [0, 3])
def test_drafts_are_verified_by_the_last_stage_and_no_micro_batch_waits_for_them(wrong):
    prompts = {f"r{n}": [(n + i * i) % VOCAB for i in range(5 + 9 * n)] for n in range(4)}
    wanted = {id: request(id, ids, max_tokens=30, ignore_eos=True, temperature=0.0) for id, ids in prompts.items()}
    answers = {id: expected(prompts[id], wanted[id].sampling, (FULL,), 200)[0] for id in prompts}
    drafts = StandinSpeculation(lambda seq: answers[seq.request.id][seq.n_output :], wrong, VOCAB)
    with Pipeline(2, n_blocks=60, speculates=True) as pipeline:
        together = run(pipeline.loop(drafts), *wanted.values())
    assert {id: tokens(deltas) for id, deltas in together.items()} == answers
    assert pipeline.most_in_flight == 2
    assert drafts.n_accepted > (80, 20)[wrong > 0]  # steps beside prompts leave drafts out


def test_chunks_of_one_prompt_follow_each_other_through_the_stages():
    prompt = [(3 * i) % VOCAB for i in range(150)]
    asked = request("a", prompt, max_tokens=3, ignore_eos=True, temperature=0.0)
    with Pipeline(3) as pipeline:
        assert tokens(run(pipeline.loop(), asked)["a"]) == expected(prompt, asked.sampling, (FULL,), 200)[0]
    assert pipeline.most_in_flight == 3


def test_the_last_stage_knows_parameters_and_histories():
    with Pipeline(2, n_blocks=5, context_len=64) as pipeline:  # too few blocks for both: one is preempted
        loop = pipeline.loop()
        a = request("a", [1, 2, 3], max_tokens=40, presence_penalty=0.001, seed=5, logit_bias={4: 0.5}, logprobs=2)
        b = request("b", [3, 2, 1], max_tokens=40, repetition_penalty=1.001, seed=6, min_tokens=60, stop_ids=(6,))
        deltas = run(loop, a, b)
        assert loop.load.preemptions > 0
    assert all(len(one.top) == 2 for delta in deltas["a"] for one in delta.logprobs)
    assert all(delta.logprobs is None for delta in deltas["b"])
    for seed, wanted in ((5, a), (6, b)):
        output = tokens(deltas[wanted.id])
        rows = {row.position: row for row in pipeline.sampled_rows if row.seed == seed}  # the last one counts
        assert sorted(rows) == list(range(3, 3 + len(output)))
        for position, row in rows.items():
            assert row.output_ids.tolist() == output[: position - 3]
            assert row.logit_bias == wanted.sampling.logit_bias
            assert row.banned == ((6,) if seed == 6 else ())


def test_a_stage_computes_the_next_micro_batch_before_the_last_stage_has_begun_one():
    with Pipeline(2) as pipeline:
        first, last = pipeline.stages

        def wait_for_two():
            for _ in range(2):
                assert first.began.acquire(timeout=WAIT_S), "the first stage waits for the last"
            last.before = lambda: None

        last.before = wait_for_two
        asked = [request(id, [n], max_tokens=3, temperature=0.0) for n, id in enumerate("ab", 1)]
        handles = []
        for n, each in enumerate(asked):
            row = Row(n, n, 0, each.prompt_ids, [[n + 1]], [0], True)
            plan = StepPlan([Admission(n, each, 1, b"", [[]])], [row], n_tokens=1, number=n + 1)
            handles.append(pipeline.rank.run(plan))
        for each, handle in zip(asked, handles):
            handle.sample()
            ids = np.frombuffer(each.prompt_ids, "<u4").tolist()
            assert [drawn.token_id for drawn in handle.result()] == expected(ids, each.sampling, (FULL,), 200)[0][:1]


def test_masks_reach_the_last_stage_while_earlier_steps_are_reported():
    with Pipeline(2) as pipeline:
        guided = structs.replace(request("a", [1], max_tokens=3, temperature=0.0), grammar=b"{}")
        plain = request("b", [2], max_tokens=3, temperature=0.0)
        handles = []
        for n, each in enumerate((plain, guided)):
            row = Row(n, n, 0, each.prompt_ids, [[n + 1]], [0], True)
            admission = Admission(n, each, 1, b"", [[]])
            handles.append(pipeline.rank.run(StepPlan([admission], [row], 1, number=n + 1, masked=n == 1)))
            if n == 0:
                handles[0].sample()
        assert len(handles[0].result()) == 1  # the last stage waits for the masks of the other
        for token in (4, 5):
            if token == 5:  # another step of the same sequence
                row = Row(1, 1, 1, pack([4]), None, [0], True)
                handles.append(pipeline.rank.run(StepPlan([], [row], 1, number=3, masked=True)))
            handles[-1].sample(Masks([0], np.array([[1 << token]], np.uint32)))
            assert [drawn.token_id for drawn in handles[-1].result()] == [token]


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_stage_on_a_gpu_is_two_messages_ahead(tmp_path):
    """In CUDA graphs, and without the other stage: it may overwrite what it has sent."""
    command = [sys.executable, "-m", stage_process.__name__]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")]) for rank in range(2)]
    try:
        assert [rank.wait(4 * stage_process.LIMIT_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [("--pp", "2"), ("--pp", "3"), ("--tp", "2", "--pp", "2")], ids="".join)
def test_pipelines_on_one_gpu_answer_as_one_rank(tmp_path, monkeypatch, layout):
    """Real workers: the replies of one rank, structured output, a cached prefix, and a micro-batch for each stage."""
    from benchmarks.gpu.rank_processes import ONE_GPU, TINY, TINY_TOLERANCE
    from benchmarks.reply_comparison import TOP, compare

    for name, value in ONE_GPU.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 6}))
    prompts = [[(7 * n + 3 * at) % 4000 + 2 for at in range(20 + 30 * n)] for n in range(6)]
    asked = [rank_request(f"r{n}", ids, max_tokens=N_OUT, logprobs=TOP) for n, ids in enumerate(prompts)]
    more = [
        rank_request("penalized", prompts[1], repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=N_OUT),
        *(
            rank_request(f"structured {t}", prompts[0], temperature=t, seed=5, max_tokens=60, grammar=encode(PERSON))
            for t in (0.0, 1.0)
        ),
    ]
    cached = rank_request("cached", [*prompts[5][:100], 9, 9, 9], max_tokens=2)
    words = [b"", b"", *(bytes([n]) for n in range(2, 256)), *(f"<{n}>".encode() for n in range(256, 4096))]

    def replies(name, *flags):
        """The first requests' logprobs, and the log."""
        common = ("--device", "cuda", "--random-weights", "1", "--deterministic", "--speculation", "off")
        limits = ("--kv-bytes", 128 << 20, "--memory-share", "0.1", "--max-running", "8", "--token-budget", "256")
        place = ("--model", tmp_path, "--socket", tmp_path / name)
        started, ready = start(observed_worker.__name__, *place, *common, *limits, *flags)
        try:
            assert ready.get("ready"), (ready, started.communicate()[1])
            with Client(ready["address"]) as client:
                client.send(Vocabulary(tokens=words, special={1: "</s>"}))
                run_ranks(client, *asked)
                run_ranks(client, *more)
                for each in more[1:]:
                    json.loads(b"".join(words[n] for n in client.tokens(each.id) if n != 1))
                run_ranks(client, cached)
                assert client.deltas["cached"][0].usage.cached_by_tier["device"] == 96
            started.terminate()
            assert started.wait(WAIT_S) == 0
            told = [[entry for delta in client.deltas[each.id] for entry in delta.logprobs or ()] for each in asked]
            return told, started.stderr.read()
        finally:
            started.kill()
            started.communicate()

    wanted, _ = replies("one")
    found, log = replies("stages", *layout)
    n_stages = int(layout[-1])
    assert f"{observed_worker.IN_FLIGHT}{n_stages}\n" in log, "there are fewer micro-batches than stages"
    n_compared = [compare(*pair, TINY_TOLERANCE) for pair in zip(wanted, found, strict=True)]
    assert sum(n_compared) > len(asked) * N_OUT / 2
