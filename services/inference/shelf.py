"""Which models are up: what is wanted, what is in memory, and how one version takes over from another.

The shelf belongs to one event loop. Files are read in threads; what is up changes in a single step of the loop, so that a
request sees either the old version or the new one, and whoever has been given an engine can still hand it words in that step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from services.inference.limits import Limits
from services.inference.sources import Found, Models

if TYPE_CHECKING:
    from services.inference.loaded import Loaded

__all__ = ["FOLLOW_S", "NotServed", "Shelf", "State", "Unusable"]

FOLLOW_S = 2.0  # seconds between two looks at what is wanted
AGAIN_S = 30.0  # seconds after which a version that could not be loaded is tried again
ASIDE_S = 0.5  # seconds that must lie between looks made because somebody asked for an unknown model
DRAIN_S = 10.0  # seconds that requests under way have at the end of the process

State = Literal["ready", "asleep", "failed"]

log = logging.getLogger("inference")


class NotServed(LookupError):
    """Nobody asked the service to have this model up; `known` are the others."""

    def __init__(self, model: str, known: list[str], why: str | None) -> None:
        super().__init__(model)
        self.model, self.known, self.why = model, known, why


class Unusable(Exception):
    """A model that is wanted and cannot be had; the message says why."""


@dataclass
class Place:
    """A model that is wanted."""

    found: Found | str
    failed: tuple[Found, str] | None = None
    """A version that could not be loaded, and why."""
    failed_at: float = 0.0
    """When, by the event loop's clock."""


class Shelf:
    """Models by `name@alias`."""

    def __init__(self, models: Models, limits: Limits, *, load: Callable[[Found, Limits], Loaded] | None = None) -> None:
        self._models, self._limits = models, limits
        self._load = load
        self._places: dict[str, Place] = {}
        self._up: OrderedDict[str, Loaded] = OrderedDict()  # the one used last stands last
        self._draining: list[Loaded] = []
        self._change = asyncio.Lock()
        self._looked_at = float("-inf")
        self._follower: asyncio.Task[None] | None = None
        self._closed = False
        self._known = False
        self.problem: str | None = "it has not looked at what is to be served yet"
        """Why the last look at what is wanted did not succeed."""

    @property
    def ready(self) -> bool:
        """Whether it knows what is wanted and takes requests."""
        return self._known and not self._closed

    @property
    def names(self) -> list[str]:
        """Every model that is wanted."""
        return sorted(self._places)

    @property
    def up(self) -> list[Loaded]:
        """Models in memory."""
        return list(self._up.values())

    def state(self, model: str) -> tuple[State, Found | None, str | None]:
        """How a wanted model stands: its version, and why it failed. Raises NotServed."""
        place = self._place(model)
        held = self._up.get(model)
        if held is not None:
            return "ready", held.found, place.failed[1] if place.failed else None
        if isinstance(place.found, str):
            return "failed", None, place.found
        if place.failed is not None:
            return "failed", place.failed[0], place.failed[1]
        return "asleep", place.found, None

    async def open(self) -> None:
        """Brings up what is wanted, then follows it. What cannot be had keeps nothing else from coming up."""
        await self.follow()
        self._follower = asyncio.create_task(self._keep_following())

    async def close(self) -> None:
        """Lets requests under way end, then forgets everything."""
        self._closed = True
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower
        for model in list(self._up):
            self._take_down(model)
        await asyncio.gather(*(asyncio.to_thread(held.engine.join, DRAIN_S) for held in self._draining))

    async def get(self, model: str) -> Loaded:
        """The version that answers now; one that sleeps is woken. Raises NotServed and Unusable."""
        held = self._up.get(model)
        if held is None:
            held = await self._fetch(model)
        self._up.move_to_end(model)
        return held

    async def notice(self, model: str) -> None:
        """Looks at what is wanted before a name counts as unknown, but not at every request for one."""
        if model not in self._places and asyncio.get_running_loop().time() - self._looked_at > ASIDE_S:
            await self.follow()

    async def follow(self) -> None:
        """Looks at what is wanted, and makes it so. Where that cannot be told, everything stays as it is."""
        async with self._change:
            self._looked_at = asyncio.get_running_loop().time()
            try:
                wanted = await asyncio.to_thread(self._models.wanted)
            except Exception as error:
                if self.problem != str(error):
                    log.warning("cannot tell what is to be served: %s", error)
                self.problem = str(error) or type(error).__name__
                return
            self.problem, self._known = None, True
            for model in [model for model in self._places if model not in wanted]:
                self._take_down(model)
                del self._places[model]
            for model, found in wanted.items():
                place = self._places.setdefault(model, Place(found))
                place.found = found
                await self._refresh(model, place)

    async def _refresh(self, model: str, place: Place) -> None:
        held = self._up.get(model)
        if isinstance(place.found, str):
            self._take_down(model)
        elif held is not None and held.found != place.found:
            with contextlib.suppress(Unusable):  # the old version stays up
                await self._bring_up(model, place, place.found)
        elif held is None and len(self._up) < self._limits.models:
            with contextlib.suppress(Unusable):
                await self._bring_up(model, place, place.found)

    async def _keep_following(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                await self.follow()
            except Exception:
                log.exception("a look at what is to be served failed")

    async def _fetch(self, model: str) -> Loaded:
        """Wakes a model, or finds out that it has come to be wanted since the last look."""
        await self.notice(model)
        if not self._known:
            raise Unusable(f"the service does not know yet what it is to serve: {self.problem}")
        async with self._change:
            held = self._up.get(model)  # another request may have woken it
            if held is not None:
                return held
            place = self._place(model)
            if isinstance(place.found, str):
                raise NotServed(model, [name for name in self.names if name != model], place.found)
            return await self._bring_up(model, place, place.found)

    def _place(self, model: str) -> Place:
        try:
            return self._places[model]
        except KeyError:
            raise NotServed(model, self.names, None) from None

    async def _bring_up(self, model: str, place: Place, found: Found) -> Loaded:
        """Loads the version found, and puts it in the place of the one that is up. Raises Unusable. Hold the lock."""
        now = asyncio.get_running_loop().time()
        if place.failed is not None and place.failed[0] == found and now - place.failed_at < AGAIN_S:
            raise Unusable(place.failed[1])
        if self._closed:
            raise Unusable("the service is shutting down")
        if self._load is None:
            from services.inference.loaded import bring_up  # loads torch

            self._load = bring_up
        try:
            loaded = await asyncio.to_thread(self._load, found, self._limits)
        except Exception as error:
            log.exception("cannot bring up %s version %s", found.model, found.version)
            place.failed_at = now
            place.failed = (found, f"{found.model} version {found.version} cannot be brought up: {error}")
            raise Unusable(place.failed[1]) from error
        place.failed = None
        self._take_down(model)
        self._up[model] = loaded
        while len(self._up) > self._limits.models:
            self._take_down(next(iter(self._up)))
        log.info("%s version %s is up", found.model, found.version)
        return loaded

    def _take_down(self, model: str) -> None:
        """Takes a model out of memory once the words that it holds have their answers."""
        held = self._up.pop(model, None)
        self._draining = [old for old in self._draining if not old.engine.join(0.0)]
        if held is not None:
            held.engine.close()
            self._draining.append(held)
