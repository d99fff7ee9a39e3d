"""The stand-in engine: `python -m standins.standin_engine --socket ADDRESS`.

The engine's own scheduler, prefix cache, step loop and socket server around a runner that takes its tokens from a
script (engine_script.py) instead of a model. It starts in a fraction of a second, needs no torch, and fails on demand.
"""

import argparse
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

import msgspec
import numpy as np

from emberline import log
from emberline.engine.addresses import listening, positive
from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import Admission, Masks, Row, RowScores, Sampled, StepPlan
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.worker import process
from emberline.engine.worker.alive_file import open_alive_file
from emberline.engine.worker.announcer import open_joining
from emberline.engine.worker.build import build_scheduler
from emberline.engine.worker.socket_server import Server
from emberline.kv.block_pool import blocks_of
from emberline.kv.cache import KVCache
from emberline.kv.host_memory import HostMemory, shared_pages
from emberline.kv.transfer.group_transfers import GroupTransfers
from emberline.kv.transfer.host_transfers import host_transfers
from emberline.kv.transfer.manager import TransferManager
from emberline.kv.transfer.mooncake import host_pools
from emberline.protocol import block_hash as blockhash
from emberline.protocol import token_ids as tokens
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup
from emberline.protocol.errors import Overloaded
from emberline.protocol.frames import EngineInfo
from emberline.protocol.request import EngineRequest
from standins import engine_script as script
from standins.engine_script import EngineScript


class WrongKVError(Exception):
    """A KV block does not contain what its content key promises."""


@dataclass(slots=True)
class _StampedSlot:
    root: bytes
    ids: bytearray
    table: list[int]  # block table
    keys: list[bytes]  # content keys of the full blocks
    unchecked: bool = True  # the blocks it was admitted with


class KVStamps:
    """Fills each computed block with its content key, and checks blocks that come from the cache or a KV transfer."""

    def __init__(self, fingerprint: str, memory: HostMemory) -> None:
        self._fingerprint = fingerprint
        self._memory = memory
        self._slots: dict[int, _StampedSlot] = {}

    def admit(self, admission: Admission) -> None:
        request = admission.request
        self._slots[admission.slot] = _StampedSlot(
            blockhash.root(self._fingerprint, request.salt),
            bytearray(request.prompt_ids + admission.output_ids),
            list(admission.blocks[0]),
            [],
        )

    def compute(self, row: Row) -> None:
        slot = self._slots[row.slot]
        slot.table += row.blocks[0] if row.blocks is not None else []
        slot.ids[4 * row.start : 4 * row.end] = row.token_ids
        if row.end // BLOCK_TOKENS > len(slot.keys):
            blockhash.extend(slot.keys, slot.root, bytes(slot.ids[: 4 * row.end]))
        if slot.unchecked:
            slot.unchecked = False
            for j in range(row.start // BLOCK_TOKENS):
                if not self.holds(slot.table[j], slot.keys[j]):
                    raise WrongKVError(f"block {j} of a prompt has other content")
        for j in range(row.start // BLOCK_TOKENS, row.end // BLOCK_TOKENS):
            self._memory.block(0, slot.table[j])[:] = self._stamp(slot.keys[j])

    def holds(self, block: int, key: bytes) -> bool:
        return self._memory.block(0, block) == self._stamp(key)

    def _stamp(self, key: bytes) -> bytes:
        return stamp(key, self._memory.block_bytes[0])


def stamp(key: bytes, n_bytes: int) -> bytes:
    """The content of a full block with this content key."""
    return key * (n_bytes // len(key))


LAYOUT = KVGroup("full", (0,), kv_heads=1, head_dim=1, dtype="float16")

SCORE = -0.5  # log-probability of every token of a prompt
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ScriptedToken:
    token_id: int
    logprob: float | None = 0.0
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class _ScriptedRequest:
    id: str
    script: EngineScript
    n_prompt: int
    output: list[int]  # scripted token ids
    n_top: int  # alternatives of each prompt token, where these are scored


class _ScriptedStep:
    """A launched step whose tokens are known."""

    def __init__(
        self, sampled: Sequence[Sampled], error: WrongKVError | None = None, scores: Sequence[RowScores] = ()
    ) -> None:
        self._sampled = sampled
        self._error = error
        self._scores = scores

    def sample(self, masks: Masks | None = None) -> None:
        """Scripts ignore grammars."""

    def result(self) -> Sequence[Sampled]:
        if self._error is not None:
            raise self._error
        return self._sampled

    def drafts(self) -> Sequence[bytes]:
        return ()

    def scores(self) -> Sequence[RowScores]:
        return self._scores


class ScriptedRunner:
    """Takes each row's token from the script of its request. A step takes as long as its slowest row."""

    def __init__(
        self, limits: Limits, base: EngineScript, drop_connection: Callable[[str], None], stamps: KVStamps | None = None
    ) -> None:
        self._limits = limits
        self._base = base
        self._drop_connection = drop_connection
        self._stamps = stamps  # None: KV is not checked
        self._requests: dict[int, _ScriptedRequest] = {}  # by slot
        self._turns: dict[str, dict[str, int]] = {}  # session -> request -> its turn

    def launch(self, plan: StepPlan) -> _ScriptedStep:
        for admission in plan.admissions:
            self._requests[admission.slot] = self._scripted(admission.request)
            if self._stamps is not None:
                self._stamps.admit(admission)
        delay_ms = 0.0
        sampled = []
        error: WrongKVError | None = None
        for row in plan.rows:
            request = self._requests[row.slot]
            if row.samples:
                n_output = row.end - request.n_prompt
                delay_ms = max(delay_ms, request.script.itl_ms if n_output else request.script.ttft_ms)
                sampled.append(self._next_token(row, request, n_output))
            else:
                delay_ms = max(delay_ms, request.script.chunk_ms)
                if row.end >= request.script.die_at >= 0:
                    os._exit(1)
            error = self._stamp(row) or error
        if delay_ms:
            time.sleep(delay_ms / 1000)
        scores = [_scores(row.n_scored, self._requests[row.slot].n_top) for row in plan.others if row.n_scored]
        return _ScriptedStep(sampled, error, scores)

    def _stamp(self, row: Row) -> WrongKVError | None:
        try:
            if self._stamps is not None:
                self._stamps.compute(row)
        except WrongKVError as error:
            return error
        return None

    def _next_token(self, row: Row, request: _ScriptedRequest, n_output: int) -> ScriptedToken:
        if n_output == request.script.die_after:
            os._exit(1)
        if n_output == request.script.hang_after:
            _hang()
        if n_output == request.script.drop_after:
            self._drop_connection(request.id)
        if n_output == request.script.error_after:
            return ScriptedToken(-1)
        if n_output < len(request.output) and request.output[n_output] not in row.banned:
            return ScriptedToken(request.output[n_output])
        eos_ids = self._limits.eos_ids
        if request.script.say == "count" or row.banned or not eos_ids:
            return ScriptedToken(script.counting_token(n_output, self._limits.vocab_size, eos_ids))
        return ScriptedToken(eos_ids[0])

    def _scripted(self, request: EngineRequest) -> _ScriptedRequest:
        own = script.of_request(request, self._base)
        output = own.output(request.prompt_ids, self._limits.eos_ids, self._turn(request, own))
        n_prompt, n_top = tokens.count(request.prompt_ids), request.sampling.prompt_logprobs or 0
        return _ScriptedRequest(request.id, own, n_prompt, output, n_top)

    def _turn(self, request: EngineRequest, own: EngineScript) -> int:
        """The request's number in its session. A preempted request is admitted twice, as the same turn."""
        if not own.has_turns:
            return 0
        turns = self._turns.setdefault(request.session or "", {})
        return turns.setdefault(request.id, len(turns))


def _scores(n_scored: int, n_top: int) -> RowScores:
    """Scores of prompt tokens: the tokens 0, 1, … are the most likely ones, and each token has the same probability."""
    ids = np.tile(np.arange(n_top, dtype=np.int32), (n_scored, 1))
    logprobs = np.full(n_scored, SCORE, np.float32)
    return RowScores(logprobs, np.ones(n_scored, np.int32), ids, np.full((n_scored, n_top), SCORE, np.float32))


def _hang() -> None:
    """Block the step loop, ignoring signals."""
    _log.warning("the step loop hangs, as scripted")
    while True:
        time.sleep(3600)


class StandinLoop(StepLoop):
    """The real step loop, except that it rejects the requests whose script says so."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ScriptedRunner,
        base: EngineScript,
        journal: TextIO | None = None,
        transfers: TransferManager | None = None,
    ) -> None:
        super().__init__(scheduler, runner)
        self.transfers = transfers
        self.accept_sender = None if transfers is None else transfers.accept
        self._base = base
        self._journal = journal

    def submit(self, request: EngineRequest, now_s: float) -> None:
        if script.of_request(request, self._base).refuse:
            raise Overloaded("rejected by the script", retry_after_s=1)
        super().submit(request, now_s)
        if self._journal is not None:
            self._journal.write(f"{time.time_ns() // 1000} {request.id}\n")
            self._journal.flush()


def build(args: argparse.Namespace, drop_connection: Callable[[str], None]) -> tuple[StandinLoop, EngineInfo]:
    n_blocks = blocks_of(args.kv_tokens) + 1
    layout = msgspec.structs.replace(LAYOUT, head_dim=args.head_dim)
    cache = KVCache([layout], [n_blocks], chunk=args.token_budget)
    limits = Limits(
        context_len=min(args.context_len, cache.capacity),
        vocab_size=args.vocab_size,
        eos_ids=tuple(args.eos_ids),
        max_running=min(args.max_running, args.token_budget),
        token_budget=args.token_budget,
    )
    transfers, stamps = None, None
    if args.role != "both" or args.check_kv:
        pages = shared_pages(n_blocks * layout.block_bytes)
        memory = HostMemory([memoryview(pages.buffer)], [layout.block_bytes], [pages.descriptor])
        engine = process.mooncake_engine(host_pools(memory), args)
        transfers = host_transfers(args.fingerprint, [layout], memory, engine)
        stamps = KVStamps(args.fingerprint, memory)
    info = EngineInfo(
        model=args.name or "standin",
        fingerprint=args.fingerprint,
        context_len=limits.context_len,
        vocab_size=limits.vocab_size,
        eos_ids=limits.eos_ids,
        kv_groups=(layout,),
        kv_tokens=cache.n_tokens,
        backend="standin",
        max_running=limits.max_running,
        role=args.role,
        transfers=process.receive_transports(transfers, args),
    )
    base = script.parse(args.script)
    runner = ScriptedRunner(limits, base, drop_connection, stamps)
    journal = open(args.journal, "a", encoding="utf-8") if args.journal else None  # noqa: SIM115
    of_group = None if transfers is None else GroupTransfers(transfers)
    scheduler = build_scheduler(cache, limits, info.fingerprint, transfers=of_group)
    return StandinLoop(scheduler, runner, base, journal, transfers), info


def main(argv: list[str] | None = None) -> int:
    args = parse_flags(argv)
    log.setup("standin")
    parent = process.Parent(args.parent_gone_s)
    try:
        joining, alive_file = open_joining(args), open_alive_file(args.alive_file)
        token = process.join_token(args.socket) if joining is None else joining.token
        if joining is not None:
            joining.release, joining.version = args.release or joining.release, args.protocol or joining.version
        loop, info = build(args, lambda request_id: server.disconnect(request_id))
        with listening(args.socket) as (listener, address):
            secure = None if joining is None else joining.secure(loop.transfers)
            accept = loop.accept_sender
            server = Server(listener, loop, info, token, secure, alive_file, accept_sender=accept)
            if args.protocol:
                server.versions = (args.protocol, args.protocol)
            _log.info("serving %s", info.model, extra={"address": address, "kv_tokens": info.kv_tokens})
            facts = {"model": info.model, "address": address, "kv_tokens": info.kv_tokens}
            announcer = None if joining is None else joining.announcer(info, address)
            return process.serve(server, parent, facts, announcer)
    except Exception as error:
        return process.fail(error)


def parse_flags(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line of the stand-in; None stands for that of this process."""
    parser = process.arguments("standins.standin_engine", "An engine without a model.")
    parser.set_defaults(max_running=256, token_budget=8192)
    parser.add_argument("--script", default="", help="tokens, latency and faults: see engine_script.py")
    parser.add_argument("--journal", help="append the time and id of every accepted request to this file")
    parser.add_argument("--fingerprint", default="standin", help="roots the block hashes")
    parser.add_argument("--context-len", type=positive, default=8192, metavar="N")
    parser.add_argument("--vocab-size", type=positive, default=49_152, metavar="N")
    parser.add_argument("--eos-ids", type=int, nargs="*", default=[2], metavar="ID")
    parser.add_argument("--kv-tokens", type=positive, default=1 << 20, metavar="N")
    parser.add_argument("--head-dim", type=positive, default=1, metavar="N", help="64 bytes per block each")
    parser.add_argument("--release", default="", help="of Emberline, that it says it is")
    parser.add_argument("--protocol", type=int, default=0, metavar="N", help="the one version that it speaks")
    gone_s = process.PARENT_GONE_S
    parser.add_argument("--parent-gone-s", type=float, default=gone_s, metavar="S", help="to end after its parent")
    parser.add_argument("--check-kv", action="store_true", help="have KV with role both, too, and check its content")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
