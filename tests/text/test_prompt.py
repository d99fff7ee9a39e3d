from unicodedata import normalize

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from emberline.protocol.request import GenerateRequest, Message
from emberline.protocol.token_ids import pack, unpack
from emberline.service.sessions import Sessions
from emberline.text.chat_template import ChatTemplate
from emberline.text.prompt import (
    KnownPrefix,
    PrefixCut,
    TextHash,
    build_prompt,
    chain_digests,
    prompt_entry,
    reply_entry,
    turn_entries,
)
from emberline.text.text_model import TextModel
from tests.examples import n_examples
from tests.text.chats import family
from tests.text.strategies import snippets

CHATS = ("chatml", "reasoning", "plain", "llama3", "gemma", "phi", "llama2")


def _request(messages, **kwargs):
    return GenerateRequest(id="r", model="m", messages=tuple(messages), **kwargs)


class Chat:
    """A client that holds a conversation, and the sessions on the other side."""

    def __init__(self, model: TextModel) -> None:
        self.model = model
        self.sessions = Sessions()
        self.messages: list[Message] = []

    def ask(self, text):
        """The prompt with what the sessions know, and the prompt of the whole."""
        self.messages.append(Message("user", text))
        request = _request(self.messages)
        self.digests = chain_digests(self.messages)
        self.prompt = build_prompt(self.model, request, self.sessions.find("a", "m", self.digests))
        return self.prompt, build_prompt(self.model, request)

    def reply(self, reply_ids, text=None):
        """The model's reply comes back from the client as it was sent, or as `text`."""
        detokenizer = self.model.detokenizer(self.prompt.ids)
        sent = detokenizer.push(unpack(reply_ids)) + detokenizer.finish()
        reply = Message("assistant", sent)
        request = _request(self.messages)
        for digest, entry in turn_entries(self.model, request, self.prompt, self.digests, reply, reply_ids):
            self.sessions.add("a", "m", digest, entry.ids, entry.text_len, entry.text_digest)
        self.messages.append(Message("assistant", sent if text is None else text))

    def canonical(self, text):
        """Ids of a reply as whole tokenization would have them; None when it would not leave the prompt's ids alone."""
        prompt = self.model.with_bos(self.model.tokenizer.encode_marked(*self.prompt.rendered))
        rendered = self.prompt.rendered
        whole = self.model.with_bos(self.model.tokenizer.encode_marked(rendered.text + text, rendered.mark))
        return whole[len(prompt) :] if whole.startswith(prompt) else None


def _scattered(model, text):
    """Valid ids that no tokenizer would choose: every character by itself."""
    n_before = len(model.encode("\0", special=False))
    return b"".join(model.encode("\0" + char, special=False)[n_before:] for char in text)


@pytest.fixture(scope="module")
def smol(smollm2):
    return TextModel.load(smollm2)


def test_the_next_turn_reuses_the_last_one_whole(smol):
    chat = Chat(smol)
    first, _ = chat.ask("What is the capital of France?")
    reply = b"".join(smol.encode(piece, special=False) for piece in ("Par", "is", ", of", " co", "urse."))
    assert reply != smol.encode("Paris, of course.", special=False)
    chat.reply(reply + pack([2]))
    second, whole = chat.ask("And of Spain?")
    assert second.ids.startswith(first.ids + reply)
    assert second.n_known == (len(first.ids) + len(reply)) // 4
    assert second.ids != whole.ids
    assert smol.decode(second.ids, special=True) == smol.decode(whole.ids, special=True)


def test_what_was_known_is_remembered_as_if_it_were_new(smol):
    chat = Chat(smol)
    for text in ("one", "two", "three"):
        prompt, whole = chat.ask(text)
        assert prompt.ids == whole.ids
        reply = Message("assistant", text * 2)
        told = (_request(chat.messages), reply, smol.encode(text * 2, special=False))
        assert prompt_entry(smol, prompt) == prompt_entry(smol, whole) is not None
        assert reply_entry(smol, told[0], prompt, *told[1:]) == reply_entry(smol, told[0], whole, *told[1:]) is not None
        chat.reply(told[2])
    assert prompt.n_known > 0


def test_a_retry_reuses_the_prompt(smol):
    chat = Chat(smol)
    first, _ = chat.ask("hi")
    chat.reply(smol.encode("hello", special=False))
    del chat.messages[-2:]
    again, whole = chat.ask("hi")
    assert again.ids == first.ids == whole.ids
    assert again.n_known > again.n_ids - 4


def test_a_changed_reply_is_not_reused(smol):
    chat = Chat(smol)
    first, _ = chat.ask("hi")
    chat.reply(smol.encode("hello", special=False), text="Hello!")
    second, whole = chat.ask("again")
    assert second.ids == whole.ids
    assert second.n_known <= first.n_ids


def test_the_conversation_of_another_account_is_unknown(smol):
    chat = Chat(smol)
    chat.ask("hi")
    chat.reply(smol.encode("hello", special=False))
    assert chat.sessions.find("a", "m", chat.digests) is not None
    assert chat.sessions.find("b", "m", chat.digests) is None
    assert chat.sessions.find("a", "n", chat.digests) is None


@pytest.mark.parametrize("name", CHATS)
def test_known_ids_always_mean_the_same_text(name):
    model = family(name)

    def text(prompt):
        """Composed: some tokenizers compose text, and a model's own ids need not."""
        return normalize("NFC", model.decode(prompt.ids, special=True))

    @settings(max_examples=n_examples(60))
    @given(st.lists(st.tuples(snippets, snippets, st.booleans()), min_size=1, max_size=3), snippets)
    def same(turns, last):
        chat = Chat(model)
        for question, answer, ended in turns:
            prompt, whole = chat.ask(question)
            assert text(prompt) == text(whole)
            chat.reply(_scattered(model, answer) + (pack([max(model.special_ids)]) if ended else b""))
        prompt, whole = chat.ask(last)
        assert text(prompt) == text(whole)
        assert unpack(prompt.ids).count(model.bos_id) == unpack(whole.ids).count(model.bos_id) or model.bos_id is None

    same()


@pytest.mark.parametrize("name", CHATS)
def test_canonical_replies_give_the_ids_of_the_whole(name):
    model = family(name)

    @settings(max_examples=n_examples(60))
    @given(st.lists(st.tuples(snippets, st.text("abc the,.\n 1", max_size=12)), min_size=1, max_size=3), snippets)
    def same(turns, last):
        chat = Chat(model)
        for question, answer in turns:
            prompt, whole = chat.ask(question)
            assert prompt.ids == whole.ids
            reply = chat.canonical(answer)
            assume(reply is not None)
            chat.reply(reply)
        prompt, whole = chat.ask(last)
        assert prompt.ids == whole.ids

    same()


@pytest.mark.parametrize("name", ["chatml", "reasoning", "llama3", "gemma", "phi"])
def test_replies_are_kept_where_a_special_token_ends_them(name):
    model = family(name)
    chat = Chat(model)
    first, _ = chat.ask("the question")
    reply = _scattered(model, "the")
    chat.reply(reply)
    second, whole = chat.ask("and then?")
    assert second.n_known == (len(first.ids) + len(reply)) // 4
    assert second.ids != whole.ids


def test_a_reply_that_ordinary_text_follows_is_tokenized_with_it():
    """Llama 2's template puts a space before the end token."""
    model = family("llama2")
    chat = Chat(model)
    first, _ = chat.ask("the question")
    chat.reply(_scattered(model, " the"))
    second, whole = chat.ask("and then?")
    assert second.ids == whole.ids
    assert second.n_known < first.n_ids


def test_old_reasoning_is_not_kept():
    model = family("reasoning")
    chat = Chat(model)
    first, _ = chat.ask("the question")
    chat.reply(_scattered(model, "<think>so</think>the answer"))
    after_reply = len(chat.sessions)
    second, whole = chat.ask("and then?")
    assert after_reply == 2  # the reply was remembered: without a new question the template writes it so
    assert second.ids == whole.ids
    assert 0 < second.n_known <= first.n_ids
    assert "so" not in model.decode(second.ids)


def test_what_a_template_trims_is_not_kept():
    model = family("llama3")
    chat = Chat(model)
    chat.ask("the question")
    chat.reply(_scattered(model, " the answer\n"))
    second, whole = chat.ask("and then?")
    assert second.ids == whole.ids


def _reply_entry(model, content, reply_ids):
    request = _request([Message("user", "hi")])
    prompt = build_prompt(model, request)
    return reply_entry(model, request, prompt, Message("assistant", content), reply_ids)


def test_a_reply_that_a_stop_string_cut_is_not_kept():
    model = family("chatml")
    ids = model.encode("the end. STOP", special=False)
    assert _reply_entry(model, "the end. ", ids) is None
    assert _reply_entry(model, "the end. STOP", ids) is not None


def test_a_reply_with_special_tokens_inside_is_not_kept():
    model = family("chatml")
    ids = model.encode("the<|im_start|> end", special=True)
    assert _reply_entry(model, "the end", ids) is None


def test_a_reply_that_ends_inside_a_character_is_not_kept():
    model = family("chatml")
    ids = model.encode("the \U000e0001", special=False)[:-4]
    assert _reply_entry(model, "the \ufffd", ids) is None
    ids += model.encode("(", special=False)
    assert _reply_entry(model, model.decode(ids), ids) is None


def test_a_reply_that_spells_a_special_token_is_kept_as_the_text_it_is():
    model = family("chatml")
    ids = model.encode("say <|im_end|> then", special=False)
    chat = Chat(model)
    first, _ = chat.ask("hi")
    chat.reply(ids)
    second, whole = chat.ask("more")
    assert second.ids == whole.ids
    assert second.n_known == (len(first.ids) + len(ids)) // 4


def test_an_end_token_is_left_out():
    model = family("chatml")
    ids = model.encode("the end", special=False)
    ended = _reply_entry(model, "the end", ids + model.encode("<|im_end|>", special=True))
    assert ended == _reply_entry(model, "the end", ids)


def test_a_template_that_refuses_the_reply_is_no_error():
    source = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}<|im_start|>"
    model = TextModel(family("chatml").tokenizer, type(family("chatml").template)(source))
    assert _reply_entry(model, "x", model.encode("x", special=False)) is None


class CountingTemplate(ChatTemplate):
    """A template that counts how often it is rendered."""

    n_rendered = 0

    def render(self, *args, **kwargs):
        self.n_rendered += 1
        return super().render(*args, **kwargs)


def test_a_template_that_renders_replies_exactly_is_not_asked_again():
    template = CountingTemplate(family("chatml").template.source)
    chat = Chat(TextModel(family("chatml").tokenizer, template))
    for n_rendered, text in enumerate(("one", "two", "three"), 1):
        prompt, whole = chat.ask(text)
        assert prompt.ids == whole.ids
        before = template.n_rendered
        chat.reply(_scattered(chat.model, "so it is"))
        assert template.n_rendered - before == (n_rendered == 1)
        assert chat.ask("why?")[0].n_known == (len(prompt.ids) + 4 * len("so it is")) // 4
        chat.messages.clear()


@pytest.mark.parametrize("said", ["odd", "odd ", " odd", "<|im_end|> odd", ""])
def test_a_template_that_was_believed_wrongly_costs_nothing_but_time(said):
    source = family("chatml").template.source.replace(
        "message['content']", "message['content'] | replace('odd', 'even')"
    )
    assert "even" in source
    model = TextModel(family("chatml").tokenizer, ChatTemplate(source))
    chat = Chat(model)
    chat.ask("the question")
    chat.reply(_scattered(model, "the answer"))
    chat.ask("and then?")
    chat.reply(_scattered(model, said))
    last, whole = chat.ask("and last?")
    assert model.decode(last.ids, special=True) == model.decode(whole.ids, special=True)
    assert "odd" not in model.decode(last.ids)


def test_prompts_without_messages():
    model = family("llama3")
    raw = build_prompt(model, GenerateRequest(id="r", model="m", prompt="the <|eot_id|>"))
    assert unpack(raw.ids)[0] == model.bos_id
    assert len(set(unpack(raw.ids)) & model.special_ids) == 2  # a raw prompt writes its special tokens itself
    ids = pack([1, 2, 3])
    given_ids = build_prompt(model, GenerateRequest(id="r", model="m", prompt_ids=ids))
    assert given_ids.ids == ids
    assert prompt_entry(model, raw) is None
    assert turn_entries(model, GenerateRequest(id="r", model="m", prompt="x"), raw, []) == []


def test_ids_of_another_text_are_not_used():
    model = family("chatml")
    request = _request([Message("user", "hi")])
    prompt = build_prompt(model, request)
    other = prompt_entry(model, build_prompt(model, _request([Message("user", "ho")])))
    n_ids = len(other.ids) // 4
    for cut in (PrefixCut(n_ids, other.text_len, other.text_digest), PrefixCut(n_ids, 1 << 40, other.text_digest)):
        assert build_prompt(model, request, KnownPrefix(other.ids, (cut,))) == prompt


def test_text_is_not_continued_between_ordinary_tokens():
    """A known beginning that no special token bounds is not used: a token may reach across."""
    model = family("chatml")
    request = _request([Message("user", "hi there")])
    prompt = build_prompt(model, request)
    text = "<|im_start|>user\nhi"
    ids = model.encode(text, special=True)
    known = KnownPrefix(ids, (PrefixCut(len(ids) // 4, len(text), TextHash().after(text)),))
    assert build_prompt(model, request, known) == prompt


def test_a_known_prefix_may_extend_beyond_the_last_special_token():
    """As a reply does whose calls the template writes with a line break behind them."""
    chatml = family("chatml")
    model = TextModel(chatml.tokenizer, type(chatml.template)("<|im_start|>\n{{ messages[0].content }}"))
    text = "<|im_start|>\n"
    ids = model.encode("<|im_start|>", special=True)
    known = KnownPrefix(ids, (PrefixCut(1, len(text), TextHash().after(text)),))
    prompt = build_prompt(model, _request([Message("user", "hi")]), known)
    assert prompt.n_known == 1
    entry = prompt_entry(model, prompt)
    assert (entry.ids, entry.text_len) == (ids, len(text) - 1)
    assert entry.text_digest == TextHash().after(text[:-1])


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "phi"])
@pytest.mark.parametrize("ends", [True, False])
def test_a_context_is_continued_as_the_whole_conversation_is(name: str, ends: bool) -> None:
    """The client has the ids of the first turn, and sends only its next question."""
    model = family(name)
    first, reply, second = Message("user", "hi"), Message("assistant", "so it is"), Message("user", "why?")
    whole = build_prompt(model, _request([first, reply, second])).ids
    begun = build_prompt(model, _request([first])).ids
    context = begun + model.tokenizer.encode("so it is", special=False)
    if ends:
        context += whole[len(context) : len(context) + 4]  # the token that ended the reply
    prompt = build_prompt(model, _request([second], context_ids=context))
    assert prompt.ids[: len(context)] == context
    detokenizers = [model.detokenizer(b"") for _ in range(2)]
    assert prompt.ids == whole or len({d.push(unpack(ids)) for d, ids in zip(detokenizers, (prompt.ids, whole))}) == 1
    assert prompt.rendered is None, "its ids are not those of the messages"
