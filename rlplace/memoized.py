"""Results that are cached as long as the objects they were computed from."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def memoized(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a function of a `Problem` or `Links`, and of hashable arguments: equal calls compute the result once.

    The result must not refer to the problem, or neither would ever be freed.
    """
    results: WeakKeyDictionary[Any, dict[tuple[Any, ...], Result]] = WeakKeyDictionary()

    @wraps(function)
    def wrapped(owner: Any, *arguments: Any) -> Result:
        known = results.setdefault(owner, {})
        if arguments not in known:
            known[arguments] = function(owner, *arguments)  # type: ignore[call-arg]
        return known[arguments]

    wrapped.results = results  # type: ignore[attr-defined]
    return wrapped  # type: ignore[return-value]
