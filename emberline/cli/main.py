"""`emberline`: finds the command and hands over. Imports nothing a command does not need: --help is instant."""

import argparse
import difflib
import importlib
import sys
from collections.abc import Callable, Sequence

COMMANDS = {
    "serve": "start the server: OpenAI, Anthropic and Workers AI doors on a model of yours",
    "run": "chat in the terminal, or answer one prompt from the arguments or stdin",
    "pull": "fetch a model: a name, a path, or hf:org/repo",
    "ls": "models on this machine",
    "rm": "remove a model from this machine",
    "ps": "what is running: models, devices, load",
    "batch": "work for later: submit a file of requests, watch it, fetch the results",
    "queue": "what waits in the queue, for whom; dead letters, and running them again",
    "bench": "a quick measurement: one stream, eight streams",
    "simulate": "try a fleet in virtual time: policies, loads, prefill and decode apart",
    "doctor": "check this machine, and say how to fix what is wrong",
    "worker": "start one engine worker by hand",
    "version": "print the version",
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    command = {"--version": "version", "-V": "version"}.get(words[0], words[0])
    if command not in COMMANDS:
        return _unknown(command)
    if command == "worker":  # its flags are the engine's own
        return int(importlib.import_module("emberline.engine.worker").main(words[1:]))
    module = importlib.import_module(f"emberline.cli.{command}")
    parser = argparse.ArgumentParser(
        prog=f"emberline {command}", description=(module.__doc__ or "").partition("\n\n")[0]
    )
    module.add_arguments(parser)
    return _guarded(module.run, parser.parse_args(words[1:]))


def _guarded(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Errors that are the user's to fix as one readable message; everything else with its trace, to be reported."""
    from emberline.protocol.errors import EmberlineError

    try:
        return run(args)
    except EmberlineError as error:
        print(f"emberline: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `emberline ls | head -1`: the reader has enough
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.filename is None:  # nothing a user could look at
            raise
        print(f"emberline: cannot use {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: emberline COMMAND [options]",
            "",
            "An inference platform for agents, on your own machine.",
            "",
            *lines,
            "",
            "`emberline COMMAND --help` says more. New here? `emberline serve`, or `emberline run`.",
        ]
    )


def _unknown(command: str) -> int:
    close = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"; did you mean `emberline {close[0]}`?" if close else "; `emberline --help` lists them"
    print(f"emberline: there is no command {command!r}{hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
