"""Programs for single threads, where Pallas' arrays of a warpgroup have no words: matches, shuffles, counts.

A program is a Python function that every thread of a block runs, written with operators on u32 and f32
words and the methods of a machine. ``Machine`` emits it into a Mosaic kernel; tests run the same on numpy
arrays of all threads, with bounds and races checked; JAX's GPU interpreter cannot.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf

WARP = 32


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _constant(value: int | float, dtype: ir.Type) -> ir.Value:
    return mgpu.utils.c(value, dtype)


def _binary(on_u32: Callable, on_f32: Callable | None = None) -> Callable[[Any, Any], Word]:
    def operate(self: Word, other: Word | int | float) -> Word:
        real = isinstance(self.value.type, ir.F32Type)
        if real and on_f32 is None:
            raise TypeError("this operation is for integers")
        return Word((on_f32 if real and on_f32 else on_u32)(self.value, self.like(other)))

    return operate


def _compare(name: str) -> Callable[[Any, Any], Any]:
    return _binary(lambda a, b: arith.cmpi(getattr(arith.CmpIPredicate, name), a, b))


@dataclasses.dataclass(frozen=True, eq=False)
class Word:
    """A value of a thread: u32, f32 or a condition. Integers are unsigned."""

    value: ir.Value

    def like(self, other: Word | int | float) -> ir.Value:
        """``other`` as a value of the same type, if it is a number."""
        return other.value if isinstance(other, Word) else _constant(other, self.value.type)

    __add__ = _binary(arith.addi, arith.addf)
    __sub__ = _binary(arith.subi, arith.subf)
    __mul__ = _binary(arith.muli, arith.mulf)
    __floordiv__ = _binary(arith.divui)
    __mod__ = _binary(arith.remui)
    __and__ = _binary(arith.andi)
    __or__ = _binary(arith.ori)
    __xor__ = _binary(arith.xori)
    __lshift__ = _binary(arith.shli)
    __rshift__ = _binary(arith.shrui)
    __lt__ = _compare("ult")
    __le__ = _compare("ule")
    __gt__ = _compare("ugt")
    __ge__ = _compare("uge")
    __eq__ = _compare("eq")
    __ne__ = _compare("ne")

    def __invert__(self) -> Word:
        return self ^ (1 if ir.IntegerType(self.value.type).width == 1 else 0xFFFFFFFF)


class Machine:
    """Emits MLIR for the thread that runs it. Arrays are refs, indexed in row-major order."""

    def __init__(self) -> None:
        self.thread = Word(mgpu.utils.thread_idx())
        self.block = Word(arith.index_castui(_i32(), gpu.block_id(gpu.Dimension.x)))

    def u32(self, value: int) -> Word:
        return Word(_constant(value, _i32()))

    def f32(self, value: float) -> Word:
        return Word(_constant(value, ir.F32Type.get()))

    @staticmethod
    def _pointer(ref, index: Word, dtype: ir.Type) -> ir.Value:
        i64 = ir.IntegerType.get_signless(64)
        return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [arith.extui(i64, index.value)], dtype)

    def load(self, ref, index: Word, where: Word | None = None) -> Word:
        """Zero where the condition does not hold, and then nothing is read."""
        dtype = ir.MemRefType(ref.type).element_type
        if where is None:
            return Word(llvm.load(dtype, self._pointer(ref, index, dtype), alignment=4))
        branch = scf.IfOp(where.value, [dtype], has_else=True)  # type: ignore[call-arg, arg-type]
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([llvm.load(dtype, self._pointer(ref, index, dtype), alignment=4)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([_constant(0, dtype)])
        return Word(branch.results[0])

    def store(self, ref, index: Word, value: Word) -> None:
        dtype = ir.MemRefType(ref.type).element_type
        llvm.store(value.value, self._pointer(ref, index, dtype), alignment=4)

    def load_words(self, ref, first: Word, count: int) -> list[Word]:
        """``count`` (2 or 4) consecutive u32 words, aligned as a whole, of an array of any type."""
        pointer = self._pointer(ref, first, _i32())
        vector = llvm.load(ir.VectorType.get((count,), _i32()), pointer, alignment=4 * count)
        return [Word(llvm.extractelement(vector, _constant(i, _i32()))) for i in range(count)]

    def store_word(self, ref, index: Word, word: Word) -> None:
        """A u32 word of an array of any type."""
        llvm.store(word.value, self._pointer(ref, index, _i32()), alignment=4)

    def increment(self, smem, index: Word) -> None:
        """Add one to a counter in shared memory, atomically."""
        pointer = self._pointer(smem, index, _i32())
        mgpu.utils.inline_ptx("red.shared.add.u32 [$0], 1;", pointer, has_side_effects=True)

    @contextlib.contextmanager
    def when(self, condition: Word) -> Iterator[None]:
        with mgpu.utils.when(condition.value):
            yield

    def repeat(self, count: int, function: Callable, carry: Sequence[Word] = ()) -> list[Word]:
        """``carry = function(i, carry)`` for i < count, as a loop of the GPU that stays one."""
        bounds = (_constant(value, _i32()) for value in (0, count, 1))
        loop = scf.ForOp(*bounds, [w.value for w in carry])  # type: ignore[arg-type, call-arg]
        with ir.InsertionPoint(loop.body):
            mgpu.utils.inline_ptx('.pragma "nounroll";', has_side_effects=True)
            words = [Word(value) for value in loop.inner_iter_args]
            scf.yield_([w.value for w in function(Word(loop.induction_variable), words)])
        return [Word(value) for value in loop.results]

    def select(self, condition: Word, yes: Word, no: Word) -> Word:
        return Word(arith.select(condition.value, yes.value, no.value))

    def max(self, a: Word, b: Word) -> Word:
        return Word(arith.maxui(a.value, b.value))

    def min(self, a: Word, b: Word) -> Word:
        return Word(arith.minui(a.value, b.value))

    def bits(self, real: Word) -> Word:
        return Word(arith.bitcast(_i32(), real.value))

    def _instruction(self, text: str, *args: Word, real: bool = False, convergent: bool = False) -> Word:
        result = ir.F32Type.get() if real else _i32()
        values = [a.value for a in args]
        return Word(
            mgpu.utils.inline_ptx(
                text, *values, result_types=result, has_side_effects=convergent, convergent=convergent
            )
        )

    def exp2(self, real: Word) -> Word:
        return self._instruction("ex2.approx.f32 $0, $1;", real, real=True)

    def reciprocal(self, real: Word) -> Word:
        return self._instruction("rcp.approx.f32 $0, $1;", real, real=True)

    def pack(self, low: Word, high: Word) -> Word:
        """Two f32 as a word of two bf16."""
        return self._instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high)

    def pick_bytes(self, low: Word, high: Word, selector: int) -> Word:
        """Bytes of (high, low), which are numbered 7 to 0, by the hexadecimal digits of ``selector``."""
        return self._instruction("prmt.b32 $0, $1, $2, $3;", low, high, self.u32(selector))

    def count_ones(self, word: Word) -> Word:
        return self._instruction("popc.b32 $0, $1;", word)

    # Of a whole warp: every lane takes part.

    def warp_max(self, word: Word) -> Word:
        return self._instruction("redux.sync.max.u32 $0, $1, 0xffffffff;", word, convergent=True)

    def warp_min(self, word: Word) -> Word:
        return self._instruction("redux.sync.min.u32 $0, $1, 0xffffffff;", word, convergent=True)

    def matching(self, word: Word) -> Word:
        """Mask of the lanes that hold the same word."""
        return self._instruction("match.any.sync.b32 $0, $1, 0xffffffff;", word, convergent=True)

    def from_lane(self, word: Word, lane: Word) -> Word:
        """The word of another lane."""
        text = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
        real = isinstance(word.value.type, ir.F32Type)
        return self._instruction(text, word, lane, real=real, convergent=True)

    def warp_barrier(self) -> None:
        mgpu.utils.warp_barrier()

    def warpgroup_barrier(self) -> None:
        mgpu.utils.warpgroup_barrier()

    def barrier(self) -> None:
        """Of all threads of the block; orders their accesses to memory."""
        gpu.barrier()

    def to_wgmma(self) -> None:
        """What this thread stored to shared memory may be read by wgmma after the next barrier."""
        mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)


def run(program: Callable[..., None], *args: Any, tiled: dict[int, tuple] | None = None) -> None:
    """Emit ``program(machine, *args)`` into the Pallas kernel that calls this, for every warpgroup.

    A ref stays one; ``tiled`` gives the transforms of those that have them, by position. An array [64, 8] f32
    in the accumulator's layout becomes its four words of a thread: rows q and q + 8 of the warp's 16, of each
    columns 2t and 2t + 1, for lane 4q + t.
    """

    def arg_type(i, arg):
        if isinstance(arg, jax.Array):
            return plgpu.Layout.WGMMA
        return plgpu.RefType((tiled or {}).get(i, ()))

    @plgpu.inline_mgpu(arg_types=tuple(arg_type(i, arg) for i, arg in enumerate(args)))
    def emit(ctx, *values):
        del ctx
        program(Machine(), *(_words(v) if isinstance(v, mgpu.FragmentedArray) else v for v in values))

    emit(*args)


def _words(array: mgpu.FragmentedArray) -> list[Word]:
    pairs = array.registers.reshape(-1)
    return [Word(llvm.extractelement(pair, _constant(j, _i32()))) for pair in pairs for j in range(2)]


__all__ = ["WARP", "Machine", "Word", "run"]
