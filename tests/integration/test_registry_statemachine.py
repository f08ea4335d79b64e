"""Random histories of the queue, played on a real database and on the model in memory side by side.

After each step both must have said the same and show the same jobs; at the end all that can be seen of them must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from services.registry import (
    CurvePoint,
    Fence,
    Job,
    JobState,
    Measurement,
    MemoryRegistry,
    Registry,
    RegistryError,
    RunState,
    migrate,
)
from services.registry.states import TRANSITIONS
from tests.integration.registries import AnyRegistry, Clock, empty, submission

STEPS = 40
HISTORIES = 50

Numbers = st.integers(1, 12)  # jobs, known or not
Fences = st.builds(Fence, Numbers, st.integers(1, 3))


class History(RuleBasedStateMachine):
    """Every rule is done on both; `registry` is set by the test."""

    registry: Registry
    clock: Clock
    seen: ClassVar[set[tuple[JobState, JobState]]] = set()

    def __init__(self) -> None:
        super().__init__()
        empty(self.registry)
        self.clock.at = 1_000_000.0
        self.model = MemoryRegistry(now=self.clock)
        self.states: dict[int, JobState] = {}
        self.ended: dict[int, object] = {}
        self.shown: dict[int, Job] = {}

    def both(self, act: Callable[[AnyRegistry], Any]) -> Any:
        """Does it on both and compares what they answer, errors and their words included."""
        answers: list[Any] = []
        for registry in (self.model, self.registry):
            try:
                answers.append(("gave", act(registry)))
            except (RegistryError, ValueError) as error:
                answers.append(("raised", type(error), str(error)))
        assert answers[0] == answers[1]
        return answers[0]

    @initialize(tries=st.integers(0, 2), running=st.integers(1, 4))
    def begin_with_a_few(self, tries: int, running: int) -> None:
        """A queue with something in it, so that few steps are spent on nothing: plain jobs, and some behind others."""
        for needs in ((), (), (), (1,), (4,), (1, 2), (3, 5)):
            wanted = submission(needs=needs, error_budget=tries, loss_budget=tries)
            self.both(lambda registry, wanted=wanted: registry.queue.submit(wanted))
        for _ in range(running):
            self.claim(cpus=1.0, lease_s=30.0, kinds=None)

    @rule(
        needs=st.lists(st.integers(1, 10), max_size=3),
        key=st.sampled_from([None, None, None, "a", "b"]),
        digest=st.sampled_from(["d1", "d2"]),
        priority=st.integers(0, 2),
        delay_s=st.sampled_from([0.0, 0.0, 20.0]),
        cpus=st.sampled_from([1.0, 2.0]),
        budgets=st.tuples(st.integers(0, 2), st.integers(0, 2)),
        time_limit_s=st.sampled_from([None, 15.0]),
    )
    def submit(self, needs: list[int], budgets: tuple[int, int], **values: Any) -> None:
        wanted = submission(needs=tuple(needs), error_budget=budgets[0], loss_budget=budgets[1], **values)
        self.both(lambda registry: registry.queue.submit(wanted))

    @rule(count=st.integers(0, 3), key=st.sampled_from([None, "a"]), needs=st.lists(Numbers, max_size=1))
    def submit_many(self, count: int, key: str | None, needs: list[int]) -> None:
        batch = [submission(key=key, needs=tuple(needs)), *[submission(name=str(at)) for at in range(count)]]
        self.both(lambda registry: registry.queue.submit_many(batch))

    @rule(cpus=st.sampled_from([1.0, 2.0]), lease_s=st.sampled_from([10.0, 30.0]), kinds=st.sampled_from([None, (), ("train",)]))
    def claim(self, cpus: float, lease_s: float, kinds: tuple[str, ...] | None) -> None:
        self.both(lambda registry: registry.queue.claim("d", cpus=cpus, gpus=0.0, memory_gb=0.0, lease_s=lease_s, kinds=kinds))

    @rule(seconds=st.sampled_from([1.0, 5.0, 10.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.pass_s(seconds)

    @precondition(lambda self: self.model.queue.live())
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        """Whoever holds a job, or held it once, does something with it."""
        fence = data.draw(st.sampled_from([job.fence for job in self.model.queue.live()]))
        self.write(fence, data.draw(st.sampled_from(sorted(WRITES))))

    @precondition(lambda self: self.model.queue.live())
    @rule(which=st.integers(0, 9), ends=st.sampled_from(["succeed", "fail", "cancelled", "lose", "release"]))
    def end_one(self, which: int, ends: str) -> None:
        running = self.model.queue.live()
        self.write(running[which % len(running)].fence, ends)

    @rule(fence=Fences, name=st.sampled_from(["beat", "succeed", "fail", "lose", "release", "log", "run"]))
    def work_of_strangers(self, fence: Fence, name: str) -> None:
        self.write(fence, name)

    def write(self, fence: Fence, name: str) -> None:
        self.both(lambda registry: WRITES[name](registry, fence))

    @rule()
    def rescue(self) -> None:
        self.both(lambda registry: registry.queue.rescue())

    @rule(job=Numbers)
    def cancel(self, job: int) -> None:
        self.both(lambda registry: registry.queue.cancel(job))

    @precondition(lambda self: self.model.queue.jobs())
    @rule(data=st.data(), count=st.integers(1, 2))
    def submit_behind(self, data: st.DataObject, count: int) -> None:
        """A job that needs others that are there, whatever became of them."""
        there = [job.id for job in self.model.queue.jobs()]
        wanted = submission(needs=tuple(data.draw(st.sampled_from(there)) for _ in range(count)))
        self.both(lambda registry: registry.queue.submit(wanted))

    @precondition(lambda self: any(not job.ended for job in self.model.queue.jobs()))
    @rule(data=st.data())
    def cancel_one_that_may(self, data: st.DataObject) -> None:
        self.cancel(data.draw(st.sampled_from([job.id for job in self.model.queue.jobs() if not job.ended])))

    @rule(job=Numbers)
    def retry(self, job: int) -> None:
        self.both(lambda registry: registry.queue.retry(job))

    @precondition(lambda self: self.model.queue.jobs(state="failed") + self.model.queue.jobs(state="cancelled"))
    @rule(data=st.data())
    def retry_one_that_may(self, data: st.DataObject) -> None:
        able = self.model.queue.jobs(state="failed") + self.model.queue.jobs(state="cancelled")
        self.retry(data.draw(st.sampled_from([job.id for job in able])))

    @rule(job=Numbers, text=st.sampled_from(["full", "no gpu"]))
    def set_reason(self, job: int, text: str) -> None:
        self.both(lambda registry: registry.queue.set_reason(job, text))

    @rule(older_than_s=st.sampled_from([0.0, 20.0, 40.0]))
    def prune(self, older_than_s: float) -> None:
        self.both(lambda registry: registry.queue.prune(older_than_s))
        left = {job.id for job in self.model.queue.jobs(limit=1000)}
        for number in self.states.keys() - left:
            del self.states[number]
            del self.ended[number]  # only what ended can have gone

    @invariant()
    def all_that_can_be_seen_is_equal(self) -> None:
        jobs = self.both(lambda registry: registry.queue.jobs(limit=1000))[1]
        self.both(lambda registry: registry.queue.waiting(1000))
        self.both(lambda registry: registry.queue.overdue(5.0))
        for job in jobs:
            if self.shown.get(job.id) != job:  # what hangs on a job changes only with its row
                self.shown[job.id] = job
                self.both(lambda registry, number=job.id: registry.queue.attempts(number))
                self.both(lambda registry, number=job.id: registry.queue.needs(number))
                if job.ended:
                    self.no_run_outlives(job)

    def no_run_outlives(self, job: Job) -> None:
        runs = self.both(lambda registry: registry.records.runs(job.id))[1]
        assert [run for run in runs if run.job == job.id and run.state is RunState.RUNNING] == []

    def teardown(self) -> None:
        for look in LAST_LOOKS:
            self.both(look)
        for job in self.shown:
            self.both(lambda registry, number=job: registry.queue.attempts(number))
            self.both(lambda registry, number=job: registry.queue.needs(number))
            self.both(lambda registry, number=job: [chunk.text for chunk in registry.queue.logs(number)])

    @invariant()
    def states_change_as_the_table_says(self) -> None:
        for job in self.model.queue.jobs(limit=1000):
            before = self.states.get(job.id, job.state)
            if before is not job.state:
                assert (before, job.state) in TRANSITIONS
                self.seen.add((before, job.state))
            self.states[job.id] = job.state
            if job.ended:
                assert self.ended.setdefault(job.id, job) == job


WRITES: dict[str, Callable[[AnyRegistry, Fence], Any]] = {
    "begin": lambda registry, fence: registry.queue.begin(fence, "n", 7),
    "begin elsewhere": lambda registry, fence: registry.queue.begin(fence, "m", 7),
    "beat": lambda registry, fence: registry.queue.beat(fence, lease_s=20.0, progress={"at": fence.attempt}),
    "succeed": lambda registry, fence: registry.queue.succeed(fence, {"x": 1}),
    "fail": lambda registry, fence: registry.queue.fail(fence, "Traceback\nValueError: no"),
    "fail for good": lambda registry, fence: registry.queue.fail(fence, "", retry=False),
    "cancelled": lambda registry, fence: registry.queue.cancelled(fence, {"step": 1}),
    "release": lambda registry, fence: registry.queue.release(fence, "the cluster is shut down"),
    "lose": lambda registry, fence: registry.queue.lose(fence, "node went away"),
    "log": lambda registry, fence: registry.queue.log(fence, "line\n"),
    "run": lambda registry, fence: _work_on_run(registry, fence, finish=None),
    "finish run": lambda registry, fence: _work_on_run(registry, fence, finish="finished"),
    "fail run": lambda registry, fence: _work_on_run(registry, fence, finish="failed"),
}

LAST_LOOKS: tuple[Callable[[AnyRegistry], Any], ...] = (
    lambda registry: registry.queue.counts(),
    lambda registry: registry.queue.live(),
    lambda registry: registry.records.runs(),
    lambda registry: registry.records.measurements(),
)


def _work_on_run(registry: AnyRegistry, fence: Fence, finish: str | None) -> Any:
    run = registry.records.open_run(fence, kind="train", spec={"a": 1})
    step = len(registry.records.curve(run.id)) + 1
    registry.records.add_points(fence, run.id, [CurvePoint(step, "loss", 1.0 / step)])
    registry.records.add_checkpoint(fence, run.id, step, f"/c/{step}", "aa")
    registry.records.measure(fence, run.id, [Measurement("tau", {"i": step % 2}, float(step))])
    if finish is not None:
        registry.records.finish_run(fence, run.id, finish, {"steps": step})
    return registry.records.run(run.id), registry.records.curve(run.id), registry.records.checkpoints(run.id)


def bounds(histories: int, steps: int, *, same_each_time: bool = False) -> settings:
    return settings(
        max_examples=histories,
        derandomize=same_each_time,
        stateful_step_count=steps,
        deadline=None,
        # Finding out which parts of a failing history matter would take longer than the test may.
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


def test_the_database_does_what_the_model_does(registry_url: str) -> None:
    migrate(registry_url)
    clock = Clock()
    with Registry.open(registry_url, now=clock) as registry:
        machine = type("Machine", (History,), {"registry": registry, "clock": clock})
        run_state_machine_as_test(machine, settings=bounds(HISTORIES, STEPS))


def test_the_histories_take_every_way_in_the_table() -> None:
    """On the model alone, which is fast, and with the same histories each time."""
    clock = Clock()

    class Machine(History):
        seen: ClassVar[set[tuple[JobState, JobState]]] = set()

        def __init__(self) -> None:
            RuleBasedStateMachine.__init__(self)
            clock.at = 1_000_000.0
            self.model = MemoryRegistry(now=clock)
            self.states, self.ended, self.shown = {}, {}, {}

        def both(self, act: Callable[[AnyRegistry], Any]) -> Any:
            try:
                return "gave", act(self.model)
            except (RegistryError, ValueError) as error:
                return "raised", error

    Machine.clock = clock
    run_state_machine_as_test(Machine, settings=bounds(80, 60, same_each_time=True))
    # Otherwise the comparison above could pass on histories in which nothing happens.
    assert Machine.seen == set(TRANSITIONS)
