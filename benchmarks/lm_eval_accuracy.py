"""lm-eval's figures over Emberline and over transformers: `python -m benchmarks.lm_eval_accuracy [MODEL] [--limit N]`.

The harness runs two local tasks: questions whose four answers it ranks by their log-likelihood, and the perplexity
of their sentences. It asks Emberline as `local-completions`, with token ids that the server's own tokenizer made
(`/tokenizer_info`, `/tokenize`), and loads the same file or folder into transformers as `hf`, in float32. MODEL is the
name of a pulled model, a GGUF file or a Hugging Face folder; the default is the default model.

Printed are accuracies and perplexities of both, how many questions are answered differently, and the largest difference
of a log-likelihood. Arithmetic differs (quantized products, bfloat16 keys and values), so these are close, not equal.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.contender import Setup
from benchmarks.embeddings import wait_ready
from benchmarks.peers.venv import ensure_venv
from benchmarks.process import Process, ended_by_sigterm, free_port
from benchmarks.report import markdown
from emberline.catalog.model_store import ModelStore
from emberline.config import home_dir

PINS = ("lm-eval[api]==0.4.13", "transformers==5.22.2", "torch==2.13.0", "accelerate", "gguf")
FACTS = Path(__file__).parent / "data" / "short_facts.jsonl"
_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{facts}"}}}}
test_split: test
"""
TASKS = {
    "short_facts": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "short_sentences": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[answer]}}."
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
}
METRICS = {"short_facts": ("acc", "acc_norm"), "short_sentences": ("word_perplexity", "byte_perplexity")}
# Runs in the harness's Python: evaluates, and writes the metrics and the log-likelihoods of all answers.
_EVALUATE = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
model, arguments, folder, limit, to = sys.argv[1:]
tasks = TaskManager(include_path=folder, include_defaults=False)
found = lm_eval.simple_evaluate(
    model=model, model_args=json.loads(arguments), tasks=sorted(json.load(open(folder + "/tasks.json"))),
    task_manager=tasks, limit=int(limit) or None, bootstrap_iters=0, device="cpu",
)
samples = {name: sorted(each, key=lambda sample: sample["doc_id"]) for name, each in found["samples"].items()}
scores = {name: [sample["filtered_resps"] for sample in each] for name, each in samples.items()}
json.dump({"results": found["results"], "scores": scores}, open(to, "w"), default=str)
"""


def evaluate(python: Path, model: str, arguments: dict[str, Any], folder: Path, limit: int) -> dict[str, Any]:
    """Run the tasks over a model of lm-eval's. Returns its metrics, and the log-likelihoods of each question."""
    to = folder / f"{model}.json"
    command = [str(python), "-c", _EVALUATE, model, json.dumps(arguments), str(folder), str(limit), str(to)]
    subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    found: dict[str, Any] = json.loads(to.read_text())
    return found


def write_tasks(folder: Path) -> None:
    """Write the tasks' files into a folder."""
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(_TASK.format(name=name, facts=FACTS) + task)
    (folder / "tasks.json").write_text(json.dumps(list(TASKS)))


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Metrics of both, and how far their log-likelihoods are apart."""
    metrics = {
        f"{task} {metric}": [float(each["results"][task][f"{metric},none"]) for each in (ours, theirs)]
        for task, names in METRICS.items()
        for metric in names
    }
    answers = [[_logprobs(sample) for sample in each["scores"]["short_facts"]] for each in (ours, theirs)]
    pairs = list(zip(*answers, strict=True))
    return {
        "metrics": metrics,
        "questions": len(pairs),
        "answered_differently": sum(a.index(max(a)) != b.index(max(b)) for a, b in pairs),
        "largest_difference": max(abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True)),
    }


def _logprobs(sample: list[Any]) -> list[float]:
    return [float(logprob) for logprob, _ in sample]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    path = Path(args.model)
    name = args.model
    if not path.exists():
        entry = ModelStore(home_dir(os.environ)).resolve(args.model)
        name, path = entry.card.id, entry.path
    setup = Setup(path, args.cache, lambda line: print(line, file=sys.stderr, flush=True))
    python = args.python or ensure_venv(setup, "lm-eval", PINS)
    peer: dict[str, Any] = {"pretrained": str(path), "dtype": "float32", "batch_size": 16}
    if path.is_file():
        peer |= {"pretrained": str(path.parent), "gguf_file": path.name}
    port = free_port()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_tasks(folder)
        models = folder / "home" / "models"  # with this model alone: the harness names none to `/tokenizer_info`
        models.mkdir(parents=True)
        if not Path(args.model).exists():
            (models / path.parent.name).symlink_to(path.parent)
        command = [sys.executable, "-m", "emberline.cli.main", "serve", name, "--port", str(port)]
        with Process([*command, "--data-dir", str(folder / "home")], folder / "serve.log") as process:
            wait_ready(process, port)
            url = f"http://127.0.0.1:{port}/v1/completions"
            own = {"base_url": url, "model": name, "num_concurrent": 4, "tokenizer_backend": "remote"}
            ours = evaluate(python, "local-completions", own, folder, args.limit)
        return {"model": name} | compare(ours, evaluate(python, "hf", peer, folder, args.limit))


def main() -> int:
    ended_by_sigterm()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lm_eval_accuracy", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2", help="a pulled model, a GGUF file or a folder")
    parser.add_argument("--limit", type=int, default=0, help="questions of each task; 0: all")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where lm-eval is installed")
    parser.add_argument("--python", type=Path, help="of an environment that has lm-eval, transformers and torch")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    found = measure(args)
    rows = [[name, f"{ours:.4f}", f"{theirs:.4f}"] for name, (ours, theirs) in found["metrics"].items()]
    print(markdown([found["model"], "Emberline", "transformers"], rows))
    print(
        f"\n{found['questions']} questions, {found['answered_differently']} answered differently; "
        f"log-likelihoods differ by {found['largest_difference']:.3f} at most"
    )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
