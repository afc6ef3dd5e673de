"""What processes could leave behind, looked at from outside."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    try:
        return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: Iterable[int], seconds: float = 10.0) -> bool:
    """Whether all of these processes end within so many seconds."""
    deadline = time.monotonic() + seconds
    pids = list(pids)
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def shared_memory() -> set[str]:
    """Names of shared memory, where it has a folder."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def temporary_files(folder: Path) -> list[str]:
    """What is in a temporary folder."""
    return [path.name for path in folder.iterdir()]


def listening_ports() -> set[int]:
    """TCP ports on which this machine listens, where the kernel tells."""
    ports = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if table.exists():
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def ports_of(pid: int) -> set[int]:
    """TCP ports on which one process listens."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            sockets.add(os.readlink(link))
        except OSError:
            continue
    ports = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports
