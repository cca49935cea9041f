"""The limits of control groups, of both versions, as a process finds them in its own group and those above."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsplit.model.control_groups import unused_bytes

MiB = 1 << 20
V1_UNLIMITED = 9223372036854771712


def put(group: Path, limit: int | str, used: int, *, version: int) -> None:
    """Make a group whose file cache holds a MiB that the kernel would give back."""
    group.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    for name, content in zip(names, (limit, used), strict=True):
        (group / name).write_text(f"{content}\n")
    prefix = "total_" if version == 1 else ""
    (group / "memory.stat").write_text(f"inactive_anon 7\n{prefix}inactive_file {MiB}\n{prefix}active_file 9\n")


def membership(folder: Path, *lines: str) -> Path:
    path = folder / "membership"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize("limited", ["", "system.slice", "system.slice/target.service"])
def test_a_limit_of_version_2_holds_for_the_groups_below(limited: str, tmp_path: Path):
    mount = tmp_path / "mount"
    for group in ("system.slice", "system.slice/target.service", "other.slice"):
        put(mount / group, "max", 5 * MiB, version=2)
    put(mount / "other.slice", MiB, 0, version=2)
    put(mount / limited, 100 * MiB, 20 * MiB, version=2)
    own = membership(tmp_path, "0::/system.slice/target.service")
    assert unused_bytes(mount, own) == [81 * MiB]


def test_a_limit_of_version_1_lies_below_its_controller(tmp_path: Path):
    mount = tmp_path / "mount"
    put(mount / "memory", V1_UNLIMITED, 40 * MiB, version=1)
    put(mount / "memory" / "docker" / "a", 100 * MiB, 20 * MiB, version=1)
    own = membership(tmp_path, "5:cpu,cpuacct:/", "4:memory:/docker/a", "1:name=systemd:/docker/a", "0::/")
    assert min(unused_bytes(mount, own)) == 81 * MiB


@pytest.mark.parametrize(("line", "root", "version"), [("4:memory:/docker/a", "memory", 1), ("0::/../../pod", "", 2)])
def test_a_group_whose_path_is_the_hosts_is_the_root_here(line: str, root: str, version: int, tmp_path: Path):
    mount = tmp_path / "mount"
    put(mount / root, 100 * MiB, 20 * MiB, version=version)
    assert unused_bytes(mount, membership(tmp_path, line)) == [81 * MiB]


def test_a_machine_without_control_groups_has_no_limit(tmp_path: Path):
    assert unused_bytes(tmp_path / "mount", tmp_path / "membership") == []
    assert unused_bytes(tmp_path / "mount", membership(tmp_path, "0::/")) == []
