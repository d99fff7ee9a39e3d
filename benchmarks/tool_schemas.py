"""The tools of real agents and MCP servers, as these declare them: `python -m benchmarks.tool_schemas`.

Installs the packages named below in a folder of their own, lists the tools of every MCP server over its standard input
and output, and records those that every agent sends to a model. The schemas are not kept in this repository, since not
all of their licences allow it. Writes `.cache/tool-schemas/tools.json`: name, description, parameters and source.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.process import ended_by_sigterm

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "tool-schemas"
LIMIT_S = 90.0
AGENTS = {"@anthropic-ai/claude-code": "2.1.197", "@openai/codex": "0.166.0", "opencode-ai": "1.18.18"}
# Packages of MCP servers, their versions, and the command of each with its arguments.
NPM_SERVERS = {
    "@modelcontextprotocol/server-filesystem": ("2026.8.31", ("mcp-server-filesystem", "/tmp")),
    "@modelcontextprotocol/server-everything": ("2026.8.31", ("mcp-server-everything",)),
    "@modelcontextprotocol/server-memory": ("2026.8.31", ("mcp-server-memory",)),
    "@modelcontextprotocol/server-sequential-thinking": ("2026.8.31", ("mcp-server-sequential-thinking",)),
    "@modelcontextprotocol/server-github": ("2025.4.8", ("mcp-server-github",)),
    "@modelcontextprotocol/server-gitlab": ("2025.4.25", ("mcp-server-gitlab",)),
    "@modelcontextprotocol/server-slack": ("2025.4.25", ("mcp-server-slack",)),
    "@modelcontextprotocol/server-google-maps": ("0.6.2", ("mcp-server-google-maps",)),
    "@modelcontextprotocol/server-brave-search": ("0.6.2", ("mcp-server-brave-search",)),
    "@modelcontextprotocol/server-puppeteer": ("2025.5.12", ("mcp-server-puppeteer",)),
    "@playwright/mcp": ("0.0.83", ("playwright-mcp",)),
    "chrome-devtools-mcp": ("1.11.0", ("chrome-devtools-mcp",)),
    "mcp-server-kubernetes": ("4.1.7", ("mcp-server-kubernetes",)),
    "@notionhq/notion-mcp-server": ("2.5.2", ("notion-mcp-server",)),
    "@upstash/context7-mcp": ("4.1.1", ("context7-mcp",)),
}
PYTHON_SERVERS = {
    "mcp-server-git": ("mcp-server-git",),
    "mcp-server-fetch": ("mcp-server-fetch",),
    "mcp-server-time": ("mcp-server-time",),
}
# Servers that do not start without a key are given one; no server is asked to use it.
KEYS = (
    "GITHUB_PERSONAL_ACCESS_TOKEN",
    "GITLAB_PERSONAL_ACCESS_TOKEN",
    "SLACK_BOT_TOKEN",
    "SLACK_TEAM_ID",
    "GOOGLE_MAPS_API_KEY",
    "BRAVE_API_KEY",
    "NOTION_TOKEN",
)


@dataclass(frozen=True)
class ToolSchema:
    source: str  # the package
    name: str
    description: str
    parameters: dict[str, Any]


# --- installation ----------------------------------------------------------------------------------------------------


def install(folder: Path) -> None:
    """Install agents and servers, unless they are installed."""
    if not (folder / "node_modules").exists():
        packages = [f"{name}@{version}" for name, version in AGENTS.items()]
        packages += [f"{name}@{version}" for name, (version, _) in NPM_SERVERS.items()]
        (folder / "package.json").write_text("{}")
        # A browser's package would download it; only the agents' scripts run.
        npm = ["npm", "--no-audit", "--no-fund", "--loglevel", "error"]
        subprocess.run([*npm, "install", "--ignore-scripts", *packages], cwd=folder, check=True)
        subprocess.run([*npm, "rebuild", *AGENTS], cwd=folder, check=True)
    if not (folder / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "python")], check=True)
        pip = [str(folder / "python" / "bin" / "pip"), "install", "--quiet", *PYTHON_SERVERS]
        subprocess.run(pip, check=True)


# --- MCP servers -----------------------------------------------------------------------------------------------------


def server_commands(folder: Path) -> Iterator[tuple[str, list[str]]]:
    for package, (_, (program, *arguments)) in NPM_SERVERS.items():
        yield package, [str(folder / "node_modules" / ".bin" / program), *arguments]
    for package, (program, *arguments) in PYTHON_SERVERS.items():
        yield package, [str(folder / "python" / "bin" / program), *arguments]


def server_tools(package: str, command: Sequence[str]) -> list[ToolSchema]:
    """The tools that an MCP server lists."""
    environment = {**os.environ, **dict.fromkeys(KEYS, "none")}
    pipe = subprocess.PIPE
    server = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, text=True, bufsize=1
    )
    ends = threading.Timer(LIMIT_S, server.kill)
    ends.start()
    try:
        client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "list", "version": "1"}}
        _call(server, 1, "initialize", client)
        _send(server, {"jsonrpc": "2.0", "method": "notifications/initialized"})
        listed = _call(server, 2, "tools/list", {})["tools"]
    finally:
        ends.cancel()
        server.kill()
    return [ToolSchema(package, tool["name"], tool.get("description", ""), tool["inputSchema"]) for tool in listed]


def _send(server: "subprocess.Popen[str]", message: dict[str, Any]) -> None:
    assert server.stdin is not None
    server.stdin.write(json.dumps(message) + "\n")
    server.stdin.flush()


def _call(server: "subprocess.Popen[str]", number: int, method: str, params: dict[str, Any]) -> dict[str, Any]:
    _send(server, {"jsonrpc": "2.0", "id": number, "method": method, "params": params})
    assert server.stdout is not None
    for line in server.stdout:
        if not line.startswith("{"):
            continue
        message = json.loads(line)
        if message.get("id") == number and "result" in message:
            return dict(message["result"])
        if "method" in message and "id" in message:  # the server asks for the client's folders
            _send(server, {"jsonrpc": "2.0", "id": message["id"], "result": {"roots": []}})
    raise SystemExit(f"an MCP server ended before it answered {method}")


# --- agents ----------------------------------------------------------------------------------------------------------


@contextmanager
def recording() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that refuses every request and keeps its body; its address."""
    bodies: list[dict[str, Any]] = []

    class Recorder(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length", 0)))
            with suppress(ValueError):
                bodies.append(json.loads(data))
            answer = b'{"error":{"type":"invalid_request_error","message":"only recorded"}}'
            self.send_response(400)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", bodies
    finally:
        server.shutdown()


def _claude_code(home: Path, url: str) -> tuple[list[str], dict[str, str]]:
    where = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none"}
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    return ["claude", "-p", "Hello."], {**where, **quiet, "CLAUDE_CODE_MAX_RETRIES": "0"}


def _codex(home: Path, url: str) -> tuple[list[str], dict[str, str]]:
    (home / ".codex").mkdir(exist_ok=True)
    (home / ".codex" / "config.toml").write_text(
        'model = "m"\nmodel_provider = "recorder"\ncheck_for_update_on_startup = false\n'
        f'[model_providers.recorder]\nname = "recorder"\nbase_url = "{url}/v1"\nenv_key = "RECORDER_KEY"\n'
        'wire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
    )
    return ["codex", "exec", "--skip-git-repo-check", "Hello."], {"RECORDER_KEY": "none"}


def _opencode(home: Path, url: str) -> tuple[list[str], dict[str, str]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"m": {"name": "m", "tool_call": True}},
    }
    config = home / "opencode.json"
    config.write_text(json.dumps({"model": "recorder/m", "autoupdate": False, "provider": {"recorder": provider}}))
    quiet = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    return ["opencode", "run", "Hello."], {"OPENCODE_CONFIG": str(config), **quiet}


COMMANDS: dict[str, Callable[[Path, str], tuple[list[str], dict[str, str]]]] = {
    "@anthropic-ai/claude-code": _claude_code,
    "@openai/codex": _codex,
    "opencode-ai": _opencode,
}


def agent_tools(package: str, folder: Path) -> list[ToolSchema]:
    """The tools that an agent sends with its first request."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    with recording() as (url, bodies):
        (program, *arguments), environment = COMMANDS[package](home, url)
        agent = subprocess.Popen(
            [str(folder / "node_modules" / ".bin" / program), *arguments],
            cwd=home,
            env={"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        give_up = time.monotonic() + LIMIT_S
        while not any(body.get("tools") for body in bodies) and time.monotonic() < give_up:
            time.sleep(0.2)
        agent.kill()
        agent.wait()
    return [found for body in bodies for tool in body.get("tools") or () if (found := _declared(package, tool))]


def _declared(package: str, tool: dict[str, Any]) -> ToolSchema | None:
    """A function in the form of any of the APIs; None for a provider's own tool."""
    function = tool.get("function", tool)
    parameters = function.get("parameters", function.get("input_schema"))
    if not isinstance(parameters, dict):
        return None
    return ToolSchema(package, function["name"], function.get("description") or "", parameters)


# --- the corpus ------------------------------------------------------------------------------------------------------


def load(folder: Path = CACHE) -> list[ToolSchema]:
    """All tools with distinct schemas, from the file if it was written."""
    path = folder / "tools.json"
    if not path.exists():
        extract(folder)
    return [ToolSchema(**tool) for tool in json.loads(path.read_text())]


def extract(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    install(folder)
    tools = [tool for package in AGENTS for tool in agent_tools(package, folder)]
    tools += [tool for package, command in server_commands(folder) for tool in server_tools(package, command)]
    distinct = {json.dumps([tool.name, tool.parameters], sort_keys=True): tool for tool in tools}
    rows = [asdict(tool) for tool in distinct.values()]
    (folder / "tools.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tool_schemas", description=__doc__)
    parser.add_argument("--folder", type=Path, default=CACHE, help="where packages and figures go")
    folder: Path = parser.parse_args().folder
    ended_by_sigterm()
    tools = load(folder)
    for source in dict.fromkeys(tool.source for tool in tools):
        print(f"{source}: {sum(tool.source == source for tool in tools)}")
    print(f"{len(tools)} tools in {folder / 'tools.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
