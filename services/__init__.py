"""Processes that people and programs talk to, and what those share: the registry, tracking, settings."""
