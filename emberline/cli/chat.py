"""A conversation in the terminal: answers as they stream, and the commands that begin with a slash."""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from emberline.cli import http_client as client
from emberline.cli.http_client import ChatTiming
from emberline.cli.terminal import LineReader, WordWrap, printable, transient_line
from emberline.protocol.errors import BadInput, EmberlineError
from emberline.protocol.sizes import format_limit
from emberline.server.address import ServerAddress

HELP = """  /model [NAME]         the model; or go on with another one of this server
  /set [NAME [VALUE]]   the options; set one, or without a value leave it to the model
  /image FILE           attach an image to the next message
  /save FILE            write the conversation as JSON, to be sent as `messages`
  /clear                forget the conversation
  /exit                 leave (Ctrl-D does too)
  /help                 this list
  \"\"\"                   begin and end a text of several lines
  Ctrl-C                stop the answer"""
_OPTIONS: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "max_tokens": int,
    "seed": int,
    "reasoning_effort": str,
    "system": str,
}


class ChatSession:
    """One conversation, its model and its options."""

    def __init__(
        self,
        address: ServerAddress,
        model: str,
        options: dict[str, Any],
        system: str | None,
        history: Path,
        *,
        verbose: bool,
    ) -> None:
        self._address = address
        self._model = model
        self._options = {name: value for name, value in {**options, "system": system}.items() if value is not None}
        self._history = history
        self._verbose = verbose
        self._messages: list[dict[str, Any]] = []
        self._images: list[str] = []  # data: URLs, for the next message

    def attach(self, name: str) -> None:
        """Attach an image file to the next message. Raises BadInput if it is none."""
        self._images.append(read_image(name))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages as they are sent, after the system prompt."""
        system = self._options.get("system")
        return [*([{"role": "system", "content": system}] if system else []), *self._messages]

    def answer(self, prompt: str) -> int:
        """Print the answer as it streams. Ctrl-C ends it; the partial answer stays in the conversation."""
        content: Any = prompt
        if self._images:
            images = [{"type": "image_url", "image_url": {"url": url}} for url in self._images]
            content, self._images = [*images, {"type": "text", "text": prompt}], []
        self._messages.append({"role": "user", "content": content})
        options = {name: value for name, value in self._options.items() if name != "system"}
        body = {"model": self._model, **options, "messages": self.messages}
        timing, received, status = ChatTiming(), [], 0
        wrap = WordWrap() if sys.stdout.isatty() else None
        notices, notice = set[str](), ExitStack()  # what the server says before the answer: that it loads the model

        def notify(comment: str) -> None:
            if comment not in notices:
                notices.add(comment)
                notice.close()
                notice.enter_context(transient_line(f"{printable(comment)} …", elsewhere=True))

        deltas = client.chat(self._address, body, timing, notify)
        try:
            for text in deltas:
                notice.close()
                received.append(text)
                sys.stdout.write(wrap.push(printable(text)) if wrap else text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            status = 130
        finally:
            notice.close()
            deltas.close()
        print(wrap.finish() if wrap else "")
        self._messages.append({"role": "assistant", "content": "".join(received)})
        if self._verbose:
            print(_summary(timing), file=sys.stderr)
        return status

    def interact(self) -> int:
        print(f"{self._model} at {self._address.url}. /help lists the commands.")
        for line in LineReader(self._history).lines():
            before = list(self._messages)
            try:
                if not line.startswith("/"):
                    self.answer(line)
                elif not self._command(line):
                    break
            except EmberlineError as error:
                self._messages = before
                print(f"emberline: {error.message}", file=sys.stderr)
        return 0

    def _command(self, line: str) -> bool:
        """Carry it out; False: leave."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name == "/clear":
            self._messages = []
            print("The conversation is forgotten.")
        elif name == "/model":
            self._choose_model(rest)
        elif name == "/set":
            self._set(rest)
        elif name == "/image":
            self._attach(rest)
        elif name == "/save":
            self._save(rest)
        else:
            print(HELP if name in ("/help", "/?") else f"There is no command {name}.\n{HELP}")
        return True

    def _attach(self, name: str) -> None:
        if not name:
            raise BadInput("say which: /image FILE")
        self.attach(name)
        print(f"{len(self._images)} attached to the next message.")

    def _choose_model(self, name: str) -> None:
        names = client.served_models(self._address)
        others = ", ".join(dict.fromkeys(names.values()))
        if name and name.lower() not in names:
            raise BadInput(f"this server has no model {name!r}; it has {others}")
        self._model = names[name.lower()] if name else self._model
        print(self._model if name else f"{self._model}; this server has {others}")

    def _set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        if not name:
            for option in _OPTIONS:
                print(f"  {option:<20}{self._options.get(option, 'as the model has it')}")
            return
        if name not in _OPTIONS:
            raise BadInput(f"there is no option {name!r}; there are {', '.join(_OPTIONS)}")
        if not value.strip():
            self._options.pop(name, None)
            return
        try:
            self._options[name] = _OPTIONS[name](value.strip())
        except ValueError:
            raise BadInput(f"{name} is a number, not {value.strip()!r}") from None

    def _save(self, name: str) -> None:
        if not name:
            raise BadInput("say where: /save FILE")
        path = Path(name).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump({"model": self._model, "messages": self.messages}, file, ensure_ascii=False, indent=2)
                file.write("\n")
        except FileExistsError:
            raise BadInput(f"{path} exists already; choose another name") from None
        except OSError as error:
            raise BadInput(f"{path} cannot be written: {error.strerror}") from None
        print(f"The conversation is in {path}.")


def read_image(name: str) -> str:
    """An image file as a data: URL. Raises BadInput if it cannot be read, or is no image that models take."""
    from emberline.images.sources import ImageLimits, data_url

    path, most = Path(name).expanduser(), ImageLimits().n_bytes
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > most:
        raise BadInput(f"{path} is larger than {format_limit(most)}")
    try:
        return data_url(data)
    except BadInput:
        raise BadInput(f"{path} is no PNG, JPEG, WebP or GIF file") from None


def _summary(timing: ChatTiming) -> str:
    answer = f"{timing.output_tokens} tokens at {timing.tokens_per_s:.1f}/s"
    prompt = f"{timing.prompt_tokens} in the prompt ({timing.cached_tokens} cached)"
    return f"{answer}, TTFT {timing.ttft_s * 1e3:.0f} ms; {prompt}"
