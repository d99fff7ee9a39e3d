"""`emberline serve`: its arguments, and what it prints. `server/core_process.py` assembles the server."""

import argparse
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from emberline import log as logs
from emberline.catalog.model_card import DEFAULT_MODEL
from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.cli import common, startup_panel
from emberline.cli.log_file import LogFile, log_path
from emberline.cli.models import fetch
from emberline.cli.parser import CommandParser
from emberline.cli.terminal import transient_line
from emberline.config import Config, check_exposure
from emberline.server.address import ServerAddress
from emberline.server.core_process import remote_workers, serve
from emberline.server.data_folder import locked
from emberline.server.listener import bind
from emberline.server.signals import run_until_terminated
from emberline.supervisor import machine
from emberline.supervisor.kv_pool import plan_pool

log = logging.getLogger("emberline.serve")

_Row = tuple[str, str, str | None, str]  # flag, configuration key, placeholder (None: a switch), help
_GROUPS: dict[str, tuple[_Row, ...]] = {
    "server": (
        ("--http-workers", "server.http_workers", "N", "HTTP processes (default 1: the core itself)"),
        (
            "--auth",
            "server.auth",
            "MODE",
            "keys: every request needs an API key; none; auto (default): none on loopback",
        ),
        ("--allowed-host", "server.allowed_hosts", "NAME", "a Host header to accept; repeatable"),
        ("--cors-origin", "server.cors_origins", "URL", "a web origin that may call; repeatable"),
        ("--log-level", "log.level", "LEVEL", "debug, info, warning or error"),
    ),
    "model": (
        ("--device", "engine.device", "DEVICE", "auto, cpu or cuda (default auto)"),
        ("--context-len", "engine.context_len", "N", "most tokens of a prompt and its reply (default: the model's)"),
        ("--max-running", "engine.max_running", "N", "sequences in a batch (default 64 on a CPU, 256 on a GPU)"),
        (
            "--token-budget",
            "engine.token_budget",
            "N",
            "tokens computed per step (default 512 on a CPU, 8192 on a GPU)",
        ),
        (
            "--deterministic",
            "engine.deterministic",
            None,
            "same seed, same tokens in any batch (always so on a CPU; slower on a GPU)",
        ),
        ("--threads", "engine.threads", "N", "CPU threads per worker (default: cores)"),
        (
            "--weights",
            "engine.weights",
            "FORM",
            "BF16 weights in a GPU's memory: plain (default), compressed (a quarter less), or auto, "
            "by KV room and batch",
        ),
        (
            "--verify-weights",
            "engine.verify_weights",
            None,
            "check the SHA-256 of a compressed model before serving it",
        ),
    ),
    "memory": (
        (
            "--kv-bytes",
            "engine.kv_bytes",
            "SIZE",
            "KV cache per worker, e.g. 4G (default on a CPU: a quarter of the memory, ≤ 2G; on a GPU: what is left)",
        ),
        (
            "--gpu-memory-share",
            "engine.gpu_memory_share",
            "F,F",
            "share of a GPU's memory for each MODEL (default: even)",
        ),
        ("--kv-host-bytes", "kv.host_bytes", "SIZE", "host memory per worker that keeps more KV (default: for GPUs)"),
        ("--kv-disk-bytes", "kv.disk_bytes", "SIZE", "disk space per worker that keeps more KV, also over restarts"),
        ("--kv-store", "kv.store", "KIND", "mooncake: one KV pool that all workers of the cluster share"),
    ),
    "workers and parallelism": (
        ("--replicas", "engine.replicas", "N", "workers per model (default one per GPU, else 1)"),
        ("--prefill-workers", "engine.prefill_workers", "N", "prefill workers per model, for disaggregation"),
        ("--decode-workers", "engine.decode_workers", "N", "decode workers per model, with --prefill-workers"),
        ("--gpus", "engine.gpus", "N", "GPUs for the model, or auto for all: divided as `emberline plan` recommends"),
        ("--tp", "engine.tp", "N", "tensor parallelism: ranks of a worker, each on a GPU of its own (default 1)"),
        ("--pp", "engine.pp", "N", "pipeline parallelism: stages of a worker (default 1)"),
        ("--dcp", "engine.dcp", "N", "decode context parallelism: KV spread over N ranks of --tp; models with MLA"),
        ("--ep", "engine.ep", None, "expert parallelism: the ranks of --tp hold whole experts"),
        ("--step-timeout", "engine.step_timeout_s", "SECONDS", "longest step of several ranks (default 60)"),
    ),
    "speculative decoding": (
        ("--speculation", "engine.speculation", "NAME", "auto (default), off, or one drafter"),
        ("--draft-head", "engine.draft_head", "FOLDER", "an EAGLE-3 head of a MODEL, which drafts for it"),
        ("--draft-model", "engine.draft_model", "MODEL", "a smaller model with the same tokenizer, which drafts"),
    ),
    "cluster": (
        ("--core-only", "cluster.core_only", None, "start no engine workers here: they join"),
        ("--region", "cluster.region", "NAME", "region of this core, which prefers the workers there"),
    ),
}
_REPEATABLE = ("--allowed-host", "--cors-origin")
# vLLM's flags: ours instead, and what to do about those that have no counterpart.
_VLLM_FLAGS = {
    "--tensor-parallel-size": "--tp",
    "-tp": "--tp",
    "--pipeline-parallel-size": "--pp",
    "-pp": "--pp",
    "--data-parallel-size": "--replicas",
    "--enable-expert-parallel": "--ep",
    "--decode-context-parallel-size": "--dcp",
    "--max-model-len": "--context-len",
    "--max-num-seqs": "--max-running",
    "--max-num-batched-tokens": "--token-budget",
    "--gpu-memory-utilization": "--gpu-memory-share",
    "--kv-cache-memory-bytes": "--kv-bytes",
    "--uvicorn-log-level": "--log-level",
    "--allowed-origins": "--cors-origin",
    "--api-server-count": "--http-workers",
}
_READ_FROM_FILES = "the model's own files say it; leave the flag out"
_ALWAYS_ON = "always on; leave the flag out"
_VLLM_ANSWERS = {
    "--model": "give the model without a flag: emberline serve MODEL",
    "--served-model-name": "name it in emberline.toml: [aliases], or `emberline model alias NAME MODEL`",
    "--api-key": "set EMBERLINE_AUTH_KEY, or make keys with `emberline key create`",
    "--trust-remote-code": "code of a model's repository is never run; leave the flag out",
    "--speculative-config": "use --speculation, --draft-head or --draft-model",
    "--kv-transfer-config": "use --prefill-workers and --decode-workers",
    **dict.fromkeys(
        ("--dtype", "--quantization", "-q", "--tokenizer", "--chat-template", "--load-format"), _READ_FROM_FILES
    ),
    **dict.fromkeys(
        ("--tool-call-parser", "--reasoning-parser", "--hf-overrides", "--tokenizer-mode"), _READ_FROM_FILES
    ),
    **dict.fromkeys(("--enable-prefix-caching", "--enable-chunked-prefill", "--enable-auto-tool-choice"), _ALWAYS_ON),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    if isinstance(parser, CommandParser):
        parser.renamed, parser.answers = _VLLM_FLAGS, _VLLM_ANSWERS
    models = f"name such as qwen3:8b, path or hf:org/repo (default {DEFAULT_MODEL})"
    parser.add_argument("engine.models", nargs="*", metavar="MODEL", help=models)
    for title, rows in _GROUPS.items():
        group = parser.add_argument_group(title)
        if title == "server":
            common.add_listen_address(group)
        for flag, key, metavar, text in rows:
            if metavar is None:
                group.add_argument(flag, dest=key, action="store_const", const=True, help=text)
            else:
                action = "append" if flag in _REPEATABLE else "store"
                group.add_argument(flag, dest=key, metavar=metavar, help=text, action=action)
    common.add_data_dir(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON when ready")
    parser.epilog = "vLLM's flags of the same meaning are accepted, too."


def run(args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    config = common.config_of(args)
    check_exposure(config)
    plan_pool(config.kv)  # what is missing for it is said before anything is downloaded or loaded
    log_files = [LogFile(log_path(config.home), config.log.max_bytes)] if config.log.max_bytes else []
    logs.setup("core", config.log.level, config.log.format, more=log_files)
    os.environ["EMBERLINE_LOG_LEVEL"] = config.log.level  # child processes inherit it
    machine.raise_file_limit()
    shows_panel = sys.stdout.isatty() and not args.json

    waiting = contextlib.ExitStack()

    def on_ready(address: ServerAddress, entries: Sequence[ModelEntry], workers: Sequence[dict[str, Any]]) -> None:
        waiting.close()
        start_s = time.monotonic() - started_s
        if args.json:
            print(json.dumps(startup_panel.as_dict(address, entries, workers, start_s)), flush=True)
        if shows_panel:
            logging.getLogger().setLevel(config.log.level.upper())
            startup_panel.show(config, address, entries, workers, start_s)
        else:
            log.info("ready", extra={"url": address.url, "seconds": round(start_s, 2)})

    with (
        locked(config.home),
        waiting,
        bind(config.server) as listener,
    ):  # before any download: a port in use is reported at once
        entries = fetch_models(config, is_logged=True)
        if shows_panel:  # the panel repeats what the startup log lines say
            names = ", ".join(entry.card.id for entry in entries)
            waiting.enter_context(transient_line(f"starting {names or 'without models'} …"))
            logging.getLogger().setLevel(logging.WARNING)
        return run_until_terminated(serve(config, entries, listener, on_ready))


def fetch_models(config: Config, is_logged: bool = False) -> list[ModelEntry]:
    """The configured models, downloaded if needed, without duplicates. `is_logged`: a download is a line of the log."""
    config.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = ModelStore(config.home)
    elsewhere = config.endpoints or config.providers or config.cluster.scaled
    local = config.engine.models or (() if elsewhere else (DEFAULT_MODEL,))
    remote = [name for worker in remote_workers(config) for name in worker.models]
    on_gpu = False if config.engine.device == "cpu" else None
    entries = [fetch(name, store, is_logged, on_gpu) for name in (*local, *remote, *config.cluster.scaled)]
    if config.engine.draft_model:
        fetch(config.engine.draft_model, store, is_logged, on_gpu)
    return list({entry.card.id: entry for entry in entries}.values())
