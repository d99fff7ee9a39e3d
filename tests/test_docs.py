"""The documentation names what exists: links, paths, modules, command-line flags, configuration keys."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from emberline.cli.agents import AGENTS, Endpoint
from emberline.cli.launch import shell_commands
from emberline.cli.main import COMMANDS, main
from emberline.config import Config, EndpointConfig, ProviderConfig
from emberline.gateway import options
from emberline.protocol.gateway import GatewaySettings, Guardrail
from emberline.upstream.providers.registry import ALIASES, KNOWN
from tests.test_architecture import ALLOWED

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "UPGRADING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "examples", "deploy", "deploy/kubernetes")),
]
FOLDERS = ("emberline", "standins", "tests", "docs", "benchmarks", "examples", "deploy", "scripts")
PATHS = {str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*")} | set(FOLDERS)
TOP_FOLDERS = {path.rpartition("/")[2] for path in PATHS if path.count("/") == path.startswith("emberline/")}
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
ACTIONS = (
    "install|uninstall|bounds|plan|init|credential|up|down|members|drain|undrain|leave|list|delete|logs|stat|purge|export|import|train|"
    "submit|status|results|cancel|ls|create|limit|rotate|revoke|disable|enable|add|show|alias|rm|set|history|"
    "versions|rollback"
)
COMMAND = re.compile(rf"\bemberline ({'|'.join(COMMANDS)})\b( (?:{ACTIONS})\b)?([^`\n#|]*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def flags_of(command: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    return set(FLAG.findall(capsys.readouterr().out))


def config_keys() -> Iterator[tuple[str, str]]:
    for section in msgspec.structs.fields(Config):
        if section.name not in ("home", "endpoints", "providers", "gateways", "aliases", "prices"):
            yield from ((section.name, field.name) for field in msgspec.structs.fields(section.type))


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if not link.startswith(("http://", "https://")):
            target, _, anchor = link.partition("#")
            path = page.parent / target if target else page
            assert path.exists(), link
            assert not anchor or anchor in anchors(path), link


@each_page
def test_paths_exist(page: Path) -> None:
    """A path may be written without its first folders: `emberline/kv/cache.py`, `kv/cache.py` or `cache.py`."""
    for text in CODE.findall(page.read_text()):
        path, folder = text.rstrip("/"), text.partition("/")[0]
        if re.fullmatch(r"[\w./-]+\.py", text) or (re.fullmatch(r"[\w.-]+/[\w./-]*", text) and folder in TOP_FOLDERS):
            assert any(other == path or other.endswith(f"/{path}") for other in PATHS), text


@each_page
def test_modules_to_run_exist(page: Path) -> None:
    for module in re.findall(r"python3? -m ([\w.]+)", page.read_text()):
        assert importlib.util.find_spec(module), module


@each_page
def test_flags_are_accepted(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, action, rest in COMMAND.findall(page.read_text()):
        unknown = set(FLAG.findall(rest)) - {"--help"}
        if unknown:
            assert unknown <= flags_of([command, *action.split()], capsys), f"emberline {command}{action}{rest}"


def test_the_site_has_every_page() -> None:
    """In its navigation, and no page that is not there but those that scripts/site_pages writes."""
    named = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert {name for name in named if not name.startswith("reference/")} == pages


def test_the_agents_page_has_the_settings_that_launch_gives() -> None:
    page = (ROOT / "docs" / "guides" / "agents.md").read_text()
    to = Endpoint(url="http://127.0.0.1:8686", model="qwen3:8b", context_window=40_960)
    for agent in AGENTS.values():
        assert f"{agent.title}:\n\n```sh no-test=run-by-make-agents\n{shell_commands(agent, to)}\n```" in page
        assert f"| {agent.title} | {agent.api} | " in page


def test_package_table_is_that_of_the_import_rules() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \|[^|]+\| ([^|]+) \|$", page, re.MULTILINE)
    documented = {package: set(CODE.findall(allowed)) for package, allowed in rows}
    assert documented == {**ALLOWED, "cli": set()}


def test_every_configuration_key_is_documented_and_nothing_else() -> None:
    documented: set[tuple[str, str]] = set()
    variables: set[str] = set()
    for row in re.findall(r"^\| `\[.+$", CONFIGURATION, re.MULTILINE):
        keys, environment = row.split("|")[1:3]
        (section,) = re.findall(r"\[(\w+)\]", keys)
        documented |= {(section, key) for key in re.findall(r"(?<!\[)\b(\w+)`", keys)}
        variables |= set(re.findall(r"EMBERLINE_\w+", environment))
    assert documented == set(config_keys())
    keys_of_variables = {f"EMBERLINE_{section}_{key}".upper() for section, key in config_keys()}
    assert variables == keys_of_variables | {"EMBERLINE_PORT", "EMBERLINE_URL", "EMBERLINE_KEY"}


def test_every_endpoint_key_is_documented() -> None:
    table = CONFIGURATION.partition("## Endpoints")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    assert {key for row in rows for key in CODE.findall(row)} == {
        field.name for field in msgspec.structs.fields(EndpointConfig)
    }


def test_every_provider_key_and_name_is_documented() -> None:
    page = (ROOT / "docs" / "providers.md").read_text()
    for name in (*ProviderConfig.__struct_fields__, *KNOWN, *ALIASES):
        assert f"`{name}`" in page, name


def test_every_gateway_setting_and_header_is_documented() -> None:
    page = (ROOT / "docs" / "gateway.md").read_text()
    headers = (*options._FIELDS, *options._JSON, *options._RETRIES)
    for name in (*GatewaySettings.__struct_fields__, *Guardrail.__struct_fields__, *headers):
        assert f"`{name}" in page, name


def test_other_variables_are_read_somewhere() -> None:
    source = "".join(path.read_text() for path in (ROOT / "emberline").rglob("*.py"))
    table = CONFIGURATION.partition("## Variables that are not keys")[2]
    for variable in re.findall(r"^\| `(EMBERLINE_\w+)`", table, re.MULTILINE):
        assert variable in source, variable


def test_flags_of_configuration_keys_are_those_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(r"^\| `\[.+$", CONFIGURATION, re.MULTILINE)
    documented = {flag for row in rows for flag in FLAG.findall(row.split("|")[3])}
    assert documented == flags_of(["serve"], capsys) - {"--data-dir", "--json", "--help"}
