"""The OpenAPI document and the metrics: every operation, every metric family with its labels."""

import json
import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from tests.golden.cases.common import LOCAL, chat
from tests.golden.exchange import Case, Client
from tests.golden.server import ADMIN_KEY

CHAT = "/v1/chat/completions"
LABEL = re.compile(r'([a-z_]+)="')


def cases() -> Iterator[Case]:
    yield Case("surface/openapi", _openapi)
    yield Case("surface/metrics", _metrics)


async def _openapi(client: Client) -> None:
    document = await client.get("/openapi.json", record=False)
    operations = {
        f"{method.upper()} {path}": f"{operation['summary']} ({_digest(operation)})"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if isinstance(operation, dict)
    }
    schemas = {name: _digest(schema) for name, schema in document["components"]["schemas"].items()}
    client.note("openapi", {"operations": operations, "schemas": schemas})


def _digest(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=6).hexdigest()


async def _metrics(client: Client) -> None:
    """Families that exist once a local, a relayed, a cached and a refused request have ended."""
    await client.post(CHAT, {**chat(LOCAL), "max_tokens": 3})
    await client.post(CHAT, chat("vllm-model"))
    for _ in range(2):
        await client.post(CHAT, chat("openai/gpt-test"), headers={"cf-aig-cache-ttl": "600"})
    await client.post(CHAT, chat("nothing"))
    await client.logged()  # a request is counted after its reply
    text = await client.get("/metrics", key=ADMIN_KEY, record=False)
    client.note("metrics", families(text))


def families(text: str) -> dict[str, str]:
    """The type, the label names and the help text of each metric family in Prometheus text."""
    kinds = dict(line.split(" ", 3)[2:4] for line in text.splitlines() if line.startswith("# TYPE "))
    helps = dict(line.split(" ", 3)[2:4] for line in text.splitlines() if line.startswith("# HELP "))
    labels: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            family = name if name in kinds else re.sub("_(bucket|sum|count)$", "", name)
            labels.setdefault(family, set()).update(LABEL.findall(line.rpartition("}")[0]))
    return {
        name: f"{kind} {{{', '.join(sorted(labels.get(name, ())))}}}: {helps[name]}" for name, kind in kinds.items()
    }
