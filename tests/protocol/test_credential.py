from pathlib import Path

import pytest

from emberline.protocol.credential import VARIABLE, Credential, client_context, worker_host
from emberline.protocol.errors import BadInput

CREDENTIAL = Credential(name="w0", cluster="c1", key=bytes(range(32)), pem="-----BEGIN CERTIFICATE-----\nx")


def test_a_credential_is_a_private_file_or_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "w0.credential"
    path.write_text(CREDENTIAL.encode())
    path.chmod(0o600)
    assert Credential.open(path, {}) == CREDENTIAL
    assert Credential.open(None, {VARIABLE: CREDENTIAL.encode()}) == CREDENTIAL
    path.chmod(0o640)
    with pytest.raises(BadInput, match=rf"open to others \(mode 640\): run chmod 600 {path}"):
        Credential.open(path, {})
    with pytest.raises(BadInput, match=r"emberline cluster credential NAME"):
        Credential.open(None, {})
    with pytest.raises(BadInput, match="cannot read"):
        Credential.open(tmp_path / "none", {})


@pytest.mark.parametrize("cut", [0, 10, 60, 90])
def test_what_is_no_credential_is_refused(cut: int) -> None:
    with pytest.raises(BadInput, match="no worker credential"):
        Credential.parse(CREDENTIAL.encode()[:cut])


def test_bad_certificates_are_refused() -> None:
    for pem in ("", CREDENTIAL.pem, "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"):
        with pytest.raises(BadInput, match="make a new one"):
            client_context(pem)


def test_hosts() -> None:
    assert worker_host("GPU-7.a") == "gpu-7.a.worker.emberline"
