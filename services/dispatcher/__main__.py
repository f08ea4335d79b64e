"""`python -m services.dispatcher`: one dispatcher for the settings at hand, until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

import stamina
import structlog

from services.dispatcher.loop import Dispatcher
from services.registry import SchemaTooNew, SchemaTooOld
from services.settings import Settings, SettingsError
from services.stack.state import GIVE_BACK_S

SIGNALS = {signal.SIGTERM, signal.SIGINT}
STOP_S = 8.0  # seconds that a turn which has begun may still take; where the cluster ends too, jobs get theirs on top


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
    # Taken by a thread that waits for them: this one may be waiting for a cluster that is gone, and Ray sets handlers of its
    # own. Blocked signals also outlast `_start_anew`.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        dispatcher = Dispatcher(Settings.load(), start_anew=_start_anew)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    threading.Thread(target=_listen, args=[dispatcher], name="signals", daemon=True).start()
    try:
        dispatcher.run()
    except (SchemaTooNew, SchemaTooOld) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    _exit()
    return 0


def _listen(dispatcher: Dispatcher) -> None:
    signal.sigwait(SIGNALS)
    dispatcher.stop()
    time.sleep(STOP_S + (GIVE_BACK_S if dispatcher.cluster_ends else 0.0))
    _exit()


def _exit() -> None:
    """Without Ray's own goodbye, which would wait for a cluster that may be gone; nothing here is worth saving."""
    sys.stderr.flush()
    os._exit(0)


def _start_anew() -> None:
    sys.stderr.flush()
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606  (this very command, by its own arguments)


if __name__ == "__main__":
    sys.exit(main())
