"""The form of responses: of the endpoint, of lines of batches, and of responses in the background."""

from typing import Any

import msgspec

from emberline.api.common.form import Form
from emberline.api.common.unsupported_fields import refuse_unsupported
from emberline.api.http.errors import FieldNames
from emberline.api.openai.responses.items import Item, ItemReference, parse_input, with_ids
from emberline.api.openai.responses.output import response_body
from emberline.api.openai.responses.request import ResponsesRequest, response_id
from emberline.protocol.complete_response import Answer
from emberline.protocol.errors import BadInput
from emberline.protocol.request import GenerateRequest


def _line_request(
    body: ResponsesRequest, request_id: str, session: str | None = None
) -> tuple[GenerateRequest, FieldNames]:
    """Make the request of a line of a batch. Lines are independent of each other and of stored responses: each must
    hold its whole conversation."""
    refuse_unsupported(body)
    if body.background:
        raise BadInput("`background` has no meaning in a batch: leave it out", param="background")
    if body.generate is False:
        raise BadInput("a line of a batch generates a response: leave `generate` out", param="generate")
    if body.previous_response_id is not None:
        raise BadInput("a line of a batch continues no response: send its items", param="previous_response_id")
    items: list[Item] = []
    for item in parse_input(body.input):
        if isinstance(item, ItemReference):
            raise BadInput("a line of a batch refers to no stored item: send the item itself", param="input")
        items.append(item)
    items = with_ids(items, request_id)
    fields = [f"input[{i}]" for i in range(len(items))]
    request, names = body.to_request(request_id, items, fields, body.parse_tools(), session)
    if request.session == response_id(request_id):  # nothing continues the session of a batch line
        request = msgspec.structs.replace(request, session=None)
    return request, names


def _line_body(request_id: str, body: ResponsesRequest, created: int, answer: Answer) -> dict[str, Any]:
    return response_body(body, response_id(request_id), created, answer) | {"store": False}


# Its endpoint is `endpoints.create`, which continues stored responses and stores the new one.
RESPONSE = Form(
    decoder=msgspec.json.Decoder(ResponsesRequest),
    to_task=_line_request,
    to_body=_line_body,
    session_fields=("prompt_cache_key", "safety_identifier", "user"),
)
