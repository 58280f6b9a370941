"""Fair shares: queues that take turns among clients, and how much one of them may take.

It does not know what is shared: rows, threads, or methods to compile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

MAX_WAITING = 128  # calls that wait for a thread of Workers

Item = TypeVar("Item")
Result = TypeVar("Result")


class QueueFull(Exception):
    """Too much waits already, of this client or of all."""


def fits(new: int, mine: int, others: int, limit: int) -> bool:
    """Whether a client that has ``mine`` of a limit may have ``new`` more.

    It gets at most half of what the others leave free. So something is left for the next client,
    however much the first ones ask for.
    """
    if mine + others + new > limit:
        return False
    return mine + new <= max(1, (limit - others) // 2)


class RoundRobinQueue(Generic[Item]):
    """A queue that gives each client one item in turn; a client's own items keep their order."""

    def __init__(self):
        self._queues: dict[Hashable, deque[Item]] = {}  # the client whose turn it is comes first

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def count(self, client: Hashable) -> int:
        """How many items of a client wait."""
        return len(self._queues.get(client, ()))

    def extend(self, client: Hashable, items: Iterable[Item]) -> None:
        """Adds items of a client, behind its others."""
        self._queues.setdefault(client, deque()).extend(items)

    def pop(
        self, allowed: Callable[[Hashable], bool] = lambda client: True
    ) -> tuple[Hashable, Item]:
        """Removes the next item of an allowed client, whose turn it is.

        Returns:
          The client and the item; its client's next one waits for the other clients' turns.

        Raises:
          LookupError: no allowed client has an item.
        """
        client = next((client for client in self._queues if allowed(client)), None)
        if client not in self._queues:
            raise LookupError("no client's turn")
        queue = self._queues.pop(client)
        item = queue.popleft()
        if queue:
            self._queues[client] = queue
        return client, item

    def drop(self, unwanted: Callable[[Item], bool]) -> int:
        """Removes all unwanted items; returns their number."""
        before = len(self)
        for client, queue in list(self._queues.items()):
            staying = deque(item for item in queue if not unwanted(item))
            if staying:
                self._queues[client] = staying
            else:
                del self._queues[client]
        return before - len(self)


class FairSemaphore:
    """A semaphore for coroutines of one event loop; clients take turns.

    A client has at most half of the places that the others leave free, so that one which uses its
    places for long does not keep the others waiting.

    Args:
      size: coroutines that have a place at the same time.
      max_waiting: coroutines that may wait for one.
    """

    def __init__(self, size: int, max_waiting: int):
        self._size = size
        self._max_waiting = max_waiting
        self._waiting: RoundRobinQueue[asyncio.Future] = RoundRobinQueue()
        self._running: Counter[Hashable] = Counter()

    @contextlib.asynccontextmanager
    async def place(self, client: Hashable) -> AsyncIterator[None]:
        """Waits for a place, which is free again after the block.

        Raises:
          QueueFull: too many wait.
        """
        if self._may_run(client):
            self._running[client] += 1
        else:
            await self._wait(client)
        try:
            yield
        finally:
            self._leave(client)

    def _may_run(self, client: Hashable) -> bool:
        mine = self._running[client]
        return fits(1, mine, self._running.total() - mine, self._size)

    async def _wait(self, client: Hashable) -> None:
        mine = self._waiting.count(client)
        if not fits(1, mine, len(self._waiting) - mine, self._max_waiting):
            raise QueueFull
        turn = asyncio.get_running_loop().create_future()
        self._waiting.extend(client, [turn])
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had been given the place already
                self._leave(client)
            raise

    def _leave(self, client: Hashable) -> None:
        """Frees a client's place, and gives free places to those that wait."""
        self._running[client] -= 1
        self._running += Counter()  # drops clients that have none
        while len(self._waiting):
            try:
                client, turn = self._waiting.pop(self._may_run)
            except LookupError:
                return
            if not turn.done():
                self._running[client] += 1
                turn.set_result(None)


class Workers:
    """Threads for what takes too long for the event loop; clients take turns.

    Args:
      size: the number of threads.
      name: theirs.
    """

    def __init__(self, size: int, name: str):
        self._places = FairSemaphore(size, MAX_WAITING)
        self._threads = ThreadPoolExecutor(size, name)

    async def run(self, client: Hashable, function: Callable[..., Result], *args: Any) -> Result:
        """What the function returns, which a thread calls when it is the client's turn.

        Raises:
          QueueFull: too much waits, of this client or of all.
        """
        async with self._places.place(client):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, function, *args)
