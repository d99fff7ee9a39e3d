"""The server that commands talk to, and the key that they send there."""

from pathlib import Path

import msgspec
import pytest

from emberline.config import AuthConfig, ClientConfig, Config
from emberline.server.address import ServerAddress


@pytest.mark.parametrize(
    ("url", "given", "sent"),
    [
        ("", None, "the-admin-key"),
        ("http://127.0.0.1:9000", None, "the-admin-key"),
        ("http://localhost:9000", None, "the-admin-key"),
        ("https://elsewhere.example", None, None),
        ("http://192.0.2.7:8686", None, None),
        ("https://elsewhere.example", "a-key", "a-key"),
    ],
)
def test_the_admin_key_stays_on_its_machine(url: str, given: str | None, sent: str | None, tmp_path: Path) -> None:
    config = Config(home=tmp_path, auth=AuthConfig(key="the-admin-key"))
    config = msgspec.structs.replace(config, client=ClientConfig(url=url, key=given))
    assert ServerAddress.for_client(config).credential == sent
