"""The keys of a cluster and the launcher of its Ray: what a core and `emberline cluster` both need."""

from typing import TYPE_CHECKING, Any

from emberline.config import Config

if TYPE_CHECKING:
    from emberline.accounts.secret import Secret
    from emberline.supervisor.cluster.cluster_file import ClusterFile
    from emberline.supervisor.cluster.ray_launcher import RayLauncher
    from emberline.supervisor.cluster.ray_settings import NodeCredential, NodeSettings

CLUSTER_FILE = "cluster.yaml"  # in the data folder


class ClusterKeys:
    """Keys that are derived from the root secret, or signed by an authority whose key is."""

    def __init__(self, secret: "Secret") -> None:
        """Raises Unavailable if the library for certificates is not installed."""
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


def open_ray_launcher(config: Config, file: "ClusterFile", settings: "list[NodeSettings]") -> "RayLauncher":
    """The launcher that places workers by Ray, at its head or beside one of its nodes. It is not connected yet."""
    import msgspec

    from emberline.accounts.secret import Secret
    from emberline.catalog.model_store import ModelStore
    from emberline.supervisor.cluster.ray_launcher import RayLauncher
    from emberline.supervisor.engine_workers import engine_arguments, layout_of

    node, engine = settings[-1], config.engine
    if engine.draft_model:
        engine = msgspec.structs.replace(
            engine, draft_model=str(ModelStore(config.home).resolve(engine.draft_model).path)
        )
    return RayLauncher(
        node,
        file.core_urls(node.head),
        ClusterKeys(Secret.open(config.home)).worker_text,
        n_ranks=layout_of(engine).n_ranks,
        arguments=tuple(engine_arguments(engine, engine.kv_bytes)),
    )
