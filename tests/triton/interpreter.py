"""Triton's interpreter without what it repeats.

Before a kernel runs, the interpreter exchanges the functions of triton.language, and looks at every name in it to find them. It
does so again in each call of a function inside the kernel, where there is nothing left to exchange. And for each value it makes
a type, its name and its shape anew, asks several times which type two of them have together, and interprets four more
operations to see whether a sum of integers overflows: more than half of all its time.

And with what it lacks: e4m3 scales of a scaled product.
"""

import inspect
from functools import cache

import numpy as np
import torch
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

PLAIN = frozenset((int, float, bool, str, type(None), tl.dtype, tl.pointer_type, tl.block_type, tl.tensor))


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


def unwrapped(unwrap):
    def of(value):
        return value if type(value) in PLAIN else value.value if type(value) is tl.constexpr else unwrap(value)

    return of


def typed(make):
    """A block's type: of those with the same elements and shape all but the element's type is shared; shapes are, too."""
    found, shapes = {}, {}

    def init(self, element_ty, shape):
        key = element_ty.name, *(s.value if type(s) is tl.constexpr else s for s in shape)
        if key not in found:
            make(self, element_ty, shape)
            self.shape = shapes.setdefault(key[1:], self.shape)
            self.of_tensors = shapes_of_tensor(self.shape)
            found[key] = vars(self)
        vars(self).update(found[key], element_ty=element_ty)

    return init


@cache
def counted(*shape):
    return tl.constexpr(int(np.prod(shape))), tl.tuple([tl.constexpr(s) for s in shape])


def shapes_of_tensor(shape):
    return counted(*shape)


def tensor_init(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.of_tensors if type.is_block() else counted()


def same_name(eq):
    def of(self, other):
        return self.name == other.name if type(self) is type(other) is tl.dtype else eq(self, other)

    return of


def once_for_types(computed):
    """The type that two have together."""
    found = {}

    def of(self, a, a_is_scalar, b, b_is_scalar, div_or_mod):
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in found:
            found[key] = computed(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return found[key]

    return of


def where_shapes_differ(broadcast):
    def of(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        same = a.shape is b.shape if a.is_block() and b.is_block() else a.is_block() == b.is_block()
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    return of


OPS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def sanitize(self, lhs, rhs, binary_op):
    """A number with a sign that overflows is an error; Triton's own interprets four operations to see it, and says nothing."""
    dtype = lhs.type.scalar
    if dtype.is_int_signed() and dtype.int_bitwidth < 64:
        exact = OPS[binary_op.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        if exact.min() < dtype.get_int_min_value() or exact.max() > dtype.get_int_max_value():
            raise OverflowError(f"{dtype} overflow in {binary_op.__name__}")


@cache
def builtins_of(pkg):
    return [name for name, member in inspect.getmembers(pkg) if core.is_builtin(member)]


def patch_builtin(pkg, builder, scope):
    for name in builtins_of(pkg):
        member = getattr(pkg, name)
        if core.is_builtin(member):  # not exchanged yet
            scope.set_attr(pkg, name, called(member))


@cache
def called(member):
    """A function of the language, with the interpreter's semantics."""
    inner, semantics = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def of(*args, _semantic=None, **kwargs):
        return inner(*args, **kwargs, _semantic=semantics)

    return of


def of_scales(to_float):
    """Scales of a scaled product: Triton's own are powers of two; those of e4m3 it takes for such."""
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()

    def of(handle, compute_type):
        return e4m3[handle.data] if handle.dtype == tl.float8e4nv else to_float(handle, compute_type)

    return of


def speed_up():
    if not hasattr(interpreter, "_LangPatchScope"):  # its name of today; elsewhere it is only slower
        return
    interpreter._dot_scaled_scale_to_f32 = of_scales(interpreter._dot_scaled_scale_to_f32)
    interpreter._patch_lang = exchange_once(interpreter._patch_lang)
    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype)
    core._unwrap_if_constexpr = unwrapped(core._unwrap_if_constexpr)
    tl.block_type.__init__ = typed(tl.block_type.__init__)
    tl.tensor.__init__ = tensor_init
    tl.dtype.__eq__ = same_name(tl.dtype.__eq__)
    of = semantic.TritonSemantic
    of.computation_type_impl = once_for_types(of.computation_type_impl)
    of.broadcast_impl_value = where_shapes_differ(of.broadcast_impl_value)
    of.binary_op_sanitize_overflow_impl = sanitize
