"""Tests of Triton kernels without a GPU, in Triton's interpreter."""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch


@functools.cache
def prepare_interpreter() -> None:
    """Make this process's interpreter quick, and have its sums in one order. The tests' own process
    does it by itself; one that they start has to.
    """
    _order_sums()
    _quicken_interpreter()


def _order_sums() -> None:
    """Have the interpreter's `tl.dot` add up ascending inputs one by one.

    numpy's goes to BLAS, which gives a row other bits at another place or among other rows, and on
    another processor; a GPU's instruction does not.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(value: Any) -> Any:
        if value.dtype.primitive_bitwidth > 8:
            return value.data
        halves = interpreter._convert_float(value.data, value.dtype, tl.float16, None)
        return halves.view(np.float16)

    def multiply_in_order(
        self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        dtype = d.data.dtype
        if not np.issubdtype(dtype, np.floating):  # numpy multiplies integers by itself
            return multiply(self, a, b, d, input_precision, max_num_imprecise_acc)
        left, right = (widened(value).astype(dtype, copy=False) for value in (a, b))
        sums = np.zeros_like(d.data)
        product = np.empty_like(sums)
        for index in range(right.shape[-2]):
            np.multiply(left[..., index, None], right[..., index, None, :], out=product)
            sums += product
        return interpreter.TensorHandle(sums + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = multiply_in_order


def _quicken_interpreter() -> None:
    """Spare this process's interpreter what takes most of its time and changes no result: to patch
    Triton's language anew for each kernel and each function that one calls, to look for an
    overflow in each sum, which it does not tell anybody unless it debugs, and to make the shape of
    each tensor anew.
    """
    _share_shapes()
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang, patched = interpreter._patch_lang, set()
    get_np_dtype, np_dtypes = interpreter._get_np_dtype, {}

    def patch_once(fn: Any) -> Any:
        names = frozenset(
            name
            for name, module in (("tl", tl), ("core", tl.core))
            if any(value is module for value in fn.__globals__.values())
        )
        if names not in patched:
            patched.add(names)
            patch_lang(fn)
        return interpreter._LangPatchScope()

    def get_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = get_np_dtype(dtype)
        return np_dtypes[name]

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = get_once


def _share_shapes() -> None:
    """Make the objects that stand for a tensor's shape once for each shape: nobody changes them."""
    from triton.language import core

    make_block_type = core.block_type.__init__
    unwrap = core._unwrap_if_constexpr
    of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(dim.value if type(dim) is core.constexpr else dim for dim in shape)
        if key not in of_types:
            make_block_type(self, element_ty, shape)  # or refuse it
            of_types[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, name = of_types[key]
        self.name = f"<{name}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape.values if type.is_block() else ()
        key = tuple(shape)
        if key not in of_tensors:
            dims = core.tuple([core.constexpr(dim) for dim in key])
            of_tensors[key] = dims, core.constexpr(math.prod(key))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[key]

    def unwrap_quickly(value: Any) -> Any:
        return value if type(value) is core.tensor else unwrap(value)

    core.block_type.__init__ = init_block_type
    core.tensor.__init__ = init_tensor
    core._unwrap_if_constexpr = unwrap_quickly


def convert_fp8_as_gpus_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch convert numbers from and to FP8 in the interpreter, whose own conversion drops a
    carry into the exponent, rounds halves up, and has no NaN.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
    }
    convert = interpreter._convert_float

    def convert_by_torch(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if tl.float8e4nv not in (source, target):
            return convert(values, source, target, rounding_mode)
        bits = torch.frombuffer(bytearray(values.tobytes()), dtype=torch.uint8)
        converted = bits.view(dtypes[source]).to(dtypes[target]).view(torch.uint8)
        unsigned = np.dtype(f"uint{target.primitive_bitwidth}")
        return converted.numpy().view(unsigned).reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert_by_torch)


class _Event:
    """Of a device that is never behind."""

    def __init__(self, **options: object) -> None:
        self.num_queries = 0

    def record(self) -> None: ...

    def query(self) -> bool:
        """Say once that it is not over, as a step that runs would."""
        self.num_queries += 1
        return self.num_queries > 1

    def synchronize(self) -> None: ...


@contextmanager
def prompt_events() -> Iterator[None]:
    """Within, CUDA's events are over at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", _Event)
        yield


@contextmanager
def interpreted_kernels(kernels: Any = None) -> Iterator[None]:
    """A Driver that is made within has the kernels, the model and the runner of CUDA, on the CPU:
    for the interpreter. Unless other kernels are given they are Triton's.
    """
    from pdserve_engine.models import llama
    from pdserve_engine.models.transformers_backend import model as transformers_backend
    from pdserve_engine.runner.load.make_runner import make_runner
    from pdserve_engine.sampling import state
    from pdserve_kernels import triton
    from support import model_driver

    with pytest.MonkeyPatch.context() as patch:
        for module in (llama, transformers_backend, state):
            patch.setattr(module, "select", lambda device: kernels or triton)
        patch.setattr(llama, "is_mapped", lambda device: False)
        patch.setattr(model_driver, "make_runner", partial(make_runner, on_cuda=True))
        yield
