"""`loop demo`: the main job once, end to end, on a stack of its own: train, probe, transfer study, a served answer."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from services.cli.output import number, say, span, table

if TYPE_CHECKING:
    from services.cli.client import Client
    from services.settings import Settings

__all__ = ["register"]

MODEL = "s3@demo"
SHOWN = ("rule", "loops", "optimum_log2_lr", "drift_octaves", "best_loss", "regret", "bracketed", "diverged")  # of the table
WORD_SYMBOLS = 5  # letters of the word that is asked: shorter than the trained length, so that halting has something to save

TRAIN: dict[str, Any] = {
    "kind": "train",
    "name": "demo: S3, T = n, lengths growing to 8",
    "task": {"kind": "word", "group": "S3"},
    "contract": {"lengths": [2, 4, 6, 8], "loops": {"kind": "proportional", "per_position": 1.0}},
}
TUNE: dict[str, Any] = {
    "kind": "tune",
    "name": "demo: does the learning rate transfer over loops?",
    "resources": {"cpus": 1},
    "rules": ["standard", "loop_mup"],
    "loops": [1, 4],
    "log2_lrs": [-3, -4, -5, -6, -7],
    "max_trials": 15,  # the grid's own: a demo has its time
    "train": {
        "task": {"kind": "text", "source": "stdlib"},
        "model": {"positions": "rope", "bos": False, "injection": "none", "readout_init": "normal"},
        "contract": {"lengths": [64]},
        "optimizer": {"decay": "linear", "warmup": 20, "betas": [0.9, 0.95], "weight_decay": 0.0},
        "batch": 16,
        "steps": 150,
        "evaluate_every": 150,
        "evaluate_on": 128,
        "checkpoint_every": 150,
    },
}


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo() -> None:
    """The main job once, on a stack of its own: train, probe, transfer study, a served answer. Writes HOME/demo.json."""
    from services.cli.client import open_client, open_inference

    started = time.monotonic()
    with _stack() as settings:
        client = open_client(settings)
        jobs = _submit(client)
        say(f"queued {len(jobs)} jobs: {', '.join(f'{name} {job}' for name, job in jobs.items())}")
        results = {name: _wait(client, job)["result"] for name, job in jobs.items() if name != "tune"}
        answer = _ask(open_inference(settings))
        results["tune"] = _wait(client, jobs["tune"])["result"]
        found = _findings(jobs, results, answer)
        path = settings.home / "demo.json"
        path.write_text(json.dumps(found, indent=2) + "\n")
        pictures = _pictures(settings, jobs)
    _summary(found, results, path, pictures, time.monotonic() - started)


@contextmanager
def _stack() -> Iterator[Settings]:
    """A stack for the demo, on other ports where the usual ones are taken; it is ended again, unless it was up before."""
    from services.settings import Settings
    from services.stack import control, ports, state

    settings = Settings.load()
    if state.read(settings) is not None:
        say(f"using the stack of {settings.home} that is up")
        yield settings
        return
    for name in ("api", "inference"):
        host, port = getattr(settings, f"{name}_host"), getattr(settings, f"{name}_port")
        variable = f"LOOP_{name.upper()}_PORT"
        if variable not in os.environ and not ports.is_free(host, port):
            os.environ[variable] = str(ports.free_port_near(host, port) or port)
    settings = Settings.load()
    say(f"starting a stack in {settings.home}")
    control.up_detached(settings, note=say)
    try:
        yield settings
    finally:
        say("stopping it")
        control.down(settings)


def _submit(client: Client) -> dict[str, int]:
    """Queues everything at once: what needs another job's result waits for it in the queue."""
    from services import provenance

    where_from = provenance.collect()

    def queue(spec: dict[str, Any], after: tuple[int, ...] = (), priority: int = 0) -> int:
        body = {"spec": spec, "after": after, "priority": priority, "provenance": where_from}
        return client.post("/v1/jobs", body)["job"]["id"]

    jobs = {"train": queue(TRAIN, priority=1)}
    jobs["probe"] = queue({"kind": "probe", "name": "demo: frontier, tau, halting", "job": jobs["train"]}, priority=1)
    register = {"kind": "register", "name": "demo", "job": jobs["train"], "probe": jobs["probe"], "model": MODEL}
    jobs["register"] = queue(register, priority=1)
    jobs["serve"] = queue({"kind": "serve", "name": "demo", "model": MODEL}, after=(jobs["register"],), priority=1)
    jobs["tune"] = queue(TUNE)
    return jobs


def _wait(client: Client, job: int) -> dict[str, Any]:
    from services.cli.waiting import ending, wait_for

    started = time.monotonic()
    found = wait_for(client, job)
    failure = ending(found)
    if failure is not None:
        raise failure
    say(f"job {job} {found['kind']}: done after {span(time.monotonic() - started)} of waiting")
    return found


def _ask(inference: Client) -> dict[str, Any]:
    """One request over HTTP, and the answer that the group itself gives."""
    from loopcore.specs import WordTask
    from loopcore.tasks import WordProblem

    words = WordProblem(WordTask(group="S3"))
    drawn = words.random_batch(seed=20_261, split="held_out", index=0, size=1, length=WORD_SYMBOLS)
    word = words.decode(drawn.tokens[0].tolist())
    answer = inference.post(f"/v1/models/{MODEL}/predict", {"inputs": word})
    return {"word": word, "right": words.decode(words.answer(words.encode(word))), **answer}


def _findings(jobs: dict[str, int], results: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    probe = results["probe"]
    return {
        "v": probe["v"],
        "v_low": probe["v_low"],
        "v_high": probe["v_high"],
        "r2": probe["r2"],
        "accuracy": results["train"]["token_accuracy"],
        "word": answer["word"],
        "answer": answer["outputs"],
        "answer_right": answer["outputs"] == answer["right"],
        "loops_used": answer["loops_used"],
        "loops_planned": answer["loops_planned"],
        "loops_budget": answer["loops_budget"],
        "jobs": jobs,
        "transfer": results["tune"]["table"],
    }


def _pictures(settings: Settings, jobs: dict[str, int]) -> list[Path]:
    """The figures that the jobs made, gathered in one folder."""
    folder = settings.home / "demo"
    folder.mkdir(exist_ok=True)
    made = [figure for job in jobs.values() for figure in sorted((settings.artifacts / f"job-{job}").rglob("*.png"))]
    return [Path(shutil.copy(figure, folder / figure.name)) for figure in made]


def _summary(found: dict[str, Any], results: dict[str, Any], path: Path, pictures: list[Path], seconds: float) -> None:
    right = "right" if found["answer_right"] else "WRONG"
    speed = f"{number(found['v'])} positions a loop ({number(found['v_low'])} to {number(found['v_high'])})"
    planned, budget = found["loops_planned"], found["loops_budget"]
    print(f"""
S3 word problem, one block, T = n
  held-out accuracy  {found["accuracy"]:.4f} at length 8 after {results["train"]["steps"]} steps
  speed v            {speed}, R2 {number(found["r2"])}: one position a loop is the contract
  served answer      {found["word"]}  ->  {found["answer"]}  ({right})
                     {found["loops_used"]} loops; planned ceil(n / v) + burn-in = {planned}; a fixed budget: {budget}

Learning-rate transfer, bytes of the Python standard library (one seed at a small size: a first look, not a finding)""")
    rows = found["transfer"]
    table(SHOWN, [[number(row[column]) for column in SHOWN] for row in rows])
    print(f"\nWritten in {span(seconds)}: {path}")
    for picture in pictures:
        print(f"  {picture}")
    print(f"""
What to open next
  loop up --detach                                             the same stack, to stay
  loop jobs; loop job {found["jobs"]["train"]}; loop logs {found["jobs"]["train"]}
  mlflow ui --backend-store-uri sqlite:///{path.parent / "mlflow.db"}""")
