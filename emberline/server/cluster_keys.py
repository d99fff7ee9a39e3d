"""The keys of a cluster: all are derived from the root secret, or signed by an authority that is."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emberline.accounts.secret import Secret
    from emberline.supervisor.cluster.ray_settings import NodeCredential


class ClusterKeys:
    def __init__(self, secret: "Secret") -> None:
        """Unavailable: the library for certificates is not installed."""
        from emberline.cluster.cluster import cluster_id
        from emberline.supervisor.cluster.certificate_authority import KEY_BYTES, CertificateAuthority

        self.id = cluster_id(secret)
        self._secret = secret
        self._authority = CertificateAuthority(secret.derive("cluster-ca", size=KEY_BYTES), self.id)

    def worker(self, name: str) -> Any:
        """The credential of a worker."""
        from emberline.cluster.cluster import join_key

        return self._authority.worker_credential(name, join_key(self._secret, name))

    def worker_text(self, name: str) -> str:
        return str(self.worker(name).encode())

    def node(self, address: str) -> "NodeCredential":
        """The credential of a Ray node."""
        from emberline.supervisor.cluster.ray_settings import NodeCredential

        token = self._secret.derive("ray-token", size=32).hex()
        return NodeCredential(address=address, cluster=self.id, token=token, pem=self._authority.node_pem(address))
