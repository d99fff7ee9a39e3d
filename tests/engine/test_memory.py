from emberline.engine import memory


def test_a_control_group_limits_free_memory(tmp_path):
    assert memory._cgroup_bytes(tmp_path) > 1 << 60, "no control group"
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 200\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup_bytes(tmp_path) > 1 << 60
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory._cgroup_bytes(tmp_path) == 500


def test_default_kv_bytes_are_a_quarter_of_free_memory_up_to_2_gib(monkeypatch):
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 4000)
    assert memory.default_kv_bytes("cpu") == 1000
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 1 << 40)
    assert memory.default_kv_bytes("cpu") == 2 << 30
