"""Which device and precision a run gets, on machines with and without a GPU."""

from __future__ import annotations

import pytest
import torch

from loopcore.device import Precision, autocast, autocast_dtype, resolve_device
from loopcore.errors import DeviceUnavailable

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets torch say that there is a GPU, or none, and whether it computes in bf16."""
    there, bf16 = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Old GPU")


without = pytest.mark.parametrize("gpu", [(False, False)], indirect=True, ids=["no GPU"])
modern = pytest.mark.parametrize("gpu", [(True, True)], indirect=True, ids=["GPU"])
old = pytest.mark.parametrize("gpu", [(True, False)], indirect=True, ids=["GPU without bf16"])


@without
def test_without_a_gpu(gpu: None) -> None:
    assert resolve_device("auto") == CPU
    assert resolve_device("cpu") == CPU
    with pytest.raises(DeviceUnavailable, match="this machine has only the CPU; set device to auto or cpu"):
        resolve_device("cuda")


@modern
def test_with_a_gpu(gpu: None) -> None:
    assert resolve_device("auto") == GPU
    assert resolve_device("cuda") == GPU
    assert resolve_device("cpu") == CPU


@modern
def test_a_gpu_that_was_not_granted_is_left_alone(gpu: None) -> None:
    assert resolve_device("auto", granted_gpu=False) == CPU
    with pytest.raises(DeviceUnavailable, match="the job was granted no GPU"):
        resolve_device("cuda", granted_gpu=False)


@pytest.mark.parametrize("name", ["tpu", "", "cuda:7"])
def test_an_unknown_device(name: str) -> None:
    with pytest.raises(DeviceUnavailable, match=f"no device is called {name!r}; expected one of auto, cpu, cuda"):
        resolve_device(name)


@modern
def test_precision_on_a_gpu(gpu: None) -> None:
    assert autocast_dtype("auto", GPU) is torch.bfloat16
    assert autocast_dtype("bf16", GPU) is torch.bfloat16
    assert autocast_dtype("fp32", GPU) is None


@old
def test_precision_on_a_gpu_without_bf16(gpu: None) -> None:
    assert autocast_dtype("auto", GPU) is None
    with pytest.raises(DeviceUnavailable, match="Old GPU cannot compute in it; set precision to fp32"):
        autocast_dtype("bf16", GPU)


@pytest.mark.parametrize(("precision", "dtype"), [("auto", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision_on_the_cpu(precision: Precision, dtype: torch.dtype) -> None:
    ones = torch.ones(2, 2)
    with autocast(precision, CPU):
        assert (ones @ ones).dtype is dtype
