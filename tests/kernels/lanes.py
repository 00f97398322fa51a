"""Runs the body of an ``inline_mgpu`` block on NumPy, one element a thread, instead of building MLIR from it.

Only what ``pallas_kernels/fp8_pages.py`` uses: integer arithmetic, its PTX, loads from global memory and
stores to shared memory, both of which are one array of bytes here. An unknown instruction is a
NotImplementedError.
"""

import contextlib
import dataclasses
import importlib.util
import re
import types
from typing import Any

import ml_dtypes
import numpy as np

THREADS = 128
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Ref:
    """A memref at byte ``base``: shape as the kernel sees it, bytes of an element."""

    base: int
    shape: tuple[int, ...]
    element_type: int

    @property
    def type(self):
        return self


def scalar(value: int):
    """What a uniform scalar argument looks like inside the block."""
    return types.SimpleNamespace(registers=types.SimpleNamespace(item=lambda: _constant(value)))


def _constant(value, _=None) -> np.ndarray:
    return np.full(THREADS, value, np.int64)


def _unsigned(x) -> np.ndarray:
    return x & 0xFFFFFFFF


def _signed(x) -> np.ndarray:
    return _unsigned(x).astype(np.uint32).view(np.int32).astype(np.int64)


def _bitcast(x, kind: str) -> np.ndarray:
    if kind == "f32":
        return _unsigned(x).astype(np.uint32).view(np.float32)
    return x.view(np.uint32).astype(np.int64)


def _pair(low, high, dtype) -> np.ndarray:
    low, high = (x.astype(dtype).view(np.uint16).astype(np.int64) for x in (low, high))
    return low | high << 16


def _halves(x, dtype) -> list[np.ndarray]:
    return [(x >> shift & 0xFFFF).astype(np.uint16).view(dtype).astype(np.float32) for shift in (0, 16)]


def _bytes(x) -> list[np.ndarray]:
    return [(x >> 8 * k & 0xFF).astype(np.uint8).view(E4M3).astype(np.float32) for k in range(4)]


class Machine:
    """Memory, and the modules ``arith``, ``llvm``, ``ir``, ``utils`` and ``mgpu`` as the block uses them."""

    def __init__(self, size: int):
        self.memory = np.zeros(size, np.uint8)
        self.writes = np.zeros(size, np.int32)
        self._masks = [np.ones(THREADS, bool)]

    def write(self, base: int, array: np.ndarray) -> None:
        raw = np.frombuffer(array.tobytes(), np.uint8)
        self.memory[base : base + raw.size] = raw

    def load(self, module):
        """A copy of ``module`` whose blocks run on this machine, without the checks of argument types."""
        spec = importlib.util.spec_from_file_location(f"{module.__name__}_on_numpy", module.__file__)
        assert spec is not None
        assert spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        vars(copy).update(self.modules())
        block = {"inline_mgpu": lambda **_: lambda body: lambda *arguments: body(None, *arguments)}
        copy.plgpu = types.SimpleNamespace(**vars(copy.plgpu) | block)  # type: ignore[attr-defined]
        return copy

    def modules(self) -> dict[str, Any]:
        compare = {"slt": np.less, "sgt": np.greater, "eq": np.equal, "ne": np.not_equal}
        arith = types.SimpleNamespace(
            CmpIPredicate=types.SimpleNamespace(**{name: name for name in compare}),
            cmpi=lambda how, a, b: compare[how](_signed(a), _signed(b)),
            select=np.where,
            addi=np.add,
            subi=np.subtract,
            muli=np.multiply,
            mulf=np.multiply,
            ori=np.bitwise_or,
            xori=np.bitwise_xor,
            andi=lambda a, b: _unsigned(a) & _unsigned(b),
            remui=lambda a, b: _unsigned(a) % b,
            divui=lambda a, b: _unsigned(a) // b,
            shrui=lambda a, b: _unsigned(a) >> b,
            maxsi=lambda a, b: np.maximum(_signed(a), _signed(b)),
            extui=lambda _, a: _unsigned(a),
        )
        llvm = types.SimpleNamespace(
            mlir_undef=lambda _: [None] * 4,
            insertelement=lambda v, x, i: [x if k == i[0] else old for k, old in enumerate(v)],
            extractelement=lambda v, i: v[int(i[0])],
            ptrtoint=lambda _, pointer: pointer,
            store=self._store,
        )
        ir = types.SimpleNamespace(
            IntegerType=types.SimpleNamespace(get_signless=lambda bits: f"i{bits}"),
            F32Type=types.SimpleNamespace(get=lambda: "f32"),
            VectorType=types.SimpleNamespace(get=lambda *_: None),
            MemRefType=lambda ref: ref,
        )
        utils = types.SimpleNamespace(
            c=_constant,
            thread_idx=lambda: np.arange(THREADS, dtype=np.int64),
            memref_ptr=lambda ref: _constant(ref.base),
            getelementptr=lambda pointer, amounts, _: pointer + amounts[0],
            bytewidth=lambda element: element,
            bitcast=_bitcast,
            when=self._when,
            inline_ptx=self._ptx,
        )
        mgpu = types.SimpleNamespace(
            FragmentedArray=lambda _registers, **_: types.SimpleNamespace(registers=_registers)
        )
        return {"arith": arith, "llvm": llvm, "ir": ir, "utils": utils, "mgpu": mgpu}

    @contextlib.contextmanager
    def _when(self, condition):
        self._masks.append(self._masks[-1] & condition)
        yield
        self._masks.pop()

    def _store(self, value, pointer, alignment):
        for k, word in enumerate(value if isinstance(value, list) else [value]):
            bits = word.view(np.uint32) if word.dtype == np.float32 else _unsigned(word).astype(np.uint32)
            for address, x in zip(pointer[self._masks[-1]] + 4 * k, bits[self._masks[-1]], strict=True):
                assert address % 4 == 0
                self.memory[address : address + 4] = np.frombuffer(x.tobytes(), np.uint8)
                self.writes[address : address + 4] += 1

    def _ptx(self, ptx: str, *arguments, result_types=None, **_):
        if ptx.startswith("ld.global"):
            at = arguments[0] + int(re.findall(r"\$4\+(\d+)", ptx)[0])
            assert (at % 16 == 0).all()
            rows = np.stack([self.memory[a : a + 16] for a in at])
            return tuple(rows.view(np.uint32).astype(np.int64).T)
        if found := re.match(r"(and|xor)\.b32 \$0, \$1, (\d+);", ptx):
            operation = {"and": np.bitwise_and, "xor": np.bitwise_xor}[found[1]]
            return operation(_unsigned(arguments[0]), int(found[2]))
        if "e4m3x2" in ptx:
            values = _bytes(arguments[0])
            if "fma" in ptx:
                near, rest = (_halves(ratio, np.float16)[0].astype(np.float64) for ratio in arguments[1:])
                values = [(v * near + (v * rest).astype(np.float16)).astype(np.float16) for v in values]
            return _pair(*values[:2], np.float16), _pair(*values[2:], np.float16)
        if "sub.f32 rest" in ptx:
            near = arguments[0].astype(np.float16)
            rest = arguments[0] - near.astype(np.float32)
            return _pair(near, near, np.float16), _pair(rest, rest, np.float16)
        if ptx.startswith("mul.rn.bf16x2"):
            products = [a * b for a, b in zip(*(_halves(x, BF16) for x in arguments), strict=True)]
            return _pair(*products, BF16)
        raise NotImplementedError(ptx)
