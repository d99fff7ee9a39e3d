"""Installs the stand-ins of `absent_modules` in every Python process that has this folder on PYTHONPATH."""

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
importlib.import_module("absent_modules").install()
