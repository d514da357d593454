"""Memory of this process that others on its host can look into, by a name, whatever this process is stuck in.

It is a file without a place on any disk, gone with its process. Linux has what it takes.
"""

import contextlib
import os
from pathlib import Path
from typing import IO


def made(name: str) -> IO[bytes] | None:
    """Some memory to write into; None where the system has no such thing."""
    if not hasattr(os, "memfd_create"):
        return None
    return os.fdopen(os.memfd_create(name), "w+b", buffering=0)


def of_process(pid: int, name: str) -> Path | None:
    """The memory of that name that a process of this host has, as a file to read."""
    with contextlib.suppress(OSError):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if handle.readlink().name.split(" ")[0] == f"memfd:{name}":
                    return handle
    return None
