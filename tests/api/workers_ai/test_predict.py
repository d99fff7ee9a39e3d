"""Files that a predictor returns: their types are its own words, which end up in a header."""

import pytest

from emberline.api.workers_ai.predict import from_data_url


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("image/png", "image/png"),
        ("", "application/octet-stream"),
        ("text/html\r\nset-cookie: a=b", "application/octet-stream"),
        ("é/x", "application/octet-stream"),
        ("html", "application/octet-stream"),
    ],
)
def test_the_type_of_a_file_is_a_type(kind: str, expected: str) -> None:
    assert from_data_url(f"data:{kind};base64,eA==") == (expected, b"x")
