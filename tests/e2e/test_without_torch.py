"""The server of these tests hides torch from all its processes: a GGUF model on a CPU needs none."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import WITHOUT_TORCH
from tests.lazy_modules import openai

MODEL = "smollm2"


def test_every_kind_of_answer_comes_without_torch(server: str) -> None:
    """Sampling with penalties, probabilities of drawn and of prompt tokens, and a JSON schema."""
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    prompt = "The capital of France is"
    drawn = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=4, seed=1, temperature=0.7, frequency_penalty=0.5, logprobs=2, echo=True
    ).choices[0]
    assert len(drawn.logprobs.token_logprobs) > 4
    assert all(logprob <= 0 for logprob in drawn.logprobs.token_logprobs[1:])
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    shaped = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "One or two?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        max_tokens=30,
    )
    assert json.loads(shaped.choices[0].message.content)["n"] in (1, 2)


def test_what_needs_torch_says_how_to_install_it(tmp_path: Path, smollm2: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(WITHOUT_TORCH), os.environ["PYTHONPATH"]])}
    command = [sys.executable, "-m", "emberline.engine.worker", "--model", str(smollm2), "--socket", "unix:x.sock"]
    done = subprocess.run(
        [*command, "--speculation", "eagle3"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode
    assert "a draft head needs PyTorch, which is not installed: pip install 'emberline[torch]'" in done.stderr
