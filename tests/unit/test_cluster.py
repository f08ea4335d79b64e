"""What fits where, and what a waiting job is told: arithmetic of the dispatcher, without a cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from loopcore.specs import JOB_KINDS
from services.dispatcher.cluster import Ledger, Node, Room, node_name, snapshot
from services.dispatcher.kinds import ENTRIES, actor_cpus
from services.registry import Fence, Job, JobState


def a_job(
    number: int = 1, *, cpus: float = 1, gpus: float = 0, memory_gb: float = 0, node: str | None = None, kind: str = "train"
) -> Job:
    return Job(
        id=number,
        kind=kind,
        name=None,
        state=JobState.RUNNING,
        spec={},
        digest="",
        priority=0,
        user=None,
        key=None,
        cpus=cpus,
        gpus=gpus,
        memory_gb=memory_gb,
        attempt=1,
        errors=0,
        losses=0,
        error_budget=0,
        loss_budget=5,
        unmet=0,
        reason=None,
        progress=None,
        result=None,
        error=None,
        created_at=0.0,
        run_after=0.0,
        started_at=None,
        finished_at=None,
        lease_until=None,
        deadline_at=None,
        time_limit_s=None,
        cancel_requested_at=None,
        origin=number,
        retry_of=None,
        dispatcher=None,
        node=node,
        provenance={},
        study_id=None,
    )


def a_node(name: str, *, cpus: float = 2, gpus: float = 0, memory_gb: float = 16, used: Room | None = None) -> Node:
    return Node(name * 20, name, "127.0.0.1", Room(cpus, gpus, memory_gb), used or Room())


def on(node: Node) -> str:
    return node_name(node.host, node.id)


def test_live_attempts_are_counted_where_they_run() -> None:
    big, small = a_node("big", cpus=8), a_node("small", cpus=2)
    live = [a_job(1, cpus=3, node=on(big)), a_job(2, cpus=1, node=on(small)), a_job(3, cpus=2)]
    ledger = Ledger.count([big, small], live, {Fence(3, 1): big.id})
    assert ledger.free[big.id].cpus == 8 - 3 - 2
    assert ledger.free[small.id].cpus == 2 - 1
    assert ledger.jobs == {big.id: [1, 3], small.id: [2]}


def test_an_attempt_of_unknown_place_counts_where_most_is_free() -> None:
    big, small = a_node("big", cpus=8), a_node("small", cpus=2)
    ledger = Ledger.count([small, big], [a_job(1, cpus=2)], {})
    assert (ledger.free[big.id].cpus, ledger.free[small.id].cpus) == (6, 2)


def test_what_others_use_is_not_free_and_our_own_is_not_counted_twice() -> None:
    node = a_node("only", cpus=4, used=Room(cpus=3))
    # One CPU of ours has begun and is among the three; one is claimed and not yet seen by Ray.
    ledger = Ledger.count([node], [a_job(1, cpus=1, node=on(node)), a_job(2, cpus=1)], {Fence(2, 1): node.id})
    assert ledger.free[node.id].cpus == 4 - (3 - 1) - 1 - 1


def test_a_job_that_directs_holds_its_cpus_before_its_trials_take_them() -> None:
    job = a_job(1, cpus=2, kind="tune")
    assert actor_cpus(job) == (0.0, 0.0)
    assert actor_cpus(a_job(2, cpus=2)) == (2, 0)
    node = a_node("only", cpus=2, used=Room(cpus=1))
    assert Ledger.count([node], [a_job(1, cpus=2, kind="tune", node=on(node))], {}).free[node.id].cpus == 0


def test_jobs_of_one_process_take_the_resources_of_one() -> None:
    node = a_node("only", cpus=4, gpus=1, used=Room(cpus=1, gpus=0.5))
    live = [a_job(number, gpus=0.5, node=on(node)) for number in (1, 2, 3)]
    ledger = Ledger.count([node], live, {}, riding={Fence(2, 1), Fence(3, 1)})
    assert (ledger.free[node.id].cpus, ledger.free[node.id].gpus) == (3, 0.5)
    assert ledger.jobs[node.id] == [1, 2, 3]
    ledger.take(node.id, a_job(4, gpus=0.5), a_job(5, gpus=0.5))
    assert (ledger.free[node.id].gpus, ledger.jobs[node.id]) == (0, [1, 2, 3, 4, 5])


def test_shares_of_a_cpu_add_up_without_rounding_errors_becoming_a_shortage() -> None:
    node = a_node("only", cpus=1)
    live = [a_job(number, cpus=0.1, node=on(node)) for number in range(1, 8)]
    assert Ledger.count([node], live, {}).free[node.id].cpus != 0.3
    assert Ledger.count([node], live, {}).free[node.id].holds(Room(cpus=0.3))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"gpus": 1}, "waiting: needs 1 GPU, the cluster has 0"),
        ({"gpus": 2, "cpus": 64}, "waiting: needs 64 CPUs, the cluster has 6"),
        ({"cpus": 5}, "waiting: needs 5 CPUs on one machine, the largest has 4"),
        ({"memory_gb": 40}, "waiting: needs 40 GiB of memory, the cluster has 32"),
        ({"cpus": 4, "memory_gb": 20}, "waiting: needs 20 GiB of memory on one machine, the largest has 16"),
    ],
)
def test_a_job_that_can_never_fit_is_told_what_is_missing(asked: dict[str, float], told: str) -> None:
    ledger = Ledger.count([a_node("a", cpus=4), a_node("b", cpus=2)], [], {})
    assert ledger.why(a_job(9, **({"cpus": 1} | asked))) == told


def test_parts_on_different_machines_do_not_add_up() -> None:
    ledger = Ledger.count([a_node("a", cpus=8), a_node("b", cpus=1, gpus=1)], [], {})
    assert ledger.why(a_job(9, cpus=4, gpus=1)) == "waiting: needs 4 CPUs and 1 GPU on one machine, and none has them together"


def test_a_job_that_waits_for_room_is_told_what_is_free() -> None:
    node = a_node("only", cpus=2)
    ledger = Ledger.count([node], [a_job(1, cpus=1.5, node=on(node))], {})
    assert ledger.why(a_job(9, cpus=1)) == "waiting: needs 1 CPU, 0.5 of 2 free"
    assert ledger.why(a_job(9, cpus=0.5)) == "waiting: its turn comes next"
    assert Ledger.count([], [], {}).why(a_job(9)) == "waiting: no machine of the cluster is up"
    two = Ledger.count([node, a_node("full", cpus=2, used=Room(cpus=2))], [a_job(1, cpus=1, node=on(node))], {})
    assert two.why(a_job(9, cpus=2)) == "waiting: needs 2 CPUs, 1 of 2 free on only"


def test_the_snapshot_is_plain_data() -> None:
    node = a_node("only", cpus=2, used=Room(cpus=2.5))
    told = snapshot(Ledger.count([node], [], {}), {7: "waiting: x"}, address="127.0.0.1:6379", problem=None)
    assert told["nodes"] == [
        {
            "id": node.id,
            "name": "only/onlyonlyonly",
            "host": "only",
            "address": "127.0.0.1",
            "cpus": 2,
            "gpus": 0,
            "memory_gb": 16,
            "free_cpus": 0.0,
            "free_gpus": 0.0,
            "free_memory_gb": 16.0,
            "jobs": [],
        }
    ]
    assert (told["ray"], told["waiting"]) == ("up", [{"job": 7, "reason": "waiting: x"}])
    assert snapshot(None, {}, address=None, problem="no Ray cluster is known")["ray"] == "down"


def test_every_kind_of_job_has_its_code() -> None:
    assert tuple(ENTRIES) == JOB_KINDS


def test_importing_the_loop_loads_nothing_heavy(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    heavy = ("ray", "torch", "mlflow", "pandas", "numpy", "workers")
    ran = run_python(f"import sys, services.dispatcher.__main__; print([m for m in {heavy} if m in sys.modules])")
    assert ran.stdout.strip() == "[]", ran.stderr
