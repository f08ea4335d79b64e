"""One process of the race tests: claims and finishes jobs until none is left.

    python -m tests.integration.queue_worker URL NAME LEASE_S [CLAIMS]

Says `ready` and waits for a line on standard input, so that all begin together. At the end it prints what it claimed as JSON:
`{"claimed": [[job, attempt], ...], "lost": [...]}`. With CLAIMS it says `holding JOB` after that many and then
does nothing. Any error of the database ends it with a traceback and exit code 1.
"""

from __future__ import annotations

import json
import sys
import time

from services.registry import LeaseLost, Registry


def main(url: str, name: str, lease_s: float, claims: int | None = None) -> None:
    claimed: list[tuple[int, int]] = []
    lost: list[tuple[int, int]] = []
    with Registry.open(url) as registry:
        print("ready", flush=True)
        sys.stdin.readline()
        while True:
            job = registry.queue.claim(name, cpus=1.0, gpus=0.0, memory_gb=0.0, lease_s=lease_s)
            if job is None:
                registry.queue.rescue()
                if registry.queue.waiting(1):
                    continue
                if not registry.queue.live():
                    break
                time.sleep(0.05)
                continue
            claimed.append((job.id, job.attempt))
            if len(claimed) == claims:
                print(f"holding {job.id}", flush=True)
                time.sleep(3600)
            try:
                registry.queue.succeed(job.fence, {"by": name})
            except LeaseLost:
                lost.append((job.id, job.attempt))
    print(json.dumps({"claimed": claimed, "lost": lost}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), *map(int, sys.argv[4:]))
