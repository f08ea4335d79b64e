"""The HTTP API: `python -m services.api` serves it, `services.api.app.create_app` builds it."""
