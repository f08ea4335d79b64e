"""The local stack: Ray, dispatcher and API as processes of one supervisor. `python -m services.stack` is that supervisor."""
