"""Triton's interpreter without what it does again and again, which is half the time of the tests of kernels.

A launch puts its own functions in the place of the language's. Each call of a function inside a kernel looks through
all of the language for them once more, where they are there already; and whoever asks for the type of an array has a
table of all types made for that.
"""

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_NAMES = ("_LangPatchScope", "_get_np_dtype", "_patch_attr", "_patch_builtin", "_patch_lang")
_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # as a kernel that names both of its modules


def spare_repetitions() -> None:
    """Makes a launch replace the language's functions once. A Triton that is built otherwise stays as it is."""
    if not all(hasattr(interpreter, name) for name in _NAMES):
        return
    numpy_dtype = interpreter._get_np_dtype
    of_scalars, of_pointers = functools.cache(numpy_dtype), numpy_dtype(tl.pointer_type(tl.int8))
    replace, replace_one = interpreter._patch_lang, interpreter._patch_attr
    launch: Any = interpreter._LangPatchScope()  # has no changes once it is restored

    @functools.cache
    def builtins(owner: object) -> list[tuple[str, object]]:
        return [(name, member) for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]

    def replace_builtins(owner: object, builder: object, scope: object) -> None:
        for name, member in builtins(owner):
            replace_one(owner, name, member, builder, scope)

    def replace_language(function: object) -> Any:
        nonlocal launch
        if not launch._changes:
            launch = replace(_LANGUAGE)
        return launch

    def array_dtype(dtype: tl.dtype) -> object:
        return of_pointers if dtype.scalar.is_ptr() else of_scalars(dtype.scalar)

    interpreter._get_np_dtype = array_dtype
    interpreter._patch_builtin = replace_builtins
    interpreter._patch_lang = replace_language
