"""A response made of a whole answer: a line of a batch, or one that was made in the background."""

from typing import Any

import msgspec

from emberline.api.answer_events import pieces_of
from emberline.api.line_call import LineCall
from emberline.api.openai_responses_items import Item, ItemReference, parse, settle
from emberline.api.openai_responses_output import Composer, Event
from emberline.api.openai_responses_request import SEALED, ResponsesRequest, response_id
from emberline.api.openai_responses_stream import Draft
from emberline.api.openai_responses_tools import offered
from emberline.api.unbuilt import refuse_unbuilt
from emberline.protocol.answer import Answer
from emberline.protocol.errors import BadInput
from emberline.protocol.request import GenerateRequest

Json = dict[str, Any]


def draft_of(body: ResponsesRequest, own_id: str, created: int) -> Draft:
    """A response of which nothing has been said yet."""
    called = offered(body.tools, body.tool_choice).called
    composer = Composer(own_id.removeprefix("resp_"), called, summarise=body.summarises, sealed=body.includes(SEALED))
    return Draft(body.echo(own_id, created), composer)


def fill(draft: Draft, answer: Answer, at: int) -> list[Event]:
    """The draft is the whole response then; the events between its beginning and its last."""
    events = [event for piece in pieces_of(answer) for event in draft.take(piece)]
    draft.complete(answer.usage, at)
    return events


class LineResponse(ResponsesRequest, kw_only=True):
    """The body of a batch's line. Lines know nothing of each other, nor of what is stored: each brings all it needs."""

    def ask(self, call: LineCall) -> GenerateRequest:
        refuse_unbuilt(self)
        if self.background:
            raise BadInput("`background` has no meaning in a batch: leave it out", param="background")
        if self.previous_response_id is not None:
            raise BadInput("a line of a batch continues no response: send its items", param="previous_response_id")
        items: list[Item] = []
        for item in parse(self.input):
            if isinstance(item, ItemReference):
                raise BadInput("a line of a batch refers to no stored item: send the item itself", param="input")
            items.append(item)
        items = settle(items, call.id)
        where = [f"input[{i}]" for i in range(len(items))]
        request = self.to_request(call, items, where, offered(self.tools, self.tool_choice))
        if request.session == response_id(call):  # the name of a conversation that nobody will continue
            request = msgspec.structs.replace(request, session=None)
        return request

    def show(self, call: LineCall, created: int, answer: Answer) -> Json:
        draft = draft_of(self, response_id(call), created)
        fill(draft, answer, created)
        return draft.whole | {"store": False}
