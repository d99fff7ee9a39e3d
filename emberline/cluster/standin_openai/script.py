"""What a stand-in does, and how it fails: `key=value,key=value`."""

import msgspec


class Script(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: int = 50  # of a reply, at most
    canned: bool = False  # the same bytes to everybody, at once: for load
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    split: int = 0  # cut what is sent into pieces of so many bytes
    lies: str = ""  # what decode says of its cached tokens: "all" (all but one), else none
    status: int = 0  # answer with this status
    message: str = "scripted"  # of that answer
    hang: bool = False  # take the request, say nothing
    garbage: bool = False  # answer what is no HTTP
    bad_json: bool = False  # a stream with a line that is no JSON, a whole answer that is none
    cut_after: int = -1  # close the connection after so many tokens
    error_after: int = -1  # tell an error inside the stream after so many tokens
    die_after: int = -1  # end the process after so many tokens
    no_params: bool = False  # prefill without kv_transfer_params
    no_done: bool = False  # end the stream without [DONE]
    times: int = -1  # how many requests fail so; then all is well; -1: all of them
    lease_s: float = 30.0
    meet_s: float = 5.0  # how long one leg waits for the other
    sick: bool = False  # /health and all other questions fail

    @property
    def faulty(self) -> bool:
        return self.times != 0


def parse(text: str) -> Script:
    pairs = [item.partition("=") for item in text.split(",") if item]
    return msgspec.convert({key: _value(value) for key, _, value in pairs}, Script, strict=False)


def _value(text: str) -> str | bool:
    return True if text == "" else text
