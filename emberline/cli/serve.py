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

_OPTIONS = (  # flag, configuration key, placeholder, help
    ("--http-workers", "server.http_workers", "N", "HTTP processes (default 1: the core itself)"),
    ("--auth", "server.auth", "MODE", "keys: every request needs an API key; none; auto (default): none on loopback"),
    ("--device", "engine.device", "DEVICE", "auto, cpu or cuda (default auto)"),
    ("--replicas", "engine.replicas", "N", "workers per model (default one per GPU, else 1)"),
    ("--prefill-workers", "engine.prefill_workers", "N", "per model; prefill/decode disaggregation"),
    ("--decode-workers", "engine.decode_workers", "N", "per model, with --prefill-workers"),
    ("--gpus", "engine.gpus", "N", "GPUs for the model, or auto for all: divided as `emberline plan` recommends"),
    ("--tp", "engine.tp", "N", "tensor parallelism: ranks of a worker, each on a GPU of its own (default 1)"),
    ("--pp", "engine.pp", "N", "pipeline parallelism: stages of a worker (default 1)"),
    ("--dcp", "engine.dcp", "N", "decode context parallelism: KV spread over N ranks of --tp; models with MLA"),
    (
        "--step-timeout",
        "engine.step_timeout_s",
        "SECONDS",
        "that a step of several ranks may take (default 60)",
    ),
    ("--threads", "engine.threads", "N", "CPU threads per worker (default: cores)"),
    ("--kv-bytes", "engine.kv_bytes", "SIZE", "KV cache per worker, e.g. 4G (default: a quarter of the memory, ≤ 2G)"),
    (
        "--kv-host-bytes",
        "kv.host_bytes",
        "SIZE",
        "of host memory per worker, to keep more KV (default: for GPUs)",
    ),
    ("--kv-disk-bytes", "kv.disk_bytes", "SIZE", "on disk per worker, to keep more KV, also over restarts"),
    (
        "--gpu-memory-share",
        "engine.gpu_memory_share",
        "F,F",
        "of a GPU's memory, for each MODEL (default: even shares)",
    ),
    ("--kv-store", "kv.store", "KIND", "mooncake: one KV pool that all workers of the cluster share"),
    ("--max-running", "engine.max_running", "N", "sequences in a batch"),
    ("--token-budget", "engine.token_budget", "N", "tokens computed per step"),
    (
        "--speculation",
        "engine.speculation",
        "NAME",
        "speculative decoding: auto (default), off, or one drafter",
    ),
    ("--draft-head", "engine.draft_head", "FOLDER", "an EAGLE-3 head of a MODEL, which drafts for it"),
    ("--draft-model", "engine.draft_model", "MODEL", "a smaller model with the same tokenizer, which drafts"),
    ("--region", "cluster.region", "NAME", "of this core: it prefers the workers of its region"),
    ("--log-level", "log.level", "LEVEL", "debug, info, warning or error"),
)
_REPEATABLE = (
    ("--allowed-host", "server.allowed_hosts", "NAME", "a Host header to accept; repeatable"),
    ("--cors-origin", "server.cors_origins", "URL", "a web origin that may call; repeatable"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("engine.models", nargs="*", metavar="MODEL", help=f"name, path or hf:org/repo (default {DEFAULT_MODEL})")
    common.add_address(parser)
    for flag, key, metavar, text in _OPTIONS:
        add(flag, dest=key, metavar=metavar, help=text)
    for flag, key, metavar, text in _REPEATABLE:
        add(flag, dest=key, metavar=metavar, help=text, action="append")
    same = "same seed, same tokens in any batch (always so on a CPU; slower on a GPU)"
    add("--deterministic", dest="engine.deterministic", action="store_const", const=True, help=same)
    core_only = "start no engine workers here: they join"
    add("--core-only", dest="cluster.core_only", action="store_const", const=True, help=core_only)
    spread = "expert parallelism: the ranks of --tp hold whole experts"
    add("--ep", dest="engine.ep", action="store_const", const=True, help=spread)
    common.add_data_dir(parser)
    add("--json", action="store_true", help="print one line of JSON when ready")


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
    entries = [fetch(name, store, is_logged) for name in (*local, *remote, *config.cluster.scaled)]
    if config.engine.draft_model:
        fetch(config.engine.draft_model, store, is_logged)
    return list({entry.card.id: entry for entry in entries}.values())
