"""The table of what works together, walked by configurations of tiny workers: the tokens of one plain rank, or the
refusal that the table declares."""

import json
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from emberline.engine import composition
from emberline.engine.worker.main import parse_arguments
from emberline.models.eagle3 import Eagle3Config, Eagle3Head
from emberline.models.eagle3_files import save_head
from emberline.protocol.frames import CacheCommand, CacheResult, Heartbeat, KVEvents, Step, Vocabulary, transfer_ranks
from emberline.protocol.grammar import encode
from emberline.protocol.request import EngineRequest
from emberline.weights.generated import generate_tensors
from emberline.weights.tensor_names import hf_name
from tests.engine.client import Client, LocalEngine
from tests.engine.composition.covering_array import Configuration, covering_array
from tests.engine.composition.forked_workers import Forks, running
from tests.engine.grammar.samples import PERSON
from tests.engine.ranks.test_rank_worker import VOCABULARY, request, run
from tests.engine.transfer.test_prefill_decode import halves
from tests.weights.quantized_folder import int4, quantize_int4

KIMI: dict[str, Any] = {  # all of its layouts are possible, and one rank computes it as several do
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "vocab_size": 256, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "intermediate_size": 64,
    "moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 1, "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS = ".mlp.experts."
IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
QUANTIZED = {**KIMI, "quantization_config": {**int4(32), "ignore": IGNORED}}

LAYOUTS = {
    "one rank": "", "tp2": "--tp 2", "pp2": "--pp 2", "tp2 ep": "--tp 2 --ep", "tp2 dcp2": "--tp 2 --dcp 2",
    "tp2 pp2 dcp2 ep": "--tp 2 --pp 2 --dcp 2 --ep",
}  # fmt: skip
DRAFTS = {name: f"--speculation {name}" for name in ("off", "auto", "suffix", "grammar", "eagle3", "draft_model")}
TIERS = {"no tier": "", "host": f"--kv-host-bytes {4 << 20}", "disk": f"--kv-disk-bytes {16 << 20}"}
# Workers that join a cluster or use Mooncake need more than a worker: `e2e/test_joined_rank_groups.py` and
# `ranks/test_rank_disaggregation.py` have those.
ROLES = {"both": "", "pushed": "--role decode", "pushed by one rank": "--role decode"}
MODES = {"fast": "", "deterministic": "--deterministic"}
VALUES: dict[str, dict[str, str]] = {
    "layout": LAYOUTS, "drafts": DRAFTS, "tier": TIERS, "role": ROLES, "mode": MODES,
    "weights": {"bfloat16": "", "int4": ""}, "asks": {"tokens": "", "export": "", "prompt_logprobs": ""},
}  # fmt: skip
FEATURES = {  # of the table, that no flag of the parameter asks for
    "host": {"host"}, "disk": {"disk"}, "export": {"export"}, "prompt_logprobs": {"prompt_logprobs"},
    "int4": {"quantized"},
}  # fmt: skip
KV_KEY = "00" * 32
ENVIRONMENT = {"EMBERLINE_WORKER_TOKEN": "secret", "EMBERLINE_LOG_FORMAT": "json", "EMBERLINE_KV_KEY": KV_KEY}
TEXT = [(11 * at) % 199 + 2 for at in range(20)] * 2  # which repeats itself, as suffix drafts like it


def requests(asks: str) -> list[EngineRequest]:
    return [
        request("greedy", TEXT, max_tokens=10, prompt_logprobs=1 if asks == "prompt_logprobs" else None),
        request("sampled", TEXT[:21], temperature=0.9, seed=4, max_tokens=6),
        request("structured", TEXT[:9], max_tokens=16, grammar=encode(PERSON)),
    ]


class Models:
    """Folders of the models, a head and a draft model, and what one plain rank answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(1)
        config = self._write("bfloat16", KIMI)
        self._write("int4", QUANTIZED)
        head = Eagle3Head(
            msgspec.structs.replace(
                Eagle3Config.of(config, 64), latent=config.latent, rope_interleaved=True, taps=(0, 1)
            )
        )
        head.d2t.copy_(torch.arange(64))
        save_head(head, folder / "head")
        self._expected: dict[str, list[list[int]]] = {}

    def _write(self, name: str, document: dict[str, Any]) -> Any:
        """Write a checkpoint: its ranks would need longer to generate it than to read it."""
        config, made = generate_tensors(KIMI, 1)
        tensors: dict[str, Tensor] = {}
        for each in made:
            weight, stored = each.tensor(torch.bfloat16, "cpu"), hf_name(each.name, config)
            if document is QUANTIZED and EXPERTS in stored:
                parts, _ = quantize_int4(weight.float(), 32)
                tensors |= {f"{stored.removesuffix('weight')}{part}": t.contiguous() for part, t in parts.items()}
            else:
                tensors[stored] = weight
        folder = self.folder / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(document))
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {f"t{n}": n for n in range(256)}}}))
        save_file(tensors, folder / "model.safetensors")
        return config

    def flags(self, made: Configuration) -> list[str]:
        own = [f"--model {self.folder / made['weights']} --device cpu --threads 1 --kv-bytes {4 << 20}"]
        own += [VALUES[name][value] for name, value in made.items()]
        own += [f"--draft-head {self.folder / 'head'}"] * (made["drafts"] == "eagle3")
        own += [f"--draft-model {self.folder / made['weights']}"] * (made["drafts"] == "draft_model")  # right always
        own += [f"--kv-disk-path {self.folder / 'kv'}"] * (made["tier"] == "disk")
        return " ".join(own).split()

    def expected(self, weights: str) -> list[list[int]]:
        if weights not in self._expected:
            plain = ["--kv-bytes", "1048576", "--speculation", "off"]
            engine = LocalEngine(self.folder / weights, *plain)
            engine.set_vocabulary(VOCABULARY)
            self._expected[weights] = run(engine, *requests("tokens"))
        return self._expected[weights]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    found = Forks()
    yield found
    found.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def refusal(models: Models, made: Configuration) -> str | None:
    """What the table says of a configuration: None if all of it works together."""
    args = parse_arguments([*models.flags(made), "--socket", "s"])
    asked = composition.asked(args, "cpu").union(*(FEATURES.get(value, set()) for value in made.values()))
    return composition.why_not(*asked)


def check(forks: Forks, models: Models, made: Configuration, folder: Path) -> None:
    """The worker writes the tokens of one plain rank; one that the table refuses says so and ends, or refuses what a
    request asks for."""
    declared, expected = refusal(models, made), models.expected(made["weights"])
    plain = {**made, "asks": "tokens"}
    if refusal(models, plain) is not None:
        group = forks.start(folder, "refused", models.flags(plain), ENVIRONMENT)
        try:
            assert group.ready()["error"] == declared
        finally:
            group.end()
        return
    asks = "tokens" if declared is not None else made["asks"]
    with running(forks, folder, "w", models.flags(made), ENVIRONMENT) as ready, Client(ready["address"]) as client:
        client.set_vocabulary(VOCABULARY)
        if made["role"] in ("pushed", "pushed by one rank"):
            layout = made["layout"] if made["role"] == "pushed" else "one rank"
            sender = models.flags({**made, "layout": layout, "tier": "no tier"})  # drafters have KV, too
            sender[sender.index("--role") + 1] = "prefill"
            with running(forks, folder, "p", sender, ENVIRONMENT) as first, Client(first["address"]) as prefill:
                assert pushed(prefill, client, ready["address"], VOCABULARY) == expected
        else:
            assert run(client, *requests(asks)) == expected
        if made["asks"] == "export" and made["tier"] != "no tier":
            found = export(client, folder / "session")
            assert (found.error is None) == (declared is None)
            assert found.error is not None or found.blocks["exported"] > 0
        elif declared is not None and made["asks"] == "prompt_logprobs":
            client.submit(msgspec.structs.replace(requests("prompt_logprobs")[0], id="refused"))
            error = client.finish("refused").error
            assert error is not None
            assert error.message in declared or declared in error.message


def pushed(prefill: Client, decode: Client, address: str, vocabulary: Vocabulary) -> list[list[int]]:
    """Replies whose prompts another worker has computed."""
    prefill.set_vocabulary(vocabulary)
    ranks = transfer_ranks(prefill.greeting.info, decode.greeting.info)
    asked = requests("tokens")
    for each in asked:
        first, second = halves(each, address, f"t-{each.id}", ranks=ranks)
        decode.submit(second)
        prefill.submit(first)
    decode.finish(*(each.id for each in asked))
    assert [decode.deltas[each.id][-1].error for each in asked] == [None] * len(asked)
    assert decode.deltas["greedy"][0].usage.cached_by_tier["pushed"] > 0
    return [decode.tokens(each.id) for each in asked]


def export(client: Client, path: Path) -> CacheResult:
    client.send(CacheCommand(1, "export", b"", path=str(path)))
    while not isinstance(answer := client.receive(), CacheResult):
        if not isinstance(answer, Heartbeat | KVEvents):
            assert isinstance(answer, Step)
            client.take(answer)
    return answer


def test_every_pair_is_in_some_configuration() -> None:
    array = covering_array(VALUES, 2)
    for names in combinations(VALUES, 2):
        found = {tuple(made[name] for name in names) for made in array}
        assert found == set(product(*(VALUES[name] for name in names)))
    assert len(array) < 50


# "auto" has suffix and grammar drafts together; on their own they are in the triples.
PAIRS = covering_array({**VALUES, "drafts": [name for name in DRAFTS if name not in ("suffix", "grammar")]}, 2)


@pytest.mark.parametrize("made", PAIRS, ids=lambda made: "-".join(made.values()).replace(" ", "_"))
def test_pairs(forks: Forks, models: Models, made: Configuration, tmp_path: Path) -> None:
    check(forks, models, made, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_triples(forks: Forks, models: Models, tmp_path: Path) -> None:
    """One test: to make the array takes seconds, which every collection of tests would take."""
    for n, made in enumerate(covering_array(VALUES, 3)):
        (folder := tmp_path / str(n)).mkdir()
        try:
            check(forks, models, made, folder)
        except AssertionError as error:
            raise AssertionError(f"{made}: {error}") from error
