"""The operator's pages in a real browser, on a real queue and real accounts; load and requests are made up."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from emberline.accounts.account_service import AccountService
from emberline.accounts.usage_row import UsageRow, insert_usage
from emberline.api.batch_loader import BatchService
from emberline.jobs.queue.queue import Queue, open_queue
from emberline.net.http_server import ASGIApp, Receive, Scope, Send
from emberline.protocol.errors import ErrorInfo
from emberline.store import open_store
from emberline.telemetry.history import FIELDS, N_POINTS, STEP_S
from emberline.telemetry.status import EndedRequest, RequestStatus, Status, StatusQuery, TierStatus, WorkerStatus
from tests.api.fake_service import KEY, MODEL, SECRET, FakeService, app_of
from tests.api.playground.browser import DRAW_A_FRAME, Stage, expect, module
from tests.jobs.queue.helpers import MODEL as JOB_MODEL
from tests.jobs.queue.helpers import new_batch, new_jobs

if TYPE_CHECKING:
    from playwright.sync_api import Page

HOSTILE = '<img src=x onerror=alert(1)>\x1b[31m"><script>alert(2)</script>'
NOW_S = 1.7e9


class Loaded(FakeService):
    """Many requests in flight and an hour of figures; names that try to be markup."""

    def __init__(self, n_requests: int = 60) -> None:
        super().__init__()
        self.polls = 0
        self.state = "ready"
        self._n_requests = n_requests

    async def status(self, query: StatusQuery) -> Status:
        self.polls += 1
        closed_s = int(NOW_S) + STEP_S * (self.polls // 3)
        times = range(closed_s - STEP_S * (N_POINTS - 1), closed_s + 1, STEP_S)
        new = [time_s for time_s in times if time_s > query.since_s]
        wave = [round(50 + 40 * math.sin(time_s / 300), 2) for time_s in new]
        return Status(
            time_s=float(closed_s),
            uptime_s=4000.0 + self.polls,
            ok=self.ok,
            problem="" if self.ok else f"no worker can serve {HOSTILE}",
            workers=[self._worker("prefill-0", "prefill"), self._worker(HOSTILE, "decode")],
            models=[],
            waiting={"default": 3},
            phases={"waiting": 3, "prefill": 7, "decode": self._n_requests},
            requests=[self._request(n) for n in range(min(query.requests, self._n_requests))],
            recent=[self._ended(n) for n in range(query.recent)],
            step_s=STEP_S,
            series={name: list[float | None](new if name == "time_s" else wave) for name in FIELDS},
        )

    def _worker(self, name: str, role: str) -> WorkerStatus:
        counts = dict.fromkeys(WorkerStatus.__struct_fields__, 5)
        named = {"name": name, "model": MODEL, "role": role, "state": self.state, "problem": "", "device": "cpu"}
        tier = dict.fromkeys(TierStatus.__struct_fields__, 5) | {"name": "disk", "state": HOSTILE, "hit_ratio": 0.5}
        others = {"ok": True, "kv_used": 0.95, "hit_ratio": 0.5, "max_running": 64, "tiers": [TierStatus(**tier)]}
        return WorkerStatus(**(counts | named | others))

    def _request(self, n: int) -> RequestStatus:
        counts = dict.fromkeys(RequestStatus.__struct_fields__, n)
        named = {"id": f"req-{n}", "account": HOSTILE, "model": MODEL, "priority": "default", "phase": "decode"}
        return RequestStatus(**(counts | named | {"is_job": False, "worker": "w", "prefill_worker": "p"}))

    def _ended(self, n: int) -> EndedRequest:
        counts = dict.fromkeys(EndedRequest.__struct_fields__, n + 2)
        named = {"id": f"done-{n}", "account": "local", "model": MODEL, "priority": "default", "status": "finished"}
        return EndedRequest(**(counts | named | {"ended_s": NOW_S, "ttft_s": 0.01 * (n + 1), "duration_s": n + 3.0}))


class OpenedHere:
    """The app with a queue and accounts that the serving event loop opens."""

    def __init__(self, service: FakeService, folder: Path) -> None:
        self._service, self._folder = service, folder
        self._app: asyncio.Task[ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            self._app = asyncio.create_task(self._open())
        await (await asyncio.shield(self._app))(scope, receive, send)

    async def _open(self) -> ASGIApp:
        store = await open_store(self._folder / "t.db")
        queue = await open_queue(store, self._folder)
        await _make_dead_letter(queue)
        accounts = AccountService(store, SECRET)
        await accounts.open()
        now_us = store.now_us()
        row = UsageRow(
            id="u1",
            account="acme",
            model=MODEL,
            model_version="v",
            input_tokens=1000,
            cached_by_tier={"device": 600},
            output_tokens=50,
            status="finished",
            created_us=now_us,
            finished_us=now_us,
        )
        await store.write(*insert_usage(row))
        return app_of(self._service, KEY, batches=BatchService(queue, self._service), accounts=accounts)


async def _make_dead_letter(queue: Queue) -> None:
    await queue.submit(new_batch(), new_jobs(1))
    for alone in (False, False, True):
        await queue._store.write("UPDATE lines SET ready_us = 0")
        (lease,) = await queue.claim("w", JOB_MODEL, 1, quarantined=alone)
        await queue.fail(lease, ErrorInfo("unavailable", "gone"), retry=True, killed=True)


@contextmanager
def operating(stage: Stage, service: FakeService, app: ASGIApp, failures: bool = False) -> Iterator["Page"]:
    with stage.site(failures=failures):
        stage.wire.app = app
        stage.page.set_viewport_size({"width": 1280, "height": 900})
        stage.page.goto(f"{stage.url}/operations")
        yield stage.page


def sign_in(page: "Page", key: str) -> None:
    page.fill("dialog input[type=password]", key)
    page.click("dialog button[type=submit]")


def test_load_and_requests(stage: Stage) -> None:
    service = Loaded()
    with operating(stage, service, app_of(service)) as page:
        page.wait_for_selector("text=Every model can be served.")
        for title in ("Prefill workers", "Decode workers", "Tokens per second", "Time to first token"):
            expect(page.get_by_text(title, exact=True).first).to_be_visible()
        # The name is shown, as text.
        expect(page.locator("section[aria-label='Decode workers']")).to_contain_text("[31m")
        expect(page.locator(".chart path.line")).to_have_count(16)
        page.click("section[aria-label='Prefill workers'] >> text=Drain")
        expect(page.locator("[aria-live=polite]")).to_have_text("prefill-0: drain")
        assert [(change.action, change.name) for change in service.changes] == [("drain", "prefill-0")]
        page.click(".tabs >> text=Requests")
        page.wait_for_selector("text=req-59")
        page.wait_for_selector("text=done-99")
        service.ok = False
        page.wait_for_selector(".banner.bad >> text=no worker can serve")


@pytest.mark.slow
def test_an_open_page_does_not_grow(stage: Stage) -> None:
    """Points older than an hour leave the page, and the tables hold what the server lists."""
    service = Loaded(10_000)
    with operating(stage, service, app_of(service)) as page:
        page.wait_for_selector("text=Every model can be served.")
        n_nodes = "() => document.querySelectorAll('*').length"
        expect(page.locator(".chart path.line")).to_have_count(16)
        before, polls = page.evaluate(n_nodes), service.polls
        refresh = """async (path) => {
            const { server } = await import(path);
            await server.refresh();
            return server.series.time_s.length;
        }"""
        for _ in range(30):
            assert page.evaluate(refresh, module(page, "server_status.js")) <= N_POINTS
        assert service.polls >= polls + 30
        assert abs(page.evaluate(n_nodes) - before) < 20


def test_refreshes_at_once_and_a_key_that_is_forgotten_meanwhile(stage: Stage) -> None:
    service = Loaded()
    with operating(stage, service, app_of(service)) as page:
        page.wait_for_selector("text=Every model can be served.")
        n_points, n_different, now = page.evaluate(
            """async (path) => {
              const { server } = await import(path);
              const { session } = await import(path.replace("server_status", "api"));
              server.forget();
              await Promise.all([server.refresh(), server.refresh()]);
              const times = server.series.time_s;
              session.signIn("a-key", false);
              const refreshing = server.refresh();
              session.signOut();
              await refreshing;
              return [times.length, new Set(times).size, server.now];
            }""",
            module(page, "server_status.js"),
        )
        assert n_points == n_different == N_POINTS
        assert now is None, "what one key may see is not left for the next"


def test_dead_letters_keys_and_usage(stage: Stage, tmp_path: Path) -> None:
    service = Loaded()
    with operating(stage, service, OpenedHere(service, tmp_path), failures=True) as page:
        sign_in(page, KEY)
        page.click(".tabs >> text=Queue")
        page.wait_for_selector("section[aria-label='Dead letters'] >> text=died")
        page.click("section[aria-label='Dead letters'] >> text=Replay")
        page.wait_for_selector("section[aria-label='Dead letters'] >> text=None")
        page.wait_for_selector(f"section[aria-label='Jobs'] >> text={JOB_MODEL}")

        page.click(".tabs >> text=Accounts")
        page.wait_for_selector("section[aria-label='Usage'] >> text=acme")
        expect(page.locator("section[aria-label='Usage']")).to_contain_text("60 %")
        page.fill("input[name=account]", "acme")
        page.fill("input[name=name]", "laptop")
        page.fill("input[name=rpm]", "60")
        page.click("text=Create key")
        key = page.text_content(".secret code") or ""
        page.wait_for_selector("section[aria-label='API keys'] >> text=laptop")

        page.click("text=Sign out")
        sign_in(page, key)
        page.wait_for_selector("text=This key may not see the server's state")
        page.click(".banner >> text=Sign in")
        sign_in(page, KEY)
        page.wait_for_selector("section[aria-label='API keys'] >> text=laptop")
        expect(page.locator(".secret")).to_have_count(0)  # a key is shown once


# Holds the first answer from `part` until `release` is called.
HOLD = """(part) => {
  const ask = window.fetch;
  let held = false;
  window.release = null;
  window.fetch = async (path, options) => {
    const answer = await ask(path, options);
    if (held || !path.includes(part)) return answer;
    held = true;
    const text = await answer.text();
    await new Promise((resolve) => (window.release = resolve));
    return new Response(text, answer);
  };
}"""


def hold(page: "Page", part: str, tab: str) -> None:
    """Opens a tab, with the first answer from `part` held."""
    page.evaluate(HOLD, part)
    page.click(f".tabs >> text={tab}")
    page.wait_for_function("() => window.release")


def release(page: "Page") -> None:
    page.evaluate("() => window.release()")
    page.evaluate(DRAW_A_FRAME)


def test_a_late_usage_report_is_dropped(stage: Stage, tmp_path: Path) -> None:
    """The report by account arrives after the one by model, which was chosen meanwhile."""
    service = Loaded()
    with operating(stage, service, OpenedHere(service, tmp_path), failures=True) as page:
        sign_in(page, KEY)
        hold(page, "/api/usage?by=account", "Accounts")
        page.click("section[aria-label='Usage'] >> text=Model")
        usage = page.locator("section[aria-label='Usage'] tbody")
        expect(usage).to_contain_text(MODEL)
        release(page)
        assert MODEL in (usage.text_content() or "")


@pytest.mark.slow
def test_a_late_list_of_keys_or_dead_letters_is_dropped(stage: Stage, tmp_path: Path) -> None:
    service = Loaded()
    with operating(stage, service, OpenedHere(service, tmp_path), failures=True) as page:
        sign_in(page, KEY)
        page.wait_for_selector("text=Every model can be served.")

        hold(page, "/api/keys?", "Accounts")
        page.fill("input[name=account]", "acme")
        page.fill("input[name=name]", "laptop")
        page.click("text=Create key")
        keys = page.locator("section[aria-label='API keys'] tbody")
        expect(keys).to_contain_text("laptop")
        release(page)
        assert "laptop" in (keys.text_content() or "")

        hold(page, "/api/queue?dead", "Queue")
        replay = """async (path) => {
          const { getJson, postJson } = await import(path);
          const { dead: [{ batch }] } = await getJson("/api/queue?dead=1");
          await postJson("/api/queue/replay", { batch });
        }"""
        with page.expect_response("**/api/queue?dead=200"):
            page.evaluate(replay, module(page, "api.js"))
        page.evaluate(DRAW_A_FRAME)
        release(page)
        assert "None" in (page.text_content("section[aria-label='Dead letters']") or "")


@pytest.mark.slow
def test_a_tab_that_is_chosen_as_soon_as_it_is_there(stage: Stage) -> None:
    choose = """location.search === "?at-once" && new MutationObserver((_, observer) => {
      if (!document.querySelector(".tabs")) return;
      observer.disconnect();
      location.hash = "requests";
    }).observe(document, { childList: true, subtree: true })"""
    service = Loaded()
    with operating(stage, service, app_of(service)) as page:
        page.add_init_script(choose)
        page.goto(f"{stage.url}/operations?at-once")
        page.wait_for_selector("text=req-59")


@pytest.mark.slow
def test_phone(stage: Stage) -> None:
    service = Loaded()
    with operating(stage, service, app_of(service)) as page:
        page.set_viewport_size({"width": 360, "height": 780})
        page.wait_for_function("() => innerWidth === 360")
        expect(page.locator(".chart path.line")).to_have_count(16)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
