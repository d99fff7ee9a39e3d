"""Golden texts of the command line and the configuration: `--help` of every command, every key with its default."""

import re
from typing import Any, get_args, get_origin

import msgspec
import pytest

from emberline.cli.main import COMMANDS, main
from emberline.config import (
    Config,
    EndpointConfig,
    GatewayConfig,
    PriceConfig,
    ProviderConfig,
    ScalingConfig,
)
from tests.golden import files

TABLES = {
    "cluster.models.NAME": ScalingConfig,
    "endpoints": EndpointConfig,
    "gateways": GatewayConfig,
    "prices": PriceConfig,
    "providers": ProviderConfig,
}


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main([*words, "--help"])
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_help_of_every_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    main(["--help"])
    texts = {"emberline": capsys.readouterr().out}
    for command in COMMANDS:
        texts[command] = text = help_of(capsys, command)
        usage, _, _ = text.partition("\n\n")
        for action in found[1].split(",") if (found := re.search(r"\{([a-z,-]+)\} \.\.\.", usage)) else ():
            texts[f"{command} {action}"] = help_of(capsys, command, action)
    files.check(files.FOLDER / "help.json", {name: text.splitlines() for name, text in texts.items()})


def test_every_configuration_key_and_its_default() -> None:
    sections = {field.name: field.type for field in msgspec.structs.fields(Config) if isinstance(field.type, type)}
    structs = {name: kind for name, kind in sections.items() if issubclass(kind, msgspec.Struct)} | TABLES
    record = {
        f"[{name}] {field.encode_name}": {"default": default_of(field), "type": type_name(field.type)}
        for name, struct in structs.items()
        for field in msgspec.structs.fields(struct)
    }
    assert len(record) > 100
    files.check(files.FOLDER / "configuration.json", record)


def default_of(field: Any) -> Any:
    """A key's default as it would be written; "required" if it has none."""
    if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
        return "required"
    return msgspec.to_builtins(field.default_factory() if field.default is msgspec.NODEFAULT else field.default)


def type_name(kind: Any) -> str:
    """The name of a type, with the bounds of its values, without those of a nested table."""
    if isinstance(kind, type) and get_origin(kind) is None:
        return kind.__name__
    inner = ", ".join(item if isinstance(item, str) else type_name(item) for item in get_args(kind))
    return f"{getattr(get_origin(kind), '__name__', 'any')}[{inner}]" if inner else str(kind)
