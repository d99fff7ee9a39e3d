"""GPUs by name, from a file, or as a driver calls them."""

import pytest

from emberline.engine.planning.hardware import GIB, GPUS, gpu_of_device, parse_gpus
from emberline.protocol.errors import BadInput

X1 = '[[gpu]]\nname = "X1"\nmemory_gib = 10\nbandwidth_tb_s = 1\nbf16_tflops = 100\nfp8_tflops = 200\n'


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("8xh100", 8, "H100"),
        ("H200", 1, "H200"),
        ("4xA100", 4, "A100-80"),
        ("2xA100-40GB", 2, "A100-40"),
        ("2xrtx4090", 2, "RTX-4090"),
        ("2x4090", 2, "RTX-4090"),
        ("1xL40S", 1, "L40S"),
    ],
)
def test_gpus_are_named(text, count, name):
    assert parse_gpus(text) == (count, GPUS[name])


def test_the_measured_gpu_has_its_measured_rates():
    h200 = GPUS["H200"]
    assert (h200.bandwidth_tb_s, h200.bf16_tflops, h200.fp8_tflops) == (4.26, 800, 1400)
    assert h200.runs_kernels
    assert not GPUS["A100-80"].runs_kernels


def test_gpus_come_from_a_file(tmp_path):
    table = tmp_path / "gpus.toml"
    table.write_text(X1 + "link_gb_s = 400\n[[gpu.all_reduce]]\nranks = 2\nkib = 14\nus = 6.5\n")
    count, gpu = parse_gpus("2xX1", table)
    assert (count, gpu.memory, gpu.link_gb_s, gpu.all_reduce[0].us) == (2, 10 * GIB, 400, 6.5)
    assert parse_gpus("H100", table)[1] == GPUS["H100"]


@pytest.mark.parametrize("wrong", ["0xH200", "8xH99", "many", ""])
def test_an_unknown_gpu_is_refused_with_the_known_ones(wrong):
    with pytest.raises(BadInput, match=r"known are A100-40, A100-80.*H100|at least 1"):
        parse_gpus(wrong)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[gpu]]\nname = "X1"\n', "memory_gib"),
        (X1 + "colour = 1\n", "colour"),
        (X1.replace("memory_gib = 10", "memory_gib = 0"), "above 0"),
        (X1 + "[[gpu.all_reduce]]\nranks = 1\nkib = 14\nus = 6\n", "2 ranks or more"),
        ("[gpus]\n", "only tables"),
        ("gpu =", "Invalid value|Expected"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, says):
    table = tmp_path / "gpus.toml"
    table.write_text(text)
    with pytest.raises(BadInput, match=says):
        parse_gpus("X1", table)
    with pytest.raises(BadInput, match="No such file"):
        parse_gpus("X1", tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("driver", "gib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA GH200 480GB", 94.5, "GH200"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80"),
        ("NVIDIA GeForce RTX 4090", 23.5, "RTX-4090"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("A card of tomorrow", 500.0, "H100"),
    ],
)
def test_a_device_is_known_by_what_its_driver_calls_it(driver, gib, name):
    gpu = gpu_of_device(driver, int(gib * GIB))
    assert (gpu.name, round(gpu.memory_gib, 1)) == (name, gib)
