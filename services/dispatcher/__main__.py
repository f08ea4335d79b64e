"""`python -m services.dispatcher`: one dispatcher for the settings at hand, until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
import os
import signal
import sys

import stamina
import structlog

from services.dispatcher.loop import Dispatcher
from services.registry import SchemaTooNew, SchemaTooOld
from services.settings import Settings, SettingsError


def main() -> int:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    stamina.instrumentation.set_on_retry_hooks(())  # the loop says itself what is away
    try:
        dispatcher = Dispatcher(Settings.load(), start_anew=_start_anew)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2

    def listen() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: dispatcher.stop())

    listen()
    try:
        dispatcher.run(connected=listen)
    except (SchemaTooNew, SchemaTooOld) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _start_anew() -> None:
    sys.stderr.flush()
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606  (this very command, by its own arguments)


if __name__ == "__main__":
    sys.exit(main())
