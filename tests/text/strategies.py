"""Text that tokenizers and templates trip over."""

from hypothesis import strategies as st

_PIECES = [
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        " \n",
        "the",
        " and",
        "it's",
        "123",
        "4",
        "é",
        "e\u0301",
        "數",
        "\U0001f680",
    ),
    *("▁", "<", "|>", "<|im_end|>", "<|im_start|>", "<|eot_id|>", "<end_of_turn>", "<s>", "</s>", "<|end|>", "<bos>"),
    *("</think>", "<think>", "[INST]", "\u00a0", "\u200d", "\ufdd0", "\x00", "\x1c", "----", '{"a": 1}', "user", "--"),
]
snippets = st.lists(st.one_of(st.sampled_from(_PIECES), st.text(max_size=4)), max_size=12).map("".join)
