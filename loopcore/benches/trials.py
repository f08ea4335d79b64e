"""A process of trials: `python -m loopcore.benches.trials` trains what the first line of its input says, as far as others say.

That line is JSON, {"specs": [...], "packed": bool, "device": name}; every further line is a number of steps, and after them it
answers with the seconds they took. One thread, as the trials of a search have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import IO

from loopcore.specs.train import TrainSpec

__all__ = ["Trials", "order"]


def order(specs: Sequence[TrainSpec], *, packed: bool, device: str) -> str:
    """The first line: train these as one population, or one after another."""
    return json.dumps({"specs": [spec.resolved() for spec in specs], "packed": packed, "device": device}) + "\n"


class Trials:
    """Such a process. Ends with the context it is used in, whatever happens there."""

    def __init__(self, specs: Sequence[TrainSpec], *, packed: bool, device: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loopcore.benches.trials"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._write(order(specs, packed=packed, device=device))

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._process.kill()
        self._process.communicate()

    def begin(self, steps: int) -> None:
        """Asks for `steps` of every trial; `seconds` gives the answer."""
        self._write(f"{steps}\n")

    def seconds(self) -> float:
        """Seconds that the steps asked for took. Raises RuntimeError for a process that ended."""
        answer = _pipe(self._process.stdout).readline()
        if not answer:
            raise RuntimeError(f"the process of trials ended with exit code {self._process.wait()}")
        return float(answer)

    def _write(self, line: str) -> None:
        pipe = _pipe(self._process.stdin)
        pipe.write(line)
        pipe.flush()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "the process was started with pipes"
    return pipe


def main() -> None:
    """The process."""
    import torch

    from loopcore.device import resolve_device, seconds_of
    from loopcore.population import Population
    from loopcore.training import Training

    torch.set_num_threads(1)
    asked = json.loads(sys.stdin.readline())
    specs = [TrainSpec.model_validate(spec) for spec in asked["specs"]]
    device = asked["device"]
    runs = [Population(specs, device=device)] if asked["packed"] else [Training(spec, device=device) for spec in specs]
    for line in sys.stdin:
        steps = int(line)

        def work(steps: int = steps) -> None:
            for run in runs:
                for _ in range(steps):
                    run.step()

        sys.stdout.write(f"{seconds_of(work, resolve_device(device))!r}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
