"""The playground on a whole server: the default model, API keys, two HTTP workers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.api.playground.browser import Stage, ask, expect, reply
from tests.api.server_process import make_home

ADMIN_KEY = "an-admin-key-of-this-test"


@contextmanager
def serve(home: Path, *flags: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "emberline.cli.main", "serve", "smollm2", "--port", "0", "--json", *flags],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "EMBERLINE_HOME": str(home), "EMBERLINE_AUTH_KEY": ADMIN_KEY},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


@pytest.mark.slow
def test_a_real_model_with_keys(stage: Stage, smollm2: Path, tmp_path: Path) -> None:
    """Sign in, chat, see the prefix cache at work; then the key is revoked while the page is open."""
    with serve(make_home(smollm2, tmp_path), "--auth", "keys", "--http-workers", "2") as url:
        admin = httpx.Client(base_url=url, headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=60)
        key = admin.post("/api/keys", json={"account": "acme"}).json()
        user = {"authorization": f"Bearer {key['key']}"}
        browser = stage.page.context.browser
        assert browser is not None
        own = Stage(browser, stage.wire, url)  # other tests leave the shared page narrow, and need its URL afterwards
        page = own.page
        page.set_default_timeout(120_000)
        page.goto(url)
        page.fill("input[type=password]", key["key"])
        page.keyboard.press("Enter")
        page.wait_for_selector(".model-button:has-text('smollm2-135m-instruct')")
        page.fill("#p-max_tokens", "40")
        ask(page, "What is a lighthouse for?")
        assert len(reply(page)) > 20
        expect(page.locator(".metrics")).to_contain_text("tok/s")
        ask(page, "Say that again in one sentence.")
        cached = page.locator(".metrics").nth(1).locator(".good").text_content() or ""
        assert int(cached.split()[0]) >= 32
        admin.post(f"/api/keys/{key['id']}/revoke").raise_for_status()
        while any(httpx.get(f"{url}/v1/models", headers=user, timeout=60).status_code != 401 for _ in range(8)):
            time.sleep(0.1)
        refused = page.locator("dialog:has-text('no longer accepts this key')")
        for n_replies in range(2, 20):  # until the HTTP worker that the browser is connected to knows, too
            ask(page, "Are you there?")
            expect(refused.or_(page.locator(".metrics").nth(n_replies))).to_be_visible()
            if refused.count():
                break
        expect(refused).to_be_visible()
        page.close()
        assert [fault for fault in own.faults if "Failed to load resource" not in fault] == []
