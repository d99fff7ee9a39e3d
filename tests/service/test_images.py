"""Images in requests to our own engines: where they are in the prompt, what the engine gets, who may share what."""

import base64
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emberline.images.decoders import MEMORY_BYTES, ImageDecoders
from emberline.images.request_images import RequestImages
from emberline.images.sources import FILE_SCHEME, ImageLimits, ImageSources
from emberline.net.egress_policy import EgressPolicy
from emberline.protocol import token_ids as tokens
from emberline.protocol.block_hash import DIGEST_BYTES
from emberline.protocol.errors import (
    BadInput,
    ContextExceeded,
    EmberlineError,
    NoSuchFile,
    NotFound,
    TooLarge,
    Unsupported,
    from_info,
)
from emberline.protocol.events import Completed, Usage
from emberline.protocol.price import Price
from emberline.protocol.request import ContentPart, GenerateRequest, Message, Principal, SamplingParams, ToolCall
from emberline.service import Service, open_service
from emberline.service.work import Work
from emberline.supervisor.sandbox.confinement import Confinement
from emberline.supervisor.sandbox.launcher import Launcher
from emberline.text.text_model import TextModel
from tests.images.files import PROCESSOR, encoded, picture
from tests.service.conftest import ALICE, MODEL, PATIENCE_S, byte_model, offer
from tests.service.fake_engine import FakeEngine

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
ROWS = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", *ROWS]
N_ROWS = 5  # four tiles and the whole, one row each
RED, BLUE = picture(60, 60), picture(60, 60).transpose(0)
PRICE = Price(input=1_000, output=3_000, image=7)
BOB = Principal("bob", "", b"b" * 16)


def url(image: Any, kind: str = "PNG") -> str:
    return f"data:image/{kind.lower()};base64,{base64.b64encode(encoded(image, kind)).decode()}"


def image(picture: Any, detail: str = "") -> ContentPart:
    return ContentPart("image", url(picture), detail=detail)


def text(value: str) -> ContentPart:
    return ContentPart("text", value)


def said(*parts: ContentPart, role: Any = "user", **fields: Any) -> Message:
    return Message(role, "".join(part.value for part in parts if part.kind == "text"), parts=parts, **fields)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """A tokenizer with a token per byte and the tokens of images, and a template whose contents are lists of parts."""
    folder = tmp_path_factory.mktemp("seeing")
    byte_model(folder, SPECIAL)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    loaded = TextModel.load(folder)
    return TextModel(loaded.tokenizer, loaded.template, processor(loaded))


def processor(model: TextModel) -> Any:
    return msgspec.structs.replace(PROCESSOR, image_token_id=model.tokenizer.special["<image>"])


class Files:
    """The files of accounts, in memory."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], bytes] = {}

    async def read(self, account: str, file_id: str, max_bytes: int) -> bytes:
        if (data := self.found.get((account, file_id))) is None:
            raise NotFound("no file")
        return data


@pytest.fixture(scope="module")
def decoders() -> Any:
    """Confined processes that the tests of this module share."""
    shared = ImageDecoders(Launcher(Confinement(memory_bytes=MEMORY_BYTES)).start, 1)
    yield shared
    shared.close()


class SharedDecoders(ImageDecoders):
    """Decoders that a service does not end."""

    def __init__(self, inner: ImageDecoders) -> None:
        self.inner = inner
        self.n_decoded = 0

    async def decode(self, job: Any) -> Any:
        self.n_decoded += 1
        return await self.inner.decode(job)

    async def warm_up(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Bench:
    """A service over one engine that sees."""

    def __init__(self, service: Service, engine: FakeEngine, model: TextModel, decoders: SharedDecoders) -> None:
        self.service, self.engine, self.model, self.decoders = service, engine, model, decoders
        self.n_asked = 0

    async def run(self, *messages: Message, principal: Principal = ALICE, **fields: Any) -> Completed:
        """Run a request to its end."""
        self.n_asked += 1
        fields = {"sampling": SamplingParams(max_tokens=2), **fields}
        request = GenerateRequest(id=f"r{self.n_asked}", model=MODEL, messages=messages, **fields)
        events = [event async for event in self.service.run(Work(request, principal))]
        assert isinstance(events[-1], Completed)
        return events[-1]

    async def ask(self, *messages: Message, **fields: Any) -> Usage:
        """Run a request to its end. Returns its usage."""
        return (await self.run(*messages, **fields)).usage

    @property
    def last(self) -> Any:
        return self.engine.submitted[-1]

    def prompt(self) -> str:
        return self.model.decode(self.last.prompt_ids, special=True)


@pytest.fixture
async def bench(
    tmp_path: Path, seeing: TextModel, decoders: ImageDecoders, say: Callable[..., Any]
) -> AsyncIterator[Bench]:
    engine = await FakeEngine(tmp_path / "e0.sock", say("Hi"), images=processor(seeing), context_len=1024).start()
    shared = SharedDecoders(decoders)
    limits = ImageLimits(n_images=4, n_bytes=1 << 20, n_pixels=1_000_000, n_total_pixels=1_500_000)
    images = RequestImages(ImageSources(EgressPolicy(), limits, Files()), shared)
    served = [offer(seeing, engine)]
    service = await open_service(served, data_dir=tmp_path / "data", images=images, prices={MODEL: PRICE})
    assert await service.ready(PATIENCE_S)
    yield Bench(service, engine, seeing, shared)
    await service.close()
    await engine.die()


async def test_an_image_stands_in_the_prompt_where_the_message_has_it(bench: Bench) -> None:
    usage = await bench.ask(said(text("Before "), image(RED), text(" after")))
    tiles = "".join(f"<fake_token_around_image>{row}<image>" + ("\n" if row.endswith("2>") else "") for row in ROWS)
    whole = "\n<fake_token_around_image><global-img><image><fake_token_around_image>"
    assert bench.prompt() == f"<|start|>user\nBefore {tiles}{whole} after<|end|>\n<|start|>assistant\n"
    (sent,) = bench.last.images
    ids = tokens.unpack(bench.last.prompt_ids)
    image_id = bench.model.tokenizer.special["<image>"]
    places = [at for at, one in enumerate(ids) if one == image_id]
    assert (places[0], places[-1], len(places)) == (sent.start, sent.end - 1, N_ROWS)
    assert len(sent.pixels) == 3 * 64 * 64 * len(sent.tiles) == 3 * 64 * 64 * N_ROWS
    red, green, blue = sent.pixels[3 * 64 * 40 : 3 * 64 * 40 + 3]
    assert red > 200 > 60 > max(green, blue)
    assert (usage.image_tokens, usage.prompt_tokens) == (N_ROWS, len(ids))


async def test_a_chat_of_text_alone_is_rendered_too(bench: Bench) -> None:
    """The template reads parts only, and leaves out a content that is a text."""
    usage = await bench.ask(Message("system", "Be brief."), Message("user", "Hello"))
    assert bench.prompt() == "<|start|>system\nBe brief.<|end|>\n<|start|>user\nHello<|end|>\n<|start|>assistant\n"
    assert (bench.last.images, usage.image_tokens) == ((), 0)


async def test_a_clients_placeholder_is_ordinary_text(bench: Bench) -> None:
    await bench.ask(said(text("<image> is no image, "), image(RED)))
    image_id = bench.model.tokenizer.special["<image>"]
    assert tokens.unpack(bench.last.prompt_ids).count(image_id) == N_ROWS
    assert "<image> is no image" in bench.prompt()


async def test_images_in_the_results_of_tools_and_in_earlier_turns(bench: Bench) -> None:
    call = ToolCall("c1", "screenshot", "{}")
    await bench.ask(
        said(image(BLUE), text("Compare it")),
        Message("assistant", "", tool_calls=(call,)),
        said(text("Here: "), image(RED), role="tool", tool_call_id="c1"),
        Message("user", "Well?"),
    )
    first, second = bench.last.images
    assert first.end < second.start
    assert first.pixels != second.pixels
    assert "Here: <fake_token_around_image>" in bench.prompt()


async def test_the_same_image_is_decoded_once_and_cached_by_account_and_detail(bench: Bench) -> None:
    await bench.ask(said(image(RED), image(RED), text("Same?")))
    assert bench.decoders.n_decoded == 1
    one, two = bench.last.images
    assert one.digest == two.digest
    await bench.ask(said(image(RED), text("Again")))
    assert bench.decoders.n_decoded == 1
    await bench.ask(said(image(RED, detail="low"), text("Small")))
    low = bench.last.images[0]
    assert (bench.decoders.n_decoded, len(low.tiles), low.digest != one.digest) == (2, 1, True)
    await bench.ask(said(image(RED), text("Again")), principal=BOB)
    assert bench.decoders.n_decoded == 3
    assert bench.last.images[0].digest != one.digest


async def test_block_keys_differ_where_the_image_does(bench: Bench) -> None:
    async def keys(picture: Any) -> list[bytes]:
        await bench.ask(said(text("The same words before it: "), image(picture), text("and after it")))
        sent = bench.last.keys
        return [sent[at : at + DIGEST_BYTES] for at in range(0, len(sent), DIGEST_BYTES)]

    red, blue, again = await keys(RED), await keys(BLUE), await keys(RED)
    at = bench.last.images[0].start // 16
    assert red == again
    assert red[:at] == blue[:at]
    assert not set(red[at:]) & set(blue[at:])


async def test_a_next_turn_reuses_the_ids_of_the_last(bench: Bench) -> None:
    asked = said(image(RED), text("What is this?"))
    await bench.ask(asked, session="s")
    first = bench.last
    await bench.ask(asked, Message("assistant", "Hi"), Message("user", "Sure?"), session="s")
    assert bench.last.prompt_ids.startswith(first.prompt_ids)
    assert [sent.digest for sent in bench.last.images] == [sent.digest for sent in first.images]
    other = said(image(BLUE), text("What is this?"))
    await bench.ask(other, Message("assistant", "Hi"), Message("user", "Sure?"), session="s")
    assert bench.last.images[0].digest != first.images[0].digest


async def test_a_price_may_count_images(bench: Bench) -> None:
    completed = await bench.run(said(image(RED), image(BLUE), text("?")))
    usage = completed.usage
    expected = PRICE.cost_pico("default", input_tokens=usage.prompt_tokens, output_tokens=2, images=2)
    assert completed.cost_pico == expected


async def test_a_stored_file_of_the_same_account_alone(bench: Bench) -> None:
    files = Files()
    files.found["alice", "file-1"] = encoded(RED)
    bench.service.use_files(files)
    stored = said(ContentPart("image", FILE_SCHEME + "file-1"), text("What is this?"))
    await bench.ask(said(image(RED), text("What is this?")))
    await bench.ask(stored)
    assert bench.engine.submitted[0].images == bench.last.images
    with pytest.raises(NoSuchFile, match="there is no file") as refused:
        await bench.ask(stored, principal=BOB)
    assert refused.value.message.startswith("image 1 of the request")
    assert isinstance(from_info(refused.value.info()), NoSuchFile), "also from a queued job, or another process"


async def test_tokens_are_counted_with_images(bench: Bench) -> None:
    request = GenerateRequest(id="c", model=MODEL, messages=(said(image(RED), text("Count")),))
    n_tokens = await bench.service.count_tokens(request, ALICE)
    assert (await bench.ask(said(image(RED), text("Count")))).prompt_tokens == n_tokens


BROKEN: list[tuple[str, ContentPart, type[EmberlineError], str]] = [
    ("cut off", ContentPart("image", url(RED)[:200]), BadInput, "damaged|base64"),
    ("no image", ContentPart("image", "data:image/png;base64,aGVsbG8="), BadInput, "no PNG, JPEG, WebP or GIF"),
    ("no base64", ContentPart("image", "data:image/png;base64,!!"), BadInput, "base64"),
    ("not encoded", ContentPart("image", "data:image/png,abc"), BadInput, "data: URL in base64"),
    ("path", ContentPart("image", "file:///etc/passwd"), BadInput, "data: URL in base64"),
    ("private", ContentPart("image", "https://127.0.0.1/a.png"), BadInput, "inside the network"),
    ("metadata", ContentPart("image", "https://169.254.169.254/latest"), BadInput, "inside the network"),
    ("no such file", ContentPart("image", FILE_SCHEME + "file-1"), NoSuchFile, "there is no file"),
    ("large", ContentPart("image", "data:image/png;base64," + "A" * (2 << 20)), TooLarge, "larger than 1 MiB"),
    ("pixels", image(picture(1200, 1200, "1")), BadInput, "1200 x 1200 pixels"),
]


@pytest.mark.parametrize(("part", "kind", "why"), [one[1:] for one in BROKEN], ids=[one[0] for one in BROKEN])
async def test_an_image_that_cannot_be_used_is_named(
    bench: Bench, part: ContentPart, kind: type[EmberlineError], why: str
) -> None:
    with pytest.raises(kind, match=why) as refused:
        await bench.ask(Message("user", "Hi"), Message("assistant", "Hi"), said(text("Look: "), image(RED), part))
    assert "image 2 of the request (`messages[2].content[2]`)" in refused.value.message
    assert refused.value.param == "messages[2].content[2]"
    assert not bench.engine.submitted


async def test_bounds_of_a_request(bench: Bench) -> None:
    with pytest.raises(TooLarge, match="5 images, and at most 4"):
        await bench.ask(said(*[image(RED)] * 5))
    large = image(picture(1000, 800, "1"))
    with pytest.raises(TooLarge, match="1,500,000 pixels together"):
        await bench.ask(said(large, large))
    with pytest.raises(BadInput, match="not of the system"):
        await bench.ask(said(image(RED), role="system"), Message("user", "Hi"))


async def test_a_conversation_is_cut_with_its_images(bench: Bench) -> None:
    old = said(image(BLUE), text("x" * 700))
    await bench.ask(old, Message("assistant", "Ok"), said(image(RED), text("y" * 400)), truncate=True)
    assert len(bench.last.images) == 1
    assert "x" not in bench.prompt().replace("<row", "")
    with pytest.raises(ContextExceeded, match="its images do not fit"):
        await bench.ask(said(image(RED), text("z" * 2000)), truncate=True)


async def test_a_model_without_vision_names_the_image(service: Service) -> None:
    request = GenerateRequest(id="r", model=MODEL, messages=(said(text("Look"), image(RED)),))
    with pytest.raises(Unsupported, match=r"takes no images.*messages\[0\]\.content\[1\]"):
        async for _ in service.run(Work(request, ALICE)):
            pass


async def test_other_media_are_refused_by_name(bench: Bench) -> None:
    with pytest.raises(Unsupported, match="'audio'"):
        await bench.ask(said(image(RED), ContentPart("audio", "data:audio/wav;base64,AA==")))
