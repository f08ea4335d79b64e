"""What runs inside a job's process: one file a kind of job, each with `run(held) -> dict`, under the lease of `workers.lease`."""
