"""`emberline completion bash|zsh|fish`: a script that completes commands, actions and flags."""

import argparse
import importlib
from collections.abc import Iterator

from emberline.cli.parser import CommandParser

SHELLS = ("bash", "zsh", "fish")
_SCRIPT = {
    "bash": """\
_emberline() {{
  local choices path=${{COMP_WORDS[1]}} action=${{COMP_WORDS[2]}}
  ((COMP_CWORD > 1)) || path=
  ((COMP_CWORD > 2)) || action=
  while :; do
    case "$path $action" in
{cases}
      *) choices= ;;
    esac
    [[ -z $choices && -n $action ]] || break
    action=
  done
  mapfile -t COMPREPLY < <(compgen -W "$choices" -- "${{COMP_WORDS[COMP_CWORD]}}")
  [[ ${{#COMPREPLY[@]}} -gt 0 ]] || compopt -o default
}}
complete -F _emberline emberline
""",
    "zsh": """\
#compdef emberline
autoload -U +X bashcompinit && bashcompinit
""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    parser.epilog = (
        "bash: `emberline completion bash > ~/.local/share/bash-completion/completions/emberline`; zsh: source it in"
        " ~/.zshrc; fish: `emberline completion fish > ~/.config/fish/completions/emberline.fish`."
    )


def run(args: argparse.Namespace) -> int:
    print(script(args.shell), end="")
    return 0


def script(shell: str) -> str:
    """The completion script of a shell, made from the parsers themselves."""
    found = dict(choices())
    if shell == "fish":
        return "".join(_fish(found))
    cases = "\n".join(
        f'      "{path if " " in path else f"{path} "}") choices="{" ".join(words)}" ;;'
        for path, words in found.items()
    )
    bash = _SCRIPT["bash"].format(cases=cases)
    return bash if shell == "bash" else _SCRIPT["zsh"] + bash


def choices() -> Iterator[tuple[str, list[str]]]:
    """The words that may follow, by command or command and action: actions and flags; at first the commands."""
    from emberline.cli.main import COMMANDS, module_of

    yield "", [*COMMANDS, "help"]
    for command in COMMANDS:
        parser = CommandParser(prog=command)
        parser.set_defaults(command=command)
        if (name := module_of(command)) is not None:
            importlib.import_module(name).add_arguments(parser)
        actions = parser.actions
        yield command, [*actions, *parser.flags]
        for action, child in actions.items():
            yield f"{command} {action}", child.flags


def _fish(found: dict[str, list[str]]) -> Iterator[str]:
    """Lines of a fish script: the commands first, then what follows each."""
    yield "complete -c emberline -f\n"
    yield f"complete -c emberline -n __fish_use_subcommand -a '{' '.join(found[''])}'\n"
    for path, words in found.items():
        command, _, action = path.partition(" ")
        if not path:
            continue
        seen = f"__fish_seen_subcommand_from {command}" + (
            f"; and __fish_seen_subcommand_from {action}" if action else ""
        )
        for word in words:
            option = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            yield f"complete -c emberline -n '{seen}' {option}\n"
