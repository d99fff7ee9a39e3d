from hypothesis import given
from hypothesis import strategies as st

from emberline.kernels.block_keys import next_keys
from emberline.protocol import block_hash


@given(st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.binary(min_size=64, max_size=64)), max_size=70))
def test_keys_of_many_chains_are_those_of_each(blocks):
    expected = []
    for parent, content in blocks:
        block_hash.extend(digests := [], parent, content)
        expected += digests
    assert next_keys([parent for parent, _ in blocks], [bytearray(content) for _, content in blocks]) == expected
