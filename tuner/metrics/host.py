"""What is read of the machine beside its GPUs: memory, /dev/shm, ports, and who has them."""

from __future__ import annotations

import os
import socket
from typing import Protocol

import psutil

_GIB = 2**30
_SHARED_MEMORY = "/dev/shm"
_MOST_NAMED = 3


class Host(Protocol):
    """What is read of the machine beside its GPUs."""

    def shared_memory_gib(self) -> tuple[float, float] | None:
        """Used and total size of /dev/shm; None if there is none."""

    def memory_gib(self) -> tuple[float, float]:
        """Used memory, without what the kernel can drop, and all there is."""

    def listens(self, port: int) -> bool:
        """Whether somebody takes connections at this port of 127.0.0.1."""

    def shared_memory_holders(self) -> list[str]:
        """The largest files in /dev/shm and who has them mapped, for a person."""

    def memory_holders(self) -> list[str]:
        """The processes with the most memory, for a person."""


class ThisHost:
    """The machine that the tuner runs on; implements `Host`."""

    def shared_memory_gib(self) -> tuple[float, float] | None:
        """See `Host`."""
        try:
            found = os.statvfs(_SHARED_MEMORY)
        except OSError:
            return None
        block_gib = found.f_frsize / _GIB
        return (found.f_blocks - found.f_bfree) * block_gib, found.f_blocks * block_gib

    def memory_gib(self) -> tuple[float, float]:
        """See `Host`."""
        memory = psutil.virtual_memory()
        return (memory.total - memory.available) / _GIB, memory.total / _GIB

    def listens(self, port: int) -> bool:
        """See `Host`."""
        with socket.socket() as client:
            client.settimeout(0.2)
            return client.connect_ex(("127.0.0.1", port)) == 0

    def shared_memory_holders(self) -> list[str]:
        """See `Host`."""
        sizes: dict[str, float] = {}
        try:
            with os.scandir(_SHARED_MEMORY) as entries:
                for entry in entries:
                    sizes[entry.path] = entry.stat(follow_symlinks=False).st_blocks * 512 / _GIB
        except OSError:
            return []
        largest = sorted(sizes, key=lambda path: -sizes[path])[:_MOST_NAMED]
        users = _mapped_by(largest)
        return [f"{path} ({sizes[path]:.1f} GiB, {users[path]})" for path in largest]

    def memory_holders(self) -> list[str]:
        """See `Host`."""
        resident: list[tuple[float, str]] = []
        for process in psutil.process_iter(["pid", "name", "username", "memory_info"]):
            info = process.info
            if info["memory_info"] is not None:
                used_gib = info["memory_info"].rss / _GIB
                words = f"{info['name']}, of {info['username']}, {used_gib:.1f} GiB"
                resident.append((used_gib, f"process {info['pid']} ({words})"))
        return [text for _, text in sorted(resident, reverse=True)[:_MOST_NAMED]]


def _mapped_by(paths: list[str]) -> dict[str, str]:
    """Which processes have these files mapped, in words."""
    users: dict[str, list[str]] = {path: [] for path in paths}
    for process in psutil.process_iter(["name"]):
        try:
            with open(f"/proc/{process.pid}/maps", errors="surrogateescape") as maps:
                text = maps.read()
        except OSError:
            continue
        for path in paths:
            if f" {path}\n" in text:
                users[path].append(f"process {process.pid} ({process.info['name']})")
    return {path: ", ".join(found) or "mapped by no process" for path, found in users.items()}
