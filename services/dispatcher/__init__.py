"""Gives queued jobs to the cluster: `python -m services.dispatcher`. Importing the package loads neither Ray nor torch."""
