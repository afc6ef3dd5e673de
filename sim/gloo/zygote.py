"""The zygote: a process that prepares once, then forks a rank whenever it is asked to.

It stays single-threaded, holds no groups, and is started fresh: a fork of the calling process
would take over its threads' locks and its state. Requests and answers are short lines over one
socket; a request waits for its answer. When the socket closes, it ends all ranks and itself.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

from . import rank

LONGEST = 1 << 16
"""Bytes of a request."""
_REAP = 2.0
"""Seconds that a rank whose sockets have closed is given to end by itself."""


def main(descriptor: int, prepare: str) -> None:
    """A zygote's life.

    Args:
        descriptor: its end of the socket.
        prepare: a pickled callable, in hexadecimal digits, called before the first fork.
    """
    # The calling process alone answers Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    caller = socket.socket(fileno=descriptor)
    try:
        import torch

        torch.set_num_threads(1)
        call: Callable[[], object] | None = pickle.loads(bytes.fromhex(prepare))
        if call is not None:
            call()
    except BaseException:
        caller.sendall(b"failed " + traceback.format_exc().encode()[-LONGEST // 2 :])
        return
    gc.collect()
    gc.freeze()
    caller.sendall(b"ready")
    ranks: set[int] = set()
    try:
        _serve(caller, ranks)
    finally:
        _end(ranks, [*ranks], 0.0)


def _serve(caller: socket.socket, ranks: set[int]) -> None:
    while True:
        data, descriptors, _, _ = socket.recv_fds(caller, LONGEST, 16)
        if not data:
            return
        word, *arguments = data.decode().split()
        if word == "fork":
            pid = _fork(caller, descriptors)
            ranks.add(pid)
            caller.sendall(str(pid).encode())
        else:  # "end" them now, or "reap" those that are ending
            codes = _end(ranks, list(map(int, arguments)), _REAP if word == "reap" else 0.0)
            caller.sendall(" ".join(map(str, codes)).encode() or b"-")


def _fork(caller: socket.socket, descriptors: list[int]) -> int:
    """Fork a rank that lives on these descriptors; they are closed here."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    code = 1
    try:
        caller.close()
        _die_with(parent)
        rank.live(*descriptors)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # What the zygote would do at its end is not this process's business.
        os._exit(code)


def _die_with(parent: int) -> None:
    """Have the kernel end this process when the zygote ends, where there is such a thing."""
    if sys.platform == "linux":
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _end(ranks: set[int], pids: list[int], patience: float) -> list[int]:
    """End ranks, by force after so many seconds; their exit codes, below 0 for a signal."""
    codes = []
    deadline = time.monotonic() + patience
    for pid in pids:
        if pid not in ranks:
            codes.append(0)
            continue
        ended, status = os.waitpid(pid, os.WNOHANG)
        while not ended and time.monotonic() < deadline:
            time.sleep(0.005)
            ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        ranks.discard(pid)
        codes.append(os.waitstatus_to_exitcode(status))
    return codes
