"""`python -m services.api`: serves the API for the settings at hand, until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
import sys

import uvicorn

from services.api.app import create_app
from services.settings import Settings, SettingsError


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = Settings.load()
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    uvicorn.run(
        create_app(settings),
        host=settings.api_host,
        port=settings.api_port,
        log_config=None,
        access_log=False,  # the command line polls; what goes wrong is logged by the application
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
