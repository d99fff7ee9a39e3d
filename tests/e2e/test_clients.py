"""The real model through the clients people use, streaming and not, with cached tokens counted."""

import pytest

from tests.lazy_modules import anthropic, cloudflare, openai

MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
QUESTION = "Name three primary colours, please, and say in one sentence what each of them reminds you of."
GREEDY = {"max_tokens": 12, "extra_body": {"temperature": 0}}  # the field every dialect has, not every client


@pytest.fixture(scope="module")
def oai(server: str) -> "openai.OpenAI":
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(server: str) -> "anthropic.Anthropic":
    return anthropic.Anthropic(base_url=f"{server}/client/v4/accounts/anth/ai", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def cf(server: str) -> "cloudflare.Cloudflare":
    return cloudflare.Cloudflare(base_url=f"{server}/client/v4", api_token="none", max_retries=0)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_openai_streams_what_it_answers(oai: "openai.OpenAI") -> None:
    whole = oai.chat.completions.create(model=MODEL, messages=ask(QUESTION), **GREEDY)
    chunks = list(
        oai.chat.completions.create(
            model=MODEL, messages=ask(QUESTION), stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert text.strip()
    assert [c.usage.completion_tokens for c in chunks if c.usage] == [whole.usage.completion_tokens]
    assert {c.choices[0].finish_reason for c in chunks if c.choices} == {None, whole.choices[0].finish_reason}


def test_anthropic_streams_what_it_answers(claude: "anthropic.Anthropic") -> None:
    whole = claude.messages.create(model=MODEL, messages=ask(QUESTION), **GREEDY)
    with claude.messages.stream(model=MODEL, messages=ask(QUESTION), **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    counted = claude.messages.count_tokens(model=MODEL, messages=ask(QUESTION)).input_tokens
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == counted
    assert final.usage.cache_read_input_tokens > 0  # the second time, the prompt was there


def test_cloudflare_runs_and_lists(cf: "cloudflare.Cloudflare") -> None:
    answer = cf.ai.run(MODEL, account_id="acc", messages=ask(QUESTION), temperature=0, max_tokens=12)
    assert answer["response"].strip()
    assert answer["usage"]["completion_tokens"] <= 12
    assert MODEL in [row["name"] for row in cf.ai.models.list(account_id="acc")]


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_a_session_reuses_all_of_the_turn_before(oai, claude, dialect: str) -> None:
    """Turn N + 1 finds the whole of turn N in the cache, the reply included, but for the last part of a block."""
    headers = {"x-session-affinity": f"ses_{dialect}"}
    history = [*ask("You are about to hear a list of animals. " + "The otter swims. The heron waits. " * 20)]
    before = 0
    for turn in range(3):
        if dialect == "openai":
            answer = oai.chat.completions.create(model=MODEL, messages=history, extra_headers=headers, **GREEDY)
            text, usage = answer.choices[0].message.content, answer.usage
            prompt, cached = usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
            after = prompt + usage.completion_tokens
        else:
            answer = claude.messages.create(model=MODEL, messages=history, extra_headers=headers, **GREEDY)
            text, usage = answer.content[0].text, answer.usage
            cached = usage.cache_read_input_tokens
            prompt, after = usage.input_tokens + cached, usage.input_tokens + cached + usage.output_tokens
        if turn:
            assert before - 17 <= cached < prompt
        before = after
        history += [{"role": "assistant", "content": text}, *ask(f"And what about animal number {turn}?")]


def test_accounts_do_not_share_a_cache(server: str) -> None:
    prompt = ask("A prompt that no other test sends, long enough for several blocks of the cache. " * 4)

    def cached(account: str) -> int:
        client = openai.OpenAI(base_url=f"{server}/client/v4/accounts/{account}/ai/v1", api_key="none")
        answer = client.chat.completions.create(model=MODEL, messages=prompt, **GREEDY)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("one") == 0
    assert cached("two") == 0
    assert cached("one") > 48


def test_choices_seeds_and_logprobs(oai: "openai.OpenAI") -> None:
    def draw(seed: int) -> list[str]:
        answer = oai.chat.completions.create(
            model=MODEL, messages=ask(QUESTION), n=3, seed=seed, temperature=2, max_tokens=8
        )  # so hot that three are never the same, whatever processor computes them
        return [c.message.content for c in answer.choices]

    first = draw(1)
    assert draw(1) == first
    assert len(set(first)) > 1
    answer = oai.chat.completions.create(
        model=MODEL, messages=ask("Say yes."), logprobs=True, top_logprobs=3, temperature=0, max_tokens=4
    )
    for token in answer.choices[0].logprobs.content:
        assert token.logprob == max(t.logprob for t in token.top_logprobs)


def test_stop_strings_end_the_text_before_them(oai: "openai.OpenAI") -> None:
    plain = oai.completions.create(model=MODEL, prompt="1, 2, 3, 4, 5,", temperature=0, max_tokens=12)
    text = plain.choices[0].text
    cut = oai.completions.create(model=MODEL, prompt="1, 2, 3, 4, 5,", stop=[" 9"], temperature=0, max_tokens=12)
    assert " 9" in text
    assert cut.choices[0].text == text[: text.index(" 9")]
    assert cut.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("error", "params"),
    [
        ("NotFoundError", {"model": "no-such-model"}),
        ("BadRequestError", {"temperature": 9}),
        ("BadRequestError", {"messages": []}),
        ("BadRequestError", {"messages": ask("word " * 9000)}),
        ("BadRequestError", {"tools": [{"type": "function", "function": {"name": "not a name"}}]}),
        ("BadRequestError", {"tool_choice": "required"}),
    ],
)
def test_bad_input_is_reported_and_leaves_no_state(oai: "openai.OpenAI", error, params) -> None:
    with pytest.raises(getattr(openai, error)):
        oai.chat.completions.create(**{"model": MODEL, "messages": ask("hi"), **params})
    assert oai.chat.completions.create(model=MODEL, messages=ask("hi"), max_tokens=2).choices[0].message.content
