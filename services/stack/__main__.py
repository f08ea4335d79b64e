"""`python -m services.stack`: the supervisor in the background. Tells how it goes on the pipe that LOOP_READY_FD names."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from services.settings import Settings, SettingsError
from services.stack.control import READY_FD
from services.stack.state import StackError
from services.stack.supervisor import Supervisor


def main() -> int:
    handle = os.environ.pop(READY_FD, None)
    if handle is not None:
        os.set_inheritable(int(handle), False)  # or the parts would keep the pipe open
    pipe = open(int(handle), "w") if handle is not None else None  # noqa: PTH123, SIM115

    def tell(what: dict[str, Any]) -> None:
        nonlocal pipe
        if pipe is None:
            return
        try:
            pipe.write(json.dumps(what) + "\n")
            pipe.flush()
            if "note" not in what:
                pipe.close()
                pipe = None
        except (BrokenPipeError, ValueError):
            pipe = None  # nobody waits any more

    def log(text: str) -> None:
        sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {text}\n")

    def note(text: str) -> None:
        log(text)
        tell({"note": text})

    try:
        Supervisor(Settings.load(), note=note).run(lambda state: tell({"ready": state}))
    except (SettingsError, StackError) as error:
        code = error.exit_code if isinstance(error, StackError) else 2
        log(str(error))
        tell({"error": str(error), "exit_code": code})
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
