"""Triton's interpreter without what it repeats.

Before a kernel runs, the interpreter exchanges the functions of triton.language, and looks at every name in it to find them. It
does so again in each call of a function inside the kernel, where there is nothing left to exchange: a quarter of all its time.
And it makes a table of all its dtypes whenever it looks one up.
"""

from functools import cache

import triton.language as tl
from triton.runtime import interpreter


@cache
def languages(fn):
    """Which of the modules that are exchanged a kernel, or a function inside it, refers to."""
    return frozenset(i for i, lang in enumerate((tl, tl.core)) if any(value is lang for value in fn.__globals__.values()))


def exchange_once(patch):
    """``patch``, Triton's own, where a module was not yet exchanged in this launch. Its scope ends with the launch."""
    done = set()

    def patch_lang(fn):
        outermost = not done
        if done and languages(fn) <= done:
            return None  # of a function inside a kernel, which restores nothing
        scope = patch(fn)
        done.update(languages(fn))
        if outermost:
            restore = scope.restore

            def last():
                done.clear()
                restore()

            scope.restore = last
        return scope

    return patch_lang


def remembered(np_dtype):
    """``np_dtype``, Triton's own; that of a block is that of its elements."""
    found = {}

    def of(dtype):
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if type(element) is not tl.dtype:  # a pointer
            return np_dtype(dtype)
        if element.name not in found:
            found[element.name] = np_dtype(element)
        return found[element.name]

    return of


def speed_up():
    if hasattr(interpreter, "_LangPatchScope"):  # its name of today; elsewhere it is only slower
        interpreter._patch_lang = exchange_once(interpreter._patch_lang)
        interpreter._get_np_dtype = remembered(interpreter._get_np_dtype)
