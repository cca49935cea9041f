"""The memory that control groups, those of a container or of systemd's MemoryMax=, leave to this process."""

from __future__ import annotations

from pathlib import Path

_MOUNT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file ")
"""Files of a group's limit and use, and the line of memory.stat for the file cache that the kernel gives back."""


def unused_bytes(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> list[int]:
    """Return the memory left under each limit that holds here: of the process's groups and of those above them."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    found = list[int]()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = mount, _VERSION_2
        elif "memory" in controllers.split(","):
            root, names = mount / "memory", _VERSION_1
        else:
            continue
        # A container may see the path of its host, which its own mount does not have: then the root is its group.
        group = root / path.lstrip("/")
        found += [left for each in (group, *group.parents) if each.is_relative_to(root) for left in _left(each, *names)]
    return found


def _left(group: Path, limit_file: str, used_file: str, reclaimable: str) -> list[int]:
    """Return the memory left under a group's own limit, if it has one, as a list of at most one."""
    try:
        limit = int((group / limit_file).read_text(encoding="ascii"))
        used = int((group / used_file).read_text(encoding="ascii"))
        statistics = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # ValueError for the word "max"
        return []
    # The file cache counts as used, though the kernel gives it back when asked for memory.
    return [limit - used + sum(int(line.split()[1]) for line in statistics if line.startswith(reclaimable))]
