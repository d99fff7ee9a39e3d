"""Makes torch look as if it were not installed, for processes with this folder on their PYTHONPATH."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
