import subprocess
import sys


def test_the_file_limit_is_raised() -> None:
    """In a process of its own: a lowered limit cannot always be raised again."""
    script = """
import resource
from emberline.supervisor.machine import raise_file_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
assert raise_file_limit() == hard
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
