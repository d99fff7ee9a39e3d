"""One of other people's servers, as the configuration has it."""

import msgspec

from emberline.balancer.adapters.adapter import Adapter
from emberline.balancer.adapters.table import adapter_for
from emberline.balancer.endpoint import Endpoint
from emberline.balancer.http.address import parse

BOOTSTRAP_PORT = 8998  # of Mooncake and SGLang alike


class Server(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    endpoint: Endpoint  # its address is the URL, its token the key that the server wants
    transfer: str = ""  # how KV goes from prefill to decode; empty: the kind's usual way
    bootstrap: str = ""  # host:port where a prefill server tells how to reach its KV; empty: 8998 at its host
    kv_events: str = ""  # "tcp://host:5557"
    kv_replay: str = ""  # "tcp://host:5558", to ask again for events that were missed
    tokenizer: str = ""  # file or folder of the model's tokenizer; empty: not known here
    max_running: int = 0  # 0: unknown
    context_len: int = 0  # 0: as the server says

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def kind(self) -> str:
        return self.endpoint.kind

    @property
    def meeting_point(self) -> str:
        return self.bootstrap or f"{parse(self.endpoint.address).host}:{BOOTSTRAP_PORT}"

    def adapter(self) -> Adapter | None:
        return adapter_for(self.kind, self.transfer)
