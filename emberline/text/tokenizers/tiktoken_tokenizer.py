"""Reads a tokenizer in tiktoken's format (Kimi): `tiktoken.model`, and the special tokens in tokenizer_config.json.

The file has a line for each token: its bytes in base64 and its rank, which is its id. tiktoken merges the neighbors
whose joint token has the lowest rank, the leftmost first. A token has only one pair of parts that this can meet: the
two that its own bytes merge to by the ranks below its own. So a list of those pairs, in the order of ranks, is the same
tokenizer in byte-level BPE's form, which the `tokenizers` library runs.
"""

import binascii
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, models

from emberline.text.tokenizers.gguf_tokenizer import KIMI, Recipe, pre_tokenizer
from emberline.text.tokenizers.hf_tokenizer import Json, token_text
from emberline.text.tokenizers.tokenizer import BYTE_CHARS, MAX_ADDED_CHARS, Parts
from emberline.weights.model_config import BadCheckpoint

FILE = "tiktoken.model"
MAX_FILE_BYTES = 64 << 20
MAX_TOKEN_BYTES = 512  # the longest of real vocabularies are runs of 128 spaces
N_SPECIAL = 256  # ids behind the ranks; those without a name are called `<|reserved_token_ID|>`

Ranks = Mapping[bytes, int]


def tiktoken_parts(folder: Path, settings: Json) -> Parts:
    """`settings` is the folder's tokenizer_config.json."""
    ranks = _read_ranks(folder / FILE)
    special = _special_tokens(settings, len(ranks))
    spelled = {token: token.decode("latin-1").translate(BYTE_CHARS) for token in ranks}
    merges = [(spelled[left], spelled[right]) for left, right in _merges(ranks)]
    model = models.BPE(vocab={spelled[token]: rank for token, rank in ranks.items()}, merges=merges, ignore_merges=True)
    bos = token_text(settings, "bos_token")
    return Parts(
        model=model,
        normalizer=None,
        pre_tokenizer=pre_tokenizer(Recipe((KIMI,))),
        added={i: AddedToken(text, special=True, normalized=False) for i, text in special.items()},
        spelling="bytelevel",
        vocab_size=len(ranks) + N_SPECIAL,
        bos_id=next((i for i, text in special.items() if text == bos), None),
        add_bos=settings.get("add_bos_token") is True,
        prefix_space="never",
        uncuttable="",
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise BadCheckpoint(f"{path.name} is larger than {MAX_FILE_BYTES >> 20} MiB")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines()):
        encoded, _, rank = line.partition(b" ")
        try:
            token = b64decode(encoded, validate=True)
        except binascii.Error:
            token = b""
        if not token or len(token) > MAX_TOKEN_BYTES or token in ranks or rank != b"%d" % number:
            raise BadCheckpoint(f"{path.name}: line {number + 1} is not a new token in base64 and the rank {number}")
        ranks[token] = number
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise BadCheckpoint(f"{path.name} has no token for the byte {missing[0]}")
    return ranks


def _special_tokens(settings: Json, first: int) -> dict[int, str]:
    """Text by id, for the ids from `first` on. All of them are control tokens, whatever the file says of them."""
    named = settings.get("added_tokens_decoder", {})
    texts = {i: f"<|reserved_token_{i}|>" for i in range(first, first + N_SPECIAL)}
    if not isinstance(named, dict):
        raise BadCheckpoint("tokenizer_config.json: 'added_tokens_decoder' is not an object")
    for key, entry in named.items():
        text = token_text({"token": entry}, "token")
        if not key.isdecimal() or int(key) not in texts or not text or len(text) > MAX_ADDED_CHARS:
            raise BadCheckpoint(f"tokenizer_config.json: added token {key[:20]!r} is not text at an id from {first} on")
        texts[int(key)] = text
    if len(set(texts.values())) < N_SPECIAL:
        raise BadCheckpoint("tokenizer_config.json: two added tokens have the same text")
    return texts


def _merges(ranks: Ranks) -> list[tuple[bytes, bytes]]:
    """The two parts of each token of several bytes, by rank. A token that no merge can make has none."""
    found: list[tuple[bytes, bytes]] = []
    tree = MergeTree()
    for token, rank in ranks.items():  # ascending
        for at in range(1, len(token)):
            left, right = ranks.get(token[:at], rank), ranks.get(token[at:], rank)
            if left < rank and right < rank and tree.stay_apart(left, right):
                tree.add(rank, left, right)
                found.append((token[:at], token[at:]))
                break
        else:
            tree.add(rank, rank, rank)
    return found


class MergeTree:
    """Tokens by rank, ascending, with the two parts that each is merged from."""

    def __init__(self) -> None:
        self._joined: dict[tuple[int, int], int] = {}
        self._left: list[int] = []
        self._right: list[int] = []

    def add(self, rank: int, left: int, right: int) -> None:
        """A token that is merged from nothing is its own parts."""
        assert rank == len(self._left)
        self._left.append(left)
        self._right.append(right)
        if left != rank:
            self._joined[left, right] = rank

    def stay_apart(self, left: int, right: int) -> bool:
        """True if the bytes of two tokens merge to just these two by the ranks so far.

        Undo their merges from the last to the first: no token across the border may have come before the merge that was
        undone last. Of two merges with the same rank the left one comes first.
        """
        limit = len(self._left)
        while self._joined.get((left, right), limit) >= limit:
            undo_left = left > right
            if (self._right[left] == left) if undo_left else (self._left[right] == right):
                undo_left = not undo_left  # a single byte
                if (self._right[left] == left) if undo_left else (self._left[right] == right):
                    return True
            if undo_left:
                limit, left = left, self._right[left]
            else:
                limit, right = right + 1, self._left[right]
        return False
