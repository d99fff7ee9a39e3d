"""The client of the queue's soak test: it retries every call until it is answered."""

import json
import time
import urllib.error
import urllib.request
import uuid
from typing import Any

RETRY_S = 0.1
PATIENCE_S = 600.0


class Client:
    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
        """Retry until it is answered: after a broken connection it is unknown whether the call was executed."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            request = urllib.request.Request(f"{self._url}{path}", body, headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return bytes(answer.read())
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code not in (409, 429):
                    raise AssertionError(f"{method} {path}: {error.code} {error.read()!r}") from error
            except (OSError, ValueError):
                pass
            except Exception as error:
                if "IncompleteRead" not in type(error).__name__ and "RemoteDisconnected" not in type(error).__name__:
                    raise
            assert time.monotonic() < end_s, f"{method} {path} is not answered"
            time.sleep(RETRY_S)

    def get(self, path: str) -> Any:
        return json.loads(self.ask("GET", path))

    def post(self, path: str, body: Any, **headers: str) -> Any:
        raw = json.dumps(body).encode()
        return json.loads(self.ask("POST", path, raw, **{"Content-Type": "application/json", **headers}))

    def submit(self, lines: list[dict[str, Any]]) -> str:
        """The id of the batch; all tries have one idempotency key, so there is one batch."""
        text = "\n".join(map(json.dumps, lines)).encode()
        mark = uuid.uuid4().hex
        form = (
            f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        ).encode()
        form += text + f"\r\n--{mark}--\r\n".encode()
        file = json.loads(
            self.ask("POST", "/v1/files", form, **{"Content-Type": f"multipart/form-data; boundary={mark}"})
        )
        body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str(self.post("/v1/batches", body, **{"Idempotency-Key": mark})["id"])

    def batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/v1/batches/{batch_id}")
        return found

    def results(self, batch_id: str) -> list[dict[str, Any]]:
        """The results of all ended jobs."""
        batch = self.batch(batch_id)
        files = [batch.get("output_file_id"), batch.get("error_file_id")]
        texts = [self.ask("GET", f"/v1/files/{file}/content") for file in files if file]
        return [json.loads(line) for text in texts for line in text.splitlines()]

    def replay_dead(self) -> int:
        dead_jobs = self.get("/api/queue?dead=1000")["dead"]
        for batch_id in {job["batch"] for job in dead_jobs}:
            self.post("/api/queue/replay", {"batch": batch_id})
        return len(dead_jobs)
