import pytest

from emberline.engine.pace import TARGET_S, Pace, Work

TOKEN_S, REACH_S = 2.2e-5, 1.1e-9  # of a card like an H200 with an 8B model
DECODE_S = 5.5e-3


def truth(work):
    return (DECODE_S if work.n_decodes else 0.0) + TOKEN_S * work.n_tokens + REACH_S * work.reach


def prompt(pace, n_decodes, length, budget=8192):
    """A prompt's chunks beside the streams, each measured."""
    chunks, done = [], 0
    while done < length:
        work = Work(n_decodes)
        n = pace.chunk(work, done, min(length - done, budget - n_decodes))
        work.add(n, done + n)
        done += n
        chunks.append((n, truth(work)))
        pace.observe(work, truth(work))
        pace.observe(Work(n_decodes), DECODE_S)
    return chunks


@pytest.mark.parametrize("slower", [0.2, 1.0, 5.0])
def test_chunks_settle_at_the_target_whatever_was_believed_first(slower):
    pace = Pace(slower * REACH_S / TOKEN_S)
    pace.observe(Work(32), DECODE_S)
    prompt(pace, 32, 16_384)
    for _, seconds in prompt(pace, 32, 8192)[:-1]:
        assert 0.65 * TARGET_S < seconds < 1.15 * TARGET_S
    for _, seconds in prompt(pace, 32, 32_768)[:-1]:
        assert seconds < 1.2 * TARGET_S


def test_without_streams_a_prompt_takes_all():
    assert Pace(1e-4).chunk(Work(0), 0, 8192) == 8192


def test_steps_fill_whole_tiles():
    pace = Pace(1e-4)
    work = Work(32)
    n = pace.chunk(work, 0, 8192)
    assert (32 + n) % 128 == 0


def test_prompts_come_forward_even_when_streams_take_all_the_time():
    pace = Pace(1e-4)
    pace.observe(Work(512), 0.1)
    assert pace.chunk(Work(512), 0, 8192) > 0
    busy = Work(512)
    busy.add(64, 64)
    assert pace.chunk(busy, 0, 8192) == 0
