"""Compilation of kernels by numba: once on a machine, however many processes need one at the same time.

numba keeps compiled kernels in a cache on disk. Processes that start together (ranks of a job, workers of tests) all find it
empty, though, and would all compile the same for a minute. Here the first one keeps a lock meanwhile; the others wait and load.

numba's cache notices changes of a kernel's own file and of enclosed values only. A kernel whose code comes from other files as
well therefore encloses their `stamp_of`.

What every command needs is compiled when the package is built (`tools/kernels.py`), for any processor of the architecture.
It is taken where Python, numba and the kernel's sources are those of the build; else a kernel is compiled on its first use.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock

from rlplace.files import locked

PATIENCE_S = 300.0
"""Seconds for which a process waits while another process compiles, before it compiles as well."""

AHEAD = Path(__file__).with_name("kernels")
"""Where kernels lie that were compiled when the package was built."""


ENTRIES: list[Any] = []
"""Every kernel that Python calls, of the modules imported so far."""


class Ahead(FunctionCache):
    """Kernels compiled when the package was built: known by what their file holds, not by its age."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        source = zlib.crc32(Path(inspect.getfile(function)).read_bytes())
        # Without the line, so that an edit overwrites the kernel of before.
        name = f"{function.__module__}.{function.__name__}.{sys.implementation.cache_tag}"
        self._cache_file = IndexDataCacheFile(str(AHEAD), name, source)
        _forgive(self._cache_file)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        signature, (architecture, *_), code = super()._index_key(sig, codegen)
        return signature, architecture, code


class _Kept(FunctionCache):
    """Kernels compiled on this machine, or else ahead."""

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super()._load_overload(sig, target_context)
        return Ahead(self._py_func).load_overload(sig, target_context) if found is None else found


def entry(function: Any = None, *, nogil: bool = False) -> Any:
    """Decorates a function that Python calls: compiled on its first call, or loaded from the cache.

    Args:
        function: Function to compile.
        nogil: Whether other threads may run meanwhile.
    """
    if function is None:
        return lambda function: entry(function, nogil=nogil)
    kernel = njit(nogil=nogil, error_model="numpy", no_cfunc_wrapper=True)(function)
    kernel._cache = _Kept(function)
    lock = Path(kernel._cache.cache_path) / f"{kernel._cache._impl.filename_base}.lock"
    compile_now = kernel.compile
    _forgive(kernel._cache._cache_file)

    def compile_once(signature: Any) -> Any:
        with contextlib.suppress(OSError):  # without a place for a lock there is none for a cache
            lock.parent.mkdir(parents=True, exist_ok=True)
            lock.touch()
        # Threads of this process queue at numba's own lock, so that none holds the file's while it waits for that one.
        with global_compiler_lock, locked(lock, patience_s=PATIENCE_S):
            return compile_now(signature)  # which first looks into the cache

    kernel.compile = compile_once
    ENTRIES.append(kernel)
    return kernel


def _forgive(index: Any) -> None:
    """Lets an index that names classes of older sources count as empty; numba reads it before it checks its age."""
    load = index._load_index

    def load_index() -> Any:
        try:
            return load()
        except Exception:  # whatever reading a pickle of other sources may raise
            return {}

    index._load_index = load_index


def inner(function: Any = None, *, fastmath: bool = False, forceinline: bool = False) -> Any:
    """Decorates a function that only compiled functions call: it becomes a part of them, without wrappers, and is not cached.

    Args:
        function: Function to compile.
        fastmath: Whether sums may be reordered.
        forceinline: Whether it is inlined in its callers against LLVM's own choice.
    """
    if function is None:
        return lambda function: inner(function, fastmath=fastmath, forceinline=forceinline)
    # A division by zero cannot happen, so no code for its error, and only kernels call these: both shorten the compilation.
    options = {"fastmath": fastmath, "forceinline": forceinline, "error_model": "numpy"}
    return njit(**options, no_cfunc_wrapper=True, no_cpython_wrapper=True)(function)


def stamp_of(*modules: ModuleType) -> int:
    """Hashes the content of modules that compiled code comes from; entries enclose the result."""
    return zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in modules))


def is_compiled(kernel: Any) -> bool:
    """Returns whether an entry was compiled, ahead or by any process of this machine, for any arguments, since its file
    changed.
    """
    here = kernel.signatures or kernel._cache._cache_file._load_index()
    return bool(here or Ahead(kernel.py_func)._cache_file._load_index())
