"""Work on rules ahead of the one that takes the results, in order and in bounded memory.

Reading, hashing and casting leave Python's lock, so threads overlap them with writing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor


def in_order[Item, Result](
    function: Callable[[Item], Result], items: Sequence[Item], *, workers: int
) -> Iterator[Result]:
    """`map(function, items)`, with workers - 1 threads that run ahead of the one that takes the results.

    Args:
        function: of one item.
        items: in the order of the results.
        workers: how many results, or items worked on, exist at once.
    """
    if workers == 1:
        yield from map(function, items)
        return
    ahead = workers - 1
    with ThreadPoolExecutor(ahead) as pool:
        pending: deque[Future[Result]] = deque(pool.submit(function, item) for item in items[:ahead])
        for following in range(ahead, len(items) + ahead):
            if not pending:
                return
            result = pending.popleft().result()
            if following < len(items):
                pending.append(pool.submit(function, items[following]))
            yield result
            del result
