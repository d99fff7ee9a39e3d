"""Cards of predictors: a pushed version becomes a model of the store, under the same id as the version before it."""

from datetime import UTC, datetime
from pathlib import Path

from emberline.catalog.model_card import PREDICTION, CogSource, ModelCard
from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.protocol.prediction import Manifest
from emberline.protocol.request import SamplingDefaults


def publish(store: ModelStore, manifest: Manifest, path: Path) -> ModelEntry:
    """Make a version the one that is served. A server that runs has it for the requests that come next."""
    with store.lock():
        return store.place(_card(manifest), str(path))


def _card(manifest: Manifest) -> ModelCard:
    source = "image" if manifest.image else "project"
    name = manifest.model.rpartition("/")[2]
    return ModelCard(
        id=manifest.model,
        description=f"A predictor of version {manifest.version}, pushed from a Cog {source}.",
        author=manifest.account or "me",
        context_window=0,
        source=CogSource(
            version=manifest.version,
            digest=manifest.digest,
            input=manifest.input,
            output=manifest.output,
            streams=manifest.streams,
            slots=manifest.slots,
            max_predict_ms=int(1000 * manifest.resources.predict_s),
            account=manifest.account,
        ),
        created_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3],
        task=PREDICTION,
        architecture="cog",
        weight_bytes=manifest.resources.memory_bytes,
        fingerprint=manifest.digest,
        sampling=SamplingDefaults(),
        aliases=() if manifest.account else (name,),  # its account finds it by `ServedModels`
    )
