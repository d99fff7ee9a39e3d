"""Typed calls between two processes over a frame link. The annotations of Protocols are the table of messages.

Each end of a link serves some interfaces to the other end: a NamedTuple whose fields are annotated with Protocols. An
`async def` of a Protocol is a call, which is answered; a plain `def` is a notice, which is not. From the annotations a
`Table` makes one message type per method for the arguments, and one per call for the result, so a single typed decoder
reads all that an end can receive. Frames are handled in the order of their arrival: a notice runs before the next frame
is read, and calls start in order, each in a task of its own. A call that is cancelled goes on at the other end.

Both ends are processes of one release, so these messages have no versions.
"""

import asyncio
import inspect
import itertools
import logging
import types
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import cache
from typing import Any, Generic, TypeVar, Union, get_type_hints

import msgspec

from emberline.net.link import Link
from emberline.protocol.errors import EmberlineError, ErrorInfo, Internal, Unavailable, from_info
from emberline.protocol.frames import decode

S = TypeVar("S")
Message = msgspec.Struct
Maker = Callable[..., Message]  # a type of message: called with a call id, then with arguments or with a result
Send = Callable[[Message], None]
Call = Callable[[Maker, tuple[Any, ...], Mapping[str, Any]], Awaitable[Any]]  # the type of the request, its arguments

log = logging.getLogger("emberline.rpc")


class Failed(Message, array_like=True, tag="failed"):
    """The answer to a call that has raised an error."""

    call_id: int
    error: ErrorInfo


class Method:
    """The message types of one method."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        hints = get_type_hints(function, include_extras=True)
        fields: list[Any] = [("call_id", int)]  # 0 for a notice
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            default = () if parameter.default is parameter.empty else (parameter.default,)
            fields.append((parameter.name, hints[parameter.name], *default))
        self.request = msgspec.defstruct(name, fields, array_like=True, tag=name)
        self.answer: Maker | None = None  # None for a notice
        if inspect.iscoroutinefunction(function):
            result: list[Any] = [("call_id", int), ("result", hints["return"])]
            self.answer = msgspec.defstruct(name, result, array_like=True, tag=f"{name}.answer")


class Table(Generic[S]):
    """The methods of the interfaces that one end serves. `services` is a NamedTuple class, its fields Protocols."""

    def __init__(self, services: Callable[..., S]) -> None:
        self._services = services
        self._stubs: list[Callable[[Send, Call | None], Any]] = []  # by field
        self.methods: dict[str, Method] = {}  # by field and name: "core.admit"
        for field, interface in get_type_hints(services).items():
            functions = inspect.getmembers(interface, inspect.isfunction)
            methods = {name: Method(f"{field}.{name}", each) for name, each in functions if not name.startswith("_")}
            self.methods |= {f"{field}.{name}": method for name, method in methods.items()}
            self._stubs.append(_stub(interface, methods))

    def remote(self, send: Send, call: Call | None = None) -> S:
        """Returns the services of the other end. `call` may be None if they have notices only."""
        return self._services(*(stub(send, call) for stub in self._stubs))

    def bound(self, services: S) -> dict[Maker, tuple[Maker | None, Callable[..., Any]]]:
        """Returns the type of the answer and the function that handles the request, by type of request."""
        found: dict[Maker, tuple[Maker | None, Callable[..., Any]]] = {}
        for name, method in self.methods.items():
            field, _, function = name.partition(".")
            found[method.request] = method.answer, getattr(getattr(services, field), function)
        return found


def _stub(interface: type, methods: Mapping[str, Method]) -> type:
    """Make a class that implements an interface by sending requests. It inherits the constants of the interface."""

    def init(self: Any, send: Send, call: Call | None) -> None:
        self._send, self._call = send, call

    def implementation(method: Method) -> Callable[..., Any]:
        request = method.request
        if method.answer is None:
            return lambda self, *args, **kwargs: self._send(request(0, *args, **kwargs))
        return lambda self, *args, **kwargs: self._call(request, args, kwargs)

    body = {"__init__": init, **{name: implementation(method) for name, method in methods.items()}}
    return types.new_class(f"Remote{interface.__name__}", (interface,), {}, lambda space: space.update(body))


@cache
def decoder(served: Table[Any], called: Table[Any]) -> "msgspec.msgpack.Decoder[Any]":
    """Returns a decoder of all that an end receives: requests to what it serves, and answers to what it calls."""
    requests = [method.request for method in served.methods.values()]
    answers = [method.answer for method in called.methods.values() if method.answer is not None]
    return msgspec.msgpack.Decoder(Union[(Failed, *requests, *answers)])


class Peer(Link):
    """One end of a link: serves `services`, and calls those of the other end, which log messages call `name`."""

    def __init__(
        self, name: str, served: Table[S], services: S, called: Table[Any], tasks: set[asyncio.Task[None]] | None = None
    ) -> None:
        """`tasks` receives the calls that are being served: its owner may wait for them after the link is closed."""
        super().__init__(name)
        self._tasks = set() if tasks is None else tasks
        self._decoder = decoder(served, called)
        self._served = served.bound(services)
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # for answers, by call id
        self._call_ids = itertools.count(1)

    async def call(self, request: Maker, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the other end: return its result or raise its error. Raises Unavailable if the link is
        lost."""
        if self.closed.done():
            raise self._lost()
        call_id = next(self._call_ids)
        waiter = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        try:
            self.send(request(call_id, *args, **kwargs))
            return await waiter
        finally:
            del self._waiting[call_id]

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_frame(self, payload: bytes) -> None:
        frame = decode(self._decoder, payload)
        if (served := self._served.get(type(frame))) is not None:
            answer, function = served
            call_id, *arguments = msgspec.structs.astuple(frame)
            if answer is None:
                function(*arguments)
            else:
                self.spawn(self._answer(call_id, answer, function, arguments))
            return
        waiter = self._waiting.get(frame.call_id)
        if waiter is None or waiter.done():  # the caller was cancelled meanwhile
            return
        if type(frame) is Failed:
            waiter.set_exception(from_info(frame.error))
        else:
            waiter.set_result(frame.result)

    def on_close(self, reason: str) -> None:
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(self._lost())

    async def _answer(
        self, call_id: int, answer: Maker, function: Callable[..., Awaitable[Any]], arguments: list[Any]
    ) -> None:
        try:
            self.send(answer(call_id, await function(*arguments)))
        except EmberlineError as error:
            self.send(Failed(call_id, error.info()))
        except asyncio.CancelledError:
            self.send(Failed(call_id, Unavailable("the call was cancelled where it was served").info()))
            raise
        except Exception:
            log.exception("a call of %s failed", self.peer, extra={"method": answer.__name__})
            self.send(Failed(call_id, Internal("internal error").info()))

    def _lost(self) -> Unavailable:
        return Unavailable(f"the connection to {self.peer} was lost", retry_after_s=1)
