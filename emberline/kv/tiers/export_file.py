"""Export files: blocks of an account in one file, to be imported by a worker of the same model and root secret.

    [magic][length of the head, u32][head, JSON][keyed tag] then for each block [record][keyed tag][bytes]

Every part has a keyed tag, so that only what this installation exported is imported, and blocks cannot change places.
The file is not secret: it holds KV, from which text can be inferred, as plainly as memory does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from struct import Struct
from typing import BinaryIO

import msgspec

from emberline.kv.tiers.block_tag import TAG_BYTES, BlockTagger
from emberline.kv.tiers.tier import BlockId, BlockMeta
from emberline.protocol.errors import BadInput, Forbidden

MAGIC = b"EMBERKVX"
VERSION = 1
MAX_HEAD_BYTES = 1 << 20
_LENGTH = Struct("<I")
_RECORD = Struct("<16s16s16s16sII")  # content key, layout tag, session, parent; number in the file, position
_OTHERS = "it was exported by an installation with another root secret, or it is damaged"


class ExportHead(msgspec.Struct, frozen=True):
    version: int
    fingerprint: str  # of the model
    owner: str  # root of the account's chains, in hexadecimal
    layouts: dict[str, int]  # layout tag in hexadecimal, and bytes of a block
    n_blocks: int


_decoder = msgspec.json.Decoder(ExportHead)


def write_export(
    path: Path,
    tagger: BlockTagger,
    fingerprint: str,
    owner: bytes,
    layouts: Mapping[bytes, int],
    blocks: Iterable[tuple[BlockId, BlockMeta]],
    read: Callable[[list[BlockId]], list[bytes | None]],
    batch: int = 16,
) -> int:
    """Write a new file; the number of blocks. `read` returns the bytes of blocks; what is missing is left out."""
    wanted = list(blocks)
    with path.open("xb") as file:
        path.chmod(0o600)
        file.write(_head_bytes(tagger, ExportHead(VERSION, fingerprint, owner.hex(), _named(layouts), len(wanted))))
        n_blocks = 0
        for at in range(0, len(wanted), batch):
            part = wanted[at : at + batch]
            for (block_id, meta), data in zip(part, read([block_id for block_id, _ in part])):
                if data is None:
                    continue
                record = _RECORD.pack(block_id.key, block_id.tag, meta.session, meta.parent, n_blocks, meta.position)
                file.write(record)
                file.write(tagger.tag(MAGIC + owner + record, data))
                file.write(data)
                n_blocks += 1
        file.seek(0)  # the number of blocks is known now; the head keeps its length
        file.write(_head_bytes(tagger, ExportHead(VERSION, fingerprint, owner.hex(), _named(layouts), n_blocks)))
    return n_blocks


def read_export(
    path: Path, tagger: BlockTagger, fingerprint: str, owner: bytes, layouts: Mapping[bytes, int]
) -> Iterator[tuple[BlockId, BlockMeta, bytes]]:
    """The blocks of a file, each verified. BadInput and Forbidden say why a file is refused; blocks before the place
    where it is damaged have been returned by then."""
    with path.open("rb") as file:
        head = _read_head(file, tagger)
        if head.fingerprint != fingerprint:
            raise BadInput("the export is of a model with other weights than those of this worker", param="file")
        if head.owner != owner.hex():
            raise Forbidden("the export belongs to another account; import it with that account's name")
        if any(layouts.get(bytes.fromhex(tag)) != n_bytes for tag, n_bytes in head.layouts.items()):
            raise BadInput(
                "the export has another layout of KV (dtype, layers or heads) than this worker", param="file"
            )
        for number in range(head.n_blocks):
            record = _read(file, _RECORD.size)
            key, tag, session, parent, at, position = _RECORD.unpack(record)
            n_bytes = head.layouts.get(tag[:8].hex())
            if n_bytes is None or at != number:
                raise BadInput(f"block {number} of the export cannot be used: {_OTHERS}", param="file")
            mac, data = _read(file, TAG_BYTES), _read(file, n_bytes)
            if not tagger.verify(MAGIC + owner + record, data, mac):
                raise BadInput(f"block {number} of the export cannot be used: {_OTHERS}", param="file")
            meta = BlockMeta(owner, b"" if session == bytes(16) else session, position, parent)
            yield BlockId(key, tag[:8]), meta, data


def _head_bytes(tagger: BlockTagger, head: ExportHead) -> bytes:
    """Padded with spaces to the length it needs with any number of blocks."""
    encoded = msgspec.json.encode(head)
    encoded = encoded.ljust(len(encoded) + 20 - len(str(head.n_blocks)))
    return MAGIC + _LENGTH.pack(len(encoded)) + encoded + tagger.tag(MAGIC + b"head", encoded)


def _read_head(file: BinaryIO, tagger: BlockTagger) -> ExportHead:
    if file.read(len(MAGIC)) != MAGIC:
        raise BadInput("this is no export of a KV cache", param="file")
    (length,) = _LENGTH.unpack(_read(file, _LENGTH.size))
    if length > MAX_HEAD_BYTES:
        raise BadInput(f"the export cannot be used: {_OTHERS}", param="file")
    encoded = _read(file, length)
    if not tagger.verify(MAGIC + b"head", encoded, _read(file, TAG_BYTES)):
        raise BadInput(f"the export cannot be used: {_OTHERS}", param="file")
    head = _decoder.decode(encoded)
    if head.version != VERSION:
        raise BadInput(f"the export has version {head.version}, this server reads {VERSION}", param="file")
    return head


def _read(file: BinaryIO, n_bytes: int) -> bytes:
    data = file.read(n_bytes)
    if len(data) < n_bytes:
        raise BadInput("the export is cut off", param="file")
    return data


def _named(layouts: Mapping[bytes, int]) -> dict[str, int]:
    return {tag.hex(): n_bytes for tag, n_bytes in layouts.items()}
