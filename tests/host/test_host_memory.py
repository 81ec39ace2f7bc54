"""What may still be taken of host memory, from files of the kernel as different systems have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashnext_drv.host_memory import host_memory

pytestmark = pytest.mark.host
MIB = 1 << 20
NO_LIMIT_V1 = "9223372036854771712"


def system(root: Path, files: dict[str, str], available_mib: int = 1000) -> Path:
    """A root folder with these files and a /proc/meminfo."""
    told = f"MemTotal:  {4000 * 1024} kB\nMemAvailable:  {available_mib * 1024} kB\n"
    files = {"proc/meminfo": told} | files
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group_v2(folder: str, limit: str, usage_mib: int, stat: str = "", high: str = "max") -> dict[str, str]:
    stem = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{stem}/memory.max": f"{limit}\n",
        f"{stem}/memory.high": f"{high}\n",
        f"{stem}/memory.current": f"{usage_mib * MIB}\n",
        f"{stem}/memory.stat": stat,
    }


def group_v1(folder: str, limit: str, usage_mib: int, stat: str = "") -> dict[str, str]:
    stem = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    return {
        f"{stem}/memory.limit_in_bytes": f"{limit}\n",
        f"{stem}/memory.usage_in_bytes": f"{usage_mib * MIB}\n",
        f"{stem}/memory.stat": stat,
    }


def test_a_machine_without_groups_has_what_it_reports(tmp_path: Path) -> None:
    found = host_memory(system(tmp_path, {}))
    assert (found.total_bytes, found.reported_bytes) == (4000 * MIB, 1000 * MIB)
    assert (found.available_bytes, found.binding) == (1000 * MIB, "MemAvailable")
    assert "1000.0 MiB available by MemAvailable" in str(found)


def test_the_tightest_group_of_version_2_binds(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/user/app\n"} | group_v2("", "max", 3000)
    files |= group_v2("user", str(900 * MIB), 300) | group_v2("user/app", str(800 * MIB), 100)
    found = host_memory(system(tmp_path, files))
    assert found.available_bytes == 600 * MIB
    assert found.binding == "cgroup /user with a limit of 900.0 MiB"
    assert host_memory(system(tmp_path, files, available_mib=500)).binding == "MemAvailable"


def test_the_throttling_limit_counts_too(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n"} | group_v2("", "max", 100, high=str(300 * MIB))
    assert host_memory(system(tmp_path, files)).available_bytes == 200 * MIB


def test_page_cache_that_can_be_dropped_is_free(tmp_path: Path) -> None:
    """A pack that was read fills its group with clean pages; dirty ones must be written first."""
    stat = (
        f"anon {90 * MIB}\nfile {300 * MIB}\ninactive_file {200 * MIB}\nactive_file {100 * MIB}\n"
        f"file_dirty {30 * MIB}\nfile_writeback {20 * MIB}\nshmem 0\n"
    )
    files = {"proc/self/cgroup": "0::/\n"} | group_v2("", str(400 * MIB), 400, stat)
    assert host_memory(system(tmp_path, files)).available_bytes == 250 * MIB
    too_much = stat.replace(str(200 * MIB), str(900 * MIB))
    files |= group_v2("", str(400 * MIB), 390, too_much)
    assert host_memory(system(tmp_path, files)).available_bytes == 400 * MIB, "never more than the limit"


def test_groups_of_version_1_and_paths_of_the_host(tmp_path: Path) -> None:
    """In a container the path is often the host's, and only the mount's root is there."""
    stat = f"total_inactive_file {20 * MIB}\ntotal_active_file 0\ntotal_dirty {5 * MIB}\n"
    files = {"proc/self/cgroup": "5:cpu,memory:/docker/abc\n3:cpuset:/\n0::/\n"}
    files |= group_v1("", str(200 * MIB), 150, stat)
    found = host_memory(system(tmp_path, files))
    assert (found.available_bytes, found.binding) == (65 * MIB, "cgroup / with a limit of 200.0 MiB")
    files |= group_v1("docker/abc", str(100 * MIB), 90)
    assert host_memory(system(tmp_path, files)).available_bytes == 10 * MIB
    files |= group_v1("", NO_LIMIT_V1, 150) | group_v1("docker/abc", NO_LIMIT_V1, 90)
    assert host_memory(system(tmp_path, files)).binding == "MemAvailable"


def test_a_group_above_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n"} | group_v2("a", str(100 * MIB), 120)
    assert host_memory(system(tmp_path, files)).available_bytes == 0


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "nonsense\n0\n:::\n"},
        {
            "proc/self/cgroup": "0::/a\n",
            "sys/fs/cgroup/a/memory.max": "lots\n",
            "sys/fs/cgroup/a/memory.current": "",
        },
        {"proc/self/cgroup": "0::/../../a\n", "sys/fs/cgroup/memory.max": f"{MIB}\n"},
        {
            "proc/self/cgroup": "0::/a\n",
            "sys/fs/cgroup/a/memory.max": "-5\n",
            "sys/fs/cgroup/a/memory.current": "1\n",
            "sys/fs/cgroup/a/memory.stat": "x\ny z\n",
        },
    ],
)
def test_files_that_say_something_else_are_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    assert host_memory(system(tmp_path, files)).available_bytes == 1000 * MIB


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    found = host_memory(tmp_path)
    assert (found.total_bytes, found.available_bytes, found.memlock_bytes) == (None, None, None)
    assert str(found) == "host memory is not told by this system"
    system(tmp_path, {"proc/meminfo": "MemTotal: many kB\nMemAvailable:\n"})
    assert host_memory(tmp_path).available_bytes is None


def test_the_limit_of_locked_memory(tmp_path: Path) -> None:
    limits = (
        "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max processes             unlimited            unlimited            processes\n"
        "Max locked memory         {}                65536                bytes\n"
    )
    made = {
        "proc/self/limits": limits.format(65536),
        "proc/self/status": "Name:\tx\nCapEff:\t0000000000000000\n",
    }
    assert host_memory(system(tmp_path, made)).memlock_bytes == 65536
    assert "mlock limit 64.0 KiB" in str(host_memory(tmp_path))
    made["proc/self/limits"] = limits.format("unlimited")
    assert host_memory(system(tmp_path, made)).memlock_bytes is None
    made = {"proc/self/limits": limits.format(65536), "proc/self/status": "CapEff:\t000000000000c000\n"}
    assert host_memory(system(tmp_path, made)).memlock_bytes is None, "may lock beyond the limit"
    made["proc/self/status"] = "CapEff:\tfffb0fffffffbfff\n"
    assert host_memory(system(tmp_path, made)).memlock_bytes == 65536


@pytest.mark.parametrize(("told", "nodes"), [("0", (0,)), ("0-1,3", (0, 1, 3)), ("", ()), ("0-", ()),
                                             ("all", ()), ("1-2-3", ())])
def test_the_memory_nodes_that_may_be_used(tmp_path: Path, told: str, nodes: tuple[int, ...]) -> None:
    files = {"proc/self/status": f"Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t{told}\n"}
    assert host_memory(system(tmp_path, files)).nodes == nodes


def test_this_machine_can_be_read() -> None:
    found = host_memory()
    assert found.available_bytes is None or found.available_bytes >= 0
    assert found.reported_bytes is None or found.available_bytes is not None
