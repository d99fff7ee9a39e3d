"""Signatures are accepted by the reference implementation and OpenAI's client; altered ones are not."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from emberline.jobs.webhooks.events import Event, webhook_body
from emberline.jobs.webhooks.webhook_store import encode_secret, signature_headers, signing_key
from tests.jobs.webhooks.helpers import SECRET
from tests.lazy_modules import openai

OLD, NEW = signing_key(SECRET, "we_1", 1), signing_key(SECRET, "we_1", 2)


@given(st.dictionaries(st.text(), st.text() | st.integers(), max_size=4), st.text("abc123_", min_size=1, max_size=40))
def test_the_reference_implementation_verifies_signatures(payload: dict[str, object], message_id: str) -> None:
    body = json.dumps(payload).encode()
    headers = signature_headers([NEW], message_id, int(time.time()), body)
    assert Webhook(encode_secret(NEW)).verify(body, headers) == payload
    with pytest.raises(WebhookVerificationError):
        Webhook(encode_secret(NEW)).verify(body + b" ", headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(encode_secret(NEW)).verify(body, headers | {"webhook-id": message_id + "x"})
    with pytest.raises(WebhookVerificationError):
        Webhook(encode_secret(OLD)).verify(body, headers)


def test_while_rotating_either_secret_verifies() -> None:
    headers = signature_headers([NEW, OLD], "evt_1", int(time.time()), b"{}")
    for key in (OLD, NEW):
        assert Webhook(encode_secret(key)).verify(b"{}", headers) == {}


def test_secrets_differ_by_endpoint_and_version() -> None:
    assert len({OLD, NEW, signing_key(SECRET, "we_2", 1)}) == 3
    assert encode_secret(OLD).startswith("whsec_")
    assert len(OLD) == 32


def test_openai_client_unwraps_a_delivery() -> None:
    event = Event(
        account="local",
        number=10,
        token="ab" * 8,
        type="batch.completed",
        subject="batch_1",
        model="m",
        data={"id": "batch_1"},
        created_us=1_700_000_000_000_000,
    )
    body = webhook_body(event, "we_1")
    headers = signature_headers([NEW], event.id, int(time.time()), body)
    client = openai.OpenAI(api_key="none", webhook_secret=encode_secret(NEW))
    got = client.webhooks.unwrap(body.decode(), headers)
    assert (got.type, got.data.id, got.id, got.created_at) == ("batch.completed", "batch_1", event.id, 1_700_000_000)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body.decode() + " ", headers)
