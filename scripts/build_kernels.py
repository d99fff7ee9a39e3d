"""Compile the C kernels for each processor level with zig: python scripts/build_kernels.py MACHINE FOLDER."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from emberline.kernels.native_library import FLAGS, LEVELS, SOURCES

GLIBC = "2.17"  # of manylinux_2_17, the oldest that the libraries run on


def main(machine: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for level in LEVELS:
        if level.machine == machine:
            library = folder / f"{level.name}.so"
            target = ["-target", f"{machine}-linux-gnu.{GLIBC}", f"-mcpu={level.target}"]
            command = [sys.executable, "-m", "ziglang", "cc", *target, *FLAGS, "-g0", "-s"]
            subprocess.run([*command, str(SOURCES / "kernels.c"), "-o", str(library), "-lm"], check=True)
            print(f"{library.name}: {library.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
