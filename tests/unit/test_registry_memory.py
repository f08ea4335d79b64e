"""The registry in memory: that it has the surface of the real one. What it does is in the conformance suite."""

from __future__ import annotations

import inspect
import math

import pytest

from services.registry import LeaseLost, MemoryRegistry, Queue, Records, Registry, Submission
from services.registry.memory import MemoryQueue
from services.registry.memory_records import MemoryRecords


def methods(kind: type) -> dict[str, str]:
    return {
        name: str(inspect.signature(member)) for name, member in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"
    }


@pytest.mark.parametrize(("real", "model"), [(Queue, MemoryQueue), (Records, MemoryRecords)], ids=["queue", "records"])
def test_the_same_methods_with_the_same_arguments(real: type, model: type) -> None:
    # What takes a connection is a part of the real one's transactions; `held` is how records ask the queue in the other.
    wanted = {name: signature for name, signature in methods(real).items() if "connection" not in signature}
    assert {name: signature for name, signature in methods(model).items() if name != "held"} == wanted


def test_the_same_surface_around_them() -> None:
    for name in ("queue", "records", "ping", "close", "place", "__enter__", "__exit__"):
        assert hasattr(MemoryRegistry(), name)
        assert name in Registry.__annotations__ or hasattr(Registry, name)


def test_a_job_from_queue_to_end() -> None:
    with MemoryRegistry(now=lambda: 50.0) as registry:
        job = registry.queue.submit(Submission(kind="train", spec={"steps": [1, (2, math.inf)]}, digest="d")).job
        assert job.spec == {"steps": [1, [2, None]]}
        held = registry.queue.claim("d", cpus=1.0, gpus=0.0, memory_gb=0.0, lease_s=10.0)
        assert held is not None
        assert held.lease_until == 60.0
        done = registry.queue.succeed(held.fence, {"loss": 0.5})
        assert (done.result, done.finished_at, registry.ping()) == ({"loss": 0.5}, 50.0, 50.0)
        with pytest.raises(LeaseLost, match="it is succeeded"):
            registry.queue.beat(held.fence)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"kind": ""}, "kind is empty"),
        ({"key": ""}, "expected 1 to 200"),
        ({"key": "x" * 201}, "expected 1 to 200"),
        ({"key": "a\nb"}, "printable"),
        ({"priority": 10**7}, "priority 10000000; expected"),
        ({"cpus": -1.0}, "cpus is -1.0; expected"),
        ({"gpus": math.nan}, "gpus is nan"),
        ({"delay_s": math.inf}, "delay_s is inf"),
        ({"error_budget": -1}, "error_budget"),
        ({"time_limit_s": 0.0}, "time_limit_s is 0.0; expected a finite number above 0"),
    ],
)
def test_a_submission_that_cannot_be(values: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Submission(**({"kind": "train", "spec": {}, "digest": "d"} | values))  # type: ignore[arg-type]
