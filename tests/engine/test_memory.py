from emberline.engine import memory


def test_a_control_group_limits_free_memory(tmp_path):
    assert memory.cgroup_bytes(tmp_path) > 1 << 60, "no control group"
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 200\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.cgroup_bytes(tmp_path) > 1 << 60
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory.cgroup_bytes(tmp_path) == 500


def test_the_limit_of_a_group_further_up_counts(tmp_path):
    own = "0::/system.slice/emberline.service\n"
    folder = tmp_path / "system.slice"
    (folder / "emberline.service").mkdir(parents=True)
    for group, limit in ((folder, 1000), (folder / "emberline.service", 5000)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("700\n")
        (group / "memory.stat").write_text("inactive_file 200\n")
    assert memory.cgroup_bytes(tmp_path, own) == 500
    assert memory.cgroup_bytes(tmp_path, "0::/system.slice/other.service\n") == 500
    assert memory.cgroup_bytes(tmp_path, "0::/../other\n") > 1 << 60


def test_control_groups_of_version_1(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("700\n")
    (tmp_path / "memory" / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 200\n")
    own = "4:memory:/docker/0123\n3:cpuset:/\n0::/\n"
    assert memory.cgroup_bytes(tmp_path, own) == 500, "a container sees its own group as the root"


def test_default_kv_bytes_are_a_quarter_of_free_memory_up_to_2_gib():
    assert memory.default_kv_bytes("cpu", free_bytes=4000) == 1000
    assert memory.default_kv_bytes("cpu", n_workers=2, free_bytes=4000) == 500
    assert memory.default_kv_bytes("cpu", free_bytes=1 << 40) == 2 << 30


def test_the_host_tier_of_a_gpu_is_a_share_of_free_memory():
    assert memory.default_host_tier_bytes(64 << 30, n_gpus=2) == 8 << 30
    assert memory.default_host_tier_bytes(7 << 30, n_gpus=2) == 0
