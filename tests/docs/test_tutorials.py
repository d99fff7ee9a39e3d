"""Pages run from their own text: every `sh` block of a page, in order, in one shell. One that does not run says why."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.server_process import free_port

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "start").glob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "UPGRADING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "examples", "deploy", "deploy/kubernetes")),
]
BLOCK = re.compile(r"^```sh([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Blocks of these pages install on or change the machine: `make release` and the deployment tests run what they do.
INSTALLS = {"install"}


def blocks(page: Path) -> list[tuple[str, str]]:
    """The info words and the text of every `sh` block."""
    return BLOCK.findall(page.read_text())


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix(""))


def runs(page: Path) -> bool:
    """True if the page has a block to run."""
    return page.stem not in INSTALLS and any("no-test" not in words for words, _ in blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_that_is_not_run_says_why(page: Path) -> None:
    assert not re.search(r"^ *```(bash|shell|console)", page.read_text(), re.MULTILINE), "blocks of commands are `sh`"
    for words, _ in blocks(page):
        for word in words.split():
            assert word in ("background", "hidden") or re.fullmatch(r"no-test=[a-z-]{8,}", word), word


def script_of(page: Path) -> str:
    """One shell script: background blocks are servers, which are waited for and ended at the end."""
    lines = ["set -euo pipefail", "servers=", "trap 'kill $servers 2>/dev/null || true; wait' EXIT"]
    found = blocks(page)
    if page not in TUTORIALS:  # its commands expect a server, which a tutorial starts itself
        found = [("background", "emberline serve smollm2"), *found]
    for words, text in found:
        if "no-test" in words:
            continue
        if "background" in words.split():
            lines += [f"({text.strip()}) >server.log 2>&1 &", 'servers="$servers $!"']
            lines += [
                "for _ in $(seq 1200); do",
                '  curl -sf "$EMBERLINE_TEST_URL/health" >/dev/null && break; sleep 0.1',
                "done",
            ]
        else:
            lines.append(text)
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)], ids=name_of)
def test_the_page_runs_as_it_is_written(page: Path, smollm2: Path, tmp_path: Path) -> None:
    home, port = tmp_path / "home", free_port()
    (home / "models").mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    (home / "models" / smollm2.parent.name).symlink_to(smollm2.parent)
    url = f"http://127.0.0.1:{port}"
    text = script_of(page).replace("http://127.0.0.1:8686", url)
    if page not in TUTORIALS:
        text = text.replace("qwen2.5-coder", "smollm2")  # a gigabyte less
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EMBERLINE_")} | {
        "EMBERLINE_HOME": str(home),
        "EMBERLINE_PORT": str(port),
        "EMBERLINE_TEST_URL": url,
        "BASE": url,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = ["bash", "-c", text]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    log = (tmp_path / "server.log").read_text() if (tmp_path / "server.log").exists() else ""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{log[-2000:]}"
    if page.stem == "agent-author":
        turns = [line.split() for line in done.stdout.splitlines() if "tokens in," in line]
        assert [int(words[3]) > 0.8 * int(words[0]) for words in turns] == [False, True, True]
