"""Whether `accelerate launch` started as many processes as it was told: on CPUs it starts one, and says nothing."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import yaml

# Where `accelerate config` writes.
DEFAULT_FILE = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "accelerate", "default_config.yaml")


def warn_of_fewer_processes(command: str) -> None:
    """Say so on stderr, with the command that starts them."""
    wanted = _asked_for()
    if wanted > 1 and os.environ.get("WORLD_SIZE", "1") == "1":
        print(
            f"{command}: warning: accelerate launch was told {wanted} processes and started one, as it does on CPUs. "
            f"Use: torchrun --nproc-per-node {wanted} -m sanctuary_trainer ...",
            file=sys.stderr,
        )


def _asked_for() -> int:
    """The number of processes in the command line, or the config file, of an `accelerate launch` that is our parent."""
    import psutil  # comes with accelerate

    try:
        parent = psutil.Process().parent()
        command = parent.cmdline() if parent else []
    except psutil.Error:
        return 1
    if "launch" not in command[:4] or not any("accelerate" in word for word in command[:3]):
        return 1
    text = " ".join(command)
    if found := re.search(r"--num[_-]processes[= ](\d+)", text):
        return int(found[1])
    named = re.search(r"--config[_-]file[= ](\S+)", text)
    file = Path(named[1]) if named else DEFAULT_FILE.expanduser()
    says = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    return int(says.get("num_processes") or 1) if isinstance(says, dict) else 1
