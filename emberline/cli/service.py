"""`emberline service install|uninstall`: a systemd service that runs the server.

For root it is a service of the machine, of a user without a login; for anybody else a service of their own, which ends
with their session unless `loginctl enable-linger` keeps it.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from emberline.cli import common
from emberline.config import Config
from emberline.protocol.errors import BadInput
from emberline.supervisor import machine

NAME = "emberline.service"
_HARDENING = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome={protect_home}
PrivateTmp=yes
PrivateDevices={private_devices}
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    install = actions.add_parser("install", help="write the service, start it, and start it with the machine")
    install.add_argument("arguments", nargs="*", metavar="ARGUMENTS", help="of `emberline serve`, after `--`")
    uninstall = actions.add_parser("uninstall", help="stop the service and remove it; data and models stay")
    for action in (install, uninstall):
        action.add_argument("--print", action="store_true", help="print the unit or the commands; change nothing")
        common.add_data_dir(action)


def run(args: argparse.Namespace) -> int:
    is_root = os.geteuid() == 0
    path = unit_folder(is_root) / NAME
    control = ["systemctl", *([] if is_root else ["--user"])]
    if args.action == "install":
        return _install(args, path, control, is_root)
    if args.print:
        print(shlex.join([*control, "disable", "--now", NAME]))
        return 0
    if not path.exists():
        raise BadInput(f"there is no service {path}")
    _systemctl([*control, "disable", "--now", NAME])
    path.unlink()
    _systemctl([*control, "daemon-reload"])
    print(f"removed {path}; data and models are where they were")
    return 0


def unit_folder(is_root: bool) -> Path:
    if is_root:
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"


def unit(config: Config, arguments: list[str], *, is_root: bool, has_gpu: bool) -> str:
    """The text of the service's unit file."""
    home = Path("/var/lib/emberline") if is_root else config.home
    command = [*_program(), "serve", *arguments]
    owner = (
        "DynamicUser=yes\nStateDirectory=emberline\nStateDirectoryMode=0700\nCacheDirectory=emberline\n"
        "Environment=XDG_CACHE_HOME=/var/cache/emberline\nEnvironmentFile=-/etc/emberline.env\n"
        if is_root
        else f"EnvironmentFile=-{str(home).replace('%', '%%')}/emberline.env\n"
    )
    # A program in a home folder must stay readable; a GPU's device files must stay visible.
    in_home = Path(command[0]).resolve().is_relative_to("/home") or Path(command[0]).resolve().is_relative_to("/root")
    hardening = _HARDENING.format(
        protect_home="read-only" if in_home else "yes", private_devices="no" if has_gpu else "yes"
    )
    started = " ".join(_quoted(word).replace("$", "$$") for word in command)
    return (
        "[Unit]\nDescription=Emberline inference server\nAfter=network-online.target\nWants=network-online.target\n\n"
        f"[Service]\nType=exec\nExecStart={started}\n"
        f"Environment={_quoted(f'EMBERLINE_HOME={home}')} EMBERLINE_LOG_FORMAT=json\n{owner}"
        "Restart=on-failure\nRestartSec=2\nKillMode=mixed\nTimeoutStopSec=45\nLimitNOFILE=65536\nUMask=0077\n"
        f"{hardening if is_root else ''}\n[Install]\nWantedBy={'multi-user' if is_root else 'default'}.target\n"
    )


def _quoted(word: str) -> str:
    """One word of a setting, as systemd reads it."""
    if not word.isprintable():
        raise BadInput(f"{word!r} cannot be in a service: it has characters that are not printable")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if escaped == word and not set(word) & set(" '") else f'"{escaped}"'


def _install(args: argparse.Namespace, path: Path, control: list[str], is_root: bool) -> int:
    text = unit(common.config_of(args), args.arguments, is_root=is_root, has_gpu=machine.n_gpus_installed() > 0)
    if args.print:
        print(text, end="")
        return 0
    if shutil.which("systemctl") is None:
        raise BadInput("this machine has no systemd; `emberline service install --print` shows the unit")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    _systemctl([*control, "daemon-reload"])
    _systemctl([*control, "enable", "--now", NAME])
    logs = shlex.join(["journalctl", *([] if is_root else ["--user"]), "-u", NAME, "-f"])
    print(f"{path} is installed and running; its log: {logs}")
    return 0


def _program() -> list[str]:
    """The command that runs this installation, by its full path."""
    beside = Path(sys.executable).parent / "emberline"
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "emberline.cli.main"]


def _systemctl(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadInput(f"{shlex.join(command)} failed: {done.stderr.strip()}")
