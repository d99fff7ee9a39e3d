"""`emberline`: finds the command and runs it. Imports nothing that the command does not need, so --help is instant."""

import argparse
import difflib
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence

from emberline.cli.parser import CommandParser

GROUPS = {
    "everyday": {
        "serve": "start the server: OpenAI, Anthropic and Workers AI APIs for one or more models",
        "run": "chat with a model in the terminal, or answer one prompt from the arguments or stdin",
        "launch": "start a coding agent with a model of this machine: opencode, codex, claude, aider, goose",
        "pull": "download a model: a name such as qwen3:8b, a path, or hf:org/repo",
        "push": "serve a model of your own: a folder with cog.yaml and a predictor, or its image",
        "ls": "list the models on this machine; --all: also those that can be pulled, and what fits",
        "show": "show what is known of a model: licence, context, capabilities, size, source",
        "rm": "remove models from this machine",
        "compress": "make a model's files a third smaller without loss; serve reads them as they are",
        "ps": "show running models, their workers and load",
        "load": "load models into a running server, before a request asks for them",
        "stop": "unload models from a running server; requests that run finish first",
    },
    "operate": {
        "top": "watch the running server: workers, load, queues and requests, live",
        "logs": "print the server's log lines, follow them, or find those of one request",
        "doctor": "check this machine and say how to fix what is wrong",
        "service": "install or remove a systemd service that runs the server",
        "bench": "measure a server quickly: one stream, then eight at once",
        "backup": "write everything durable into one file, while the server runs",
        "restore": "put a backup back, or check it",
        "completion": "print a script that completes commands and flags in bash, zsh or fish",
        "version": "print the version",
    },
    "manage": {
        "account": "create, list, limit and disable accounts",
        "key": "create, list, limit, rotate and revoke API keys",
        "price": "set and list what models cost",
        "usage": "report what was used and what it costs, by account, key, model, session and day",
        "provider": "store, list, test and remove the keys of other providers",
        "gateway": "create, list and delete gateways, and search their logs",
        "batch": "submit a file of requests, watch it, download the results",
        "queue": "show queued jobs and the dead-letter queue; replay dead jobs",
        "cache": "the KV cache of a running server: statistics, purge, export and import",
        "model": "the catalog: add model cards, show a model, and name aliases of the running server's models",
        "draft": "train a draft head for a model, with which it decodes faster",
        "audit": "show and verify the audit log of what admins did",
    },
    "scale": {
        "plan": "tell what a model takes of a GPU, the KV cache it leaves and the speed to expect, without loading it",
        "simulate": "simulate a fleet in virtual time: routing policies, load, prefill/decode disaggregation",
        "tune": "propose settings for the traffic of the last day, by simulating it with the workers' own step times",
        "cluster": "many machines: credentials of workers that join, and the members of the cluster",
        "worker": "start one engine worker",
        "join": "add a worker on another machine, or an upstream server, to the running server",
        "leave": "drain a worker and remove it from the running server",
        "drain": "send a worker nothing new; it finishes what it has",
        "undrain": "use a drained worker again",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
_SYNONYMS = {"list": "ls", "delete": "rm", "remove": "rm", "--version": "version", "-V": "version"}
_MODULES = {
    **dict.fromkeys(("pull", "ls", "rm"), "models"),
    "show": "model",
    **dict.fromkeys(("load", "stop"), "loading"),
    "restore": "backup",
    **dict.fromkeys(("drain", "undrain", "leave", "join"), "workers"),
}  # where it is not the command's own name
_WITH_ACTIONS = (
    "batch",
    "model",
    "account",
    "key",
    "price",
    "provider",
    "gateway",
    "cache",
    "draft",
    "cluster",
    "service",
)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words and _is_person():
        from emberline.cli import first_run

        return _with_error_messages(first_run.run, argparse.Namespace(data_dir=None))
    if words[:1] == ["help"] and len(words) > 1:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        return _with_error_messages(_print_help, argparse.Namespace())
    command = _SYNONYMS.get(words[0], words[0])
    if command not in COMMANDS:
        return _unknown(command)
    if command == "worker":  # the engine process defines its own flags
        return int(importlib.import_module("emberline.engine.worker.main").main(words[1:]))
    summary = COMMANDS[command]
    description = f"{summary[0].upper()}{summary[1:]}."  # not capitalize(), which would lower the rest: "openai"
    parser = CommandParser(prog=f"emberline {command}", description=description)
    parser.set_defaults(command=command)
    if command == "version":
        parser.add_argument("--json", action="store_true", help="print JSON")
        return _with_error_messages(_print_version, parser.parse_args(words[1:]))
    module = importlib.import_module(f"emberline.cli.{_MODULES.get(command, command)}")
    module.add_arguments(parser)
    given = parser.canonical(words[1:])
    if command in _WITH_ACTIONS and not given:
        parser.print_help()
        return 0
    # Flags may stand between positional arguments, except where argparse has subcommands.
    parse = parser.parse_args if command in _WITH_ACTIONS else parser.parse_intermixed_args
    return _with_error_messages(module.run, parse(given))


def module_of(command: str) -> str | None:
    """The module with a command's arguments. Returns None for a command that has none of its own here."""
    return None if command in ("version", "worker") else f"emberline.cli.{_MODULES.get(command, command)}"


def _with_error_messages(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Errors that the user can fix become one readable message; all others keep their traceback."""
    try:
        return run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `emberline ls | head -1`
        sys.stderr.close()
        return 0
    except Exception as error:
        from emberline.protocol.errors import EmberlineError  # help needs next to no imports

        if isinstance(error, EmberlineError):
            message = error.message
        elif isinstance(error, OSError) and error.filename is not None:
            message = f"cannot use {error.filename}: {error.strerror}"
        else:
            raise
        print(f"emberline: {message}", file=sys.stderr)
        return 1


def _print_version(args: argparse.Namespace) -> int:
    from emberline import __version__

    print(json.dumps({"version": __version__}) if args.json else f"emberline {__version__}")
    return 0


def _print_help(args: argparse.Namespace) -> int:
    print(_help(), flush=True)
    return 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = []
    for group, commands in GROUPS.items():
        lines += [f"{group}:", *(f"  {name:<{width}}  {text}" for name, text in commands.items()), ""]
    return "\n".join(
        [
            "usage: emberline COMMAND [options]",
            "",
            "An inference platform for agents, on your own machine.",
            "",
            *lines,
            "`emberline COMMAND --help` describes a command. To begin: `emberline serve`, or `emberline run`.",
        ]
    )


def _is_person() -> bool:
    """True on a terminal outside of continuous integration: `emberline` alone may ask there."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")


def _unknown(command: str) -> int:
    close = difflib.get_close_matches(command, [*COMMANDS, *_SYNONYMS], n=1)
    hint = f"; did you mean `emberline {close[0]}`?" if close else "; `emberline --help` lists them"
    print(f"emberline: there is no command {command!r}{hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
