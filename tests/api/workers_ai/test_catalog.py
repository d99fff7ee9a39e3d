"""The Workers AI catalog, paged as Cloudflare's clients do it."""

import httpx
import jsonschema_rs
import pytest

from tests.api.fake_service import CARDS, MODEL, PRICED, SPEECH, FakeModels, FakeService, Wire, app_of, client_of

AI = "/client/v4/accounts/acme/ai"


async def search(client: httpx.AsyncClient, what: str = "models", **query: str | int) -> dict:
    answer = await client.get(f"{AI}/{what}/search", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_row(client: httpx.AsyncClient) -> None:
    found = await search(client)
    row = found["result"][0]
    assert row["name"] == MODEL
    assert row["id"] == CARDS[0].uuid
    assert row["source"] == 1
    assert row["task"]["name"] == "Text Generation"
    assert set(row["task"]) == {"id", "name", "description"}
    assert {"property_id": "context_window", "value": "8192"} in row["properties"]
    assert {"property_id": "async_queue", "value": "true"} in row["properties"]
    assert set(row) == {"id", "source", "name", "description", "task", "created_at", "tags", "properties", "state"}
    assert found["result_info"] == {"count": 2, "page": 1, "per_page": 50, "total_count": 2, "total_pages": 1}
    assert (found["success"], found["errors"], found["messages"]) == (True, [], [])


@pytest.mark.parametrize("what", ["models", "tasks", "authors"])
async def test_paging_ends(client: httpx.AsyncClient, what: str) -> None:
    rows, page = [], 1
    while found := (await search(client, what, page=page, per_page=1))["result"]:
        rows += found
        page += 1
    assert rows == (await search(client, what))["result"]
    assert (await search(client, what, page=10**9))["result"] == []


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({"author": "ACME"}, ["@hf/acme/tiny"]),
        ({"author": "nobody"}, []),
        ({"search": "SMOL"}, [MODEL]),
        ({"search": "for tests"}, [MODEL, "@hf/acme/tiny"]),
        ({"task": "Text Generation"}, [MODEL, "@hf/acme/tiny"]),
        ({"task": "Text-to-Image"}, []),
        ({"source": "2"}, ["@hf/acme/tiny"]),
        ({"hide_experimental": "true"}, [MODEL, "@hf/acme/tiny"]),
        ({"author": "", "search": "", "task": "", "unknown": ""}, [MODEL, "@hf/acme/tiny"]),
    ],
)
async def test_filters(client: httpx.AsyncClient, query: dict, names: list) -> None:
    assert [row["name"] for row in (await search(client, **query))["result"]] == names


BAD = ["page=0", "page=-1", "page=x", "per_page=0", "per_page=1001", "page=1e3", "page=٣", "format=csv"]
EMPTY = ["per_page=", "page=2&page=", "source=", "hide_experimental=", "format=", "hide_experimental"]


@pytest.mark.parametrize("query", [*BAD, *EMPTY])
async def test_bad_queries(client: httpx.AsyncClient, query: str) -> None:
    answer = await client.get(f"{AI}/models/search?{query}")
    assert answer.status_code == 400
    assert query.partition("=")[0] in answer.json()["errors"][0]["message"]


async def test_a_query_that_is_not_ascii(service: FakeService) -> None:
    wire = Wire(app_of(service), f"{AI}/models/search", b"", method="GET")
    wire.scope["query_string"] = b"search=\xff"
    await wire.task
    assert wire.sent[0]["status"] == 400
    assert b"the query string cannot be parsed" in wire.body


async def test_openrouter_format(client: httpx.AsyncClient) -> None:
    found = await search(client, format="openrouter")
    assert found["data"] == found["result"]
    assert found["data"][0]["id"] == MODEL
    assert found["data"][0]["context_length"] == 8192
    assert set(found["data"][0]["pricing"]) >= {"prompt", "completion"}
    assert set(found["data"][0]["supported_features"]) == {"tools", "json_mode", "structured_outputs", "logprobs"}
    assert found["data"][0]["default_parameters"] == {"temperature": 0.2}


async def test_schema(client: httpx.AsyncClient) -> None:
    answer = await client.get(f"{AI}/models/schema", params={"model": MODEL})
    schema = answer.json()["result"]
    accepts = jsonschema_rs.validator_for(schema["input"]).is_valid
    assert accepts({"prompt": "Hi", "temperature": 5})
    assert accepts({"messages": [{"role": "user", "content": "Hi"}]})
    assert not accepts({"prompt": "Hi", "temperature": 6})
    assert not accepts({"prompt": 1})
    ran = await client.post(f"{AI}/run/{MODEL}", json={"prompt": "Hi"})
    assert jsonschema_rs.validator_for(schema["output"]).is_valid(ran.json()["result"])
    for query, code in (("", 5006), ("?model=nope", 5007)):
        answer = await client.get(f"{AI}/models/schema{query}")
        assert (answer.status_code, answer.json()["errors"][0]["code"]) == (400, code)


async def test_tasks_and_authors(client: httpx.AsyncClient) -> None:
    found = (await search(client, "tasks"))["result"]
    assert [set(task) for task in found] == [{"id", "name", "description"}] * len(found)
    assert {"Text Generation", "Text Embeddings", "Automatic Speech Recognition"} <= {task["name"] for task in found}
    assert [row["name"] for row in (await search(client, "authors"))["result"]] == ["acme", "huggingfacetb"]


async def test_what_a_card_says_is_in_its_properties() -> None:
    service = FakeService()
    service.models = FakeModels([*CARDS, PRICED, SPEECH])
    client = client_of(service)
    row = (await search(client, search="priced"))["result"][0]
    properties = {item["property_id"]: item["value"] for item in row["properties"]}
    assert properties == {
        "price": [
            {"unit": "per M input tokens", "price": 0.6, "currency": "USD"},
            {"unit": "per M output tokens", "price": 3.0, "currency": "USD"},
            {"unit": "per M cached input tokens", "price": 0.1, "currency": "USD"},
        ],
        "context_window": "8192",
        "languages": "en, de",
        "async_queue": "true",
        "planned_deprecation_date": "2027-03-31",
        "function_calling": "true",
        "beta": "true",
    }
    named = [row["name"] for row in (await search(client, hide_experimental="true", author="acme"))["result"]]
    assert named == ["@hf/acme/tiny", SPEECH.id]
    by_task = await search(client, task=row["task"]["id"], source=1)
    assert [found["name"] for found in by_task["result"]] == [MODEL, PRICED.id]
    priced, speech = (await search(client, format="openrouter", author="acme"))["data"][1:]
    assert priced["pricing"] == {
        "prompt": "0.0000006",
        "completion": "0.000003",
        "input_cache_read": "0.0000001",
        "request": "0",
        "image": "0.00",
    }
    assert (speech["input_modalities"], speech["supported_features"]) == (["audio"], [])
    assert speech["pricing"]["audio_second"] == "0.000008333"
