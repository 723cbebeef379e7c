"""SIGTERM and SIGUSR1 as requests that the loop answers at the end of a step."""

import signal
from types import FrameType, TracebackType
from typing import Any, Optional


class Requests:
    """While entered: SIGTERM asks to save and stop, SIGUSR1 to save and go on. Handlers only set a flag."""

    def __init__(self) -> None:
        self.stop = False
        self.save = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Requests":
        for number in (signal.SIGTERM, signal.SIGUSR1):
            try:
                self._previous[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: whoever runs us there handles signals
                break
        return self

    def __exit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def take(self) -> tuple[bool, bool]:
        """(stop, save) so far; the request to save is answered by this."""
        save, self.save = self.save, False
        return self.stop, save

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        if number == signal.SIGTERM:
            self.stop = True
        else:
            self.save = True
