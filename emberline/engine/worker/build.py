"""Composition of an engine's scheduler: which features it has, and what one feature tells another."""

from emberline.engine.core.feature import Feature, Speculation
from emberline.engine.core.limits import Limits
from emberline.engine.core.prefill_policy import PrefillPolicy
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.grammar.guide_jobs import GuideThreads
from emberline.engine.grammar.guided_decoding import GuidedDecoding
from emberline.engine.grammar.guided_rules import Guides
from emberline.engine.speculation.speculator import Speculator
from emberline.engine.tiers.tiering import Tiering
from emberline.engine.transfer.handover import Handover
from emberline.kv.cache import KVCache
from emberline.kv.tiers.messages import TierPort
from emberline.kv.transfer.notices import TransferPort


def build_scheduler(
    cache: KVCache,
    limits: Limits,
    fingerprint: str,
    grammars: Guides | None = None,
    prefill: PrefillPolicy | None = None,
    transfers: TransferPort | None = None,
    speculation: Speculation | None = None,
    tiers: TierPort | None = None,
    micro_batches: int = 1,
    guide_threads: GuideThreads | None = None,
) -> Scheduler:
    """A scheduler with the features that are given. Without `grammars`, the grammars of requests are ignored."""
    prefill = prefill or PrefillPolicy()
    features: list[Feature] = []
    if transfers is not None:
        features.append(Handover(transfers, fingerprint))
    if grammars is not None:
        appends = speculation is not None and prefill.drafts_beside_prompts
        appended = None if speculation is None else speculation.appended
        guided = GuidedDecoding(grammars, speculation is not None, appends, appended, guide_threads)
        if isinstance(speculation, Speculator):
            speculation.follow_grammars(guided)
        features.append(guided)
    if tiers is not None:
        features.append(Tiering(tiers))
    if speculation is not None:
        features.append(speculation)
    return Scheduler(cache, limits, fingerprint, features, prefill, micro_batches)
