"""`vllm serve` from a bundle without its optional modules. Its arguments are those of vLLM's OpenAI server.

Runs as a script, with the unpacked bundle on PYTHONPATH.
"""

import importlib
import os
import runpy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
importlib.import_module("absent_modules").install()
os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

if __name__ == "__main__":  # and not where vLLM's processes import this file
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
