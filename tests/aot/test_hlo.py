"""Reading optimised modules, and counting the bytes that they move, on modules whose traffic is known."""

import jax
import jax.numpy as jnp
import pytest

from jaxllm.aot import hlo, traffic

F32 = jnp.float32


def compiled(fn, *shapes, donate=(), dtypes=None):
    dtypes = dtypes or [F32] * len(shapes)
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return jax.jit(fn, donate_argnums=donate).lower(*arguments).compile()


def counted(text: str, **options) -> traffic.Traffic:
    return traffic.count(hlo.parse(text), lambda parameter: parameter.op_name, **options)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[3,4]{1,0}", 48),
        ("bf16[128]{0:T(256)(128)(2,1)}", 512),
        ("bf16[1024,8,4,128]{3,2,1,0:T(4,128)(2,1)}", 1024 * 8 * 4 * 128 * 2),
        ("s32[65]{0:T(128)}", 512),
        ("f32[3,200]{0,1:T(8,128)}", 200 * 128 * 4),
        ("f32[3,200]{1,0:T(8,128)S(1)}", 0),
        ("f8e4m3fn[10]{0}", 10),
        ("s4[11]{0}", 6),
        ("pred[]", 1),
        ("token[]", 0),
        ("(f32[2]{0}, (bf16[4]{0}, /*index=5*/s8[3]{0}), u32[]{:S(2)})", 19),
    ],
)
def test_bytes_of_shapes(text, size):
    assert hlo.num_bytes(hlo._shape(text)) == size


def test_parses_a_compiled_module():
    """Arguments as the compiler counts them."""
    done = compiled(lambda x, w: jnp.tanh(x @ w), (8, 32), (32, 16))
    module = hlo.parse(done.as_text())
    sizes = [hlo.num_bytes(p.shape) for p in module.entry.parameters.values()]
    assert sum(sizes) == done.memory_analysis().argument_size_in_bytes == 4 * (8 * 32 + 32 * 16)
    assert {p.op_name for p in module.entry.parameters.values()} == {"x", "w"}
    assert module.entry.root in module.entry.instructions


def test_no_module():
    with pytest.raises(ValueError, match="no ENTRY computation in this text of 5 characters"):
        hlo.parse("hello")


def test_operands_and_results_once():
    moved = counted(compiled(lambda x, w: jnp.tanh(x) * w, (64, 32), (64, 32)).as_text())
    assert moved.num_bytes == {"x": 8192, "w": 8192, "intermediates": 8192}
    assert (moved.kernels, moved.open_loops) == (1, 0)


def test_small_intermediates_count_apart():
    text = compiled(lambda x, w: jnp.tanh(x) * w, (64, 32), (64, 32)).as_text()
    assert counted(text, small_bytes=8192).num_bytes == {"x": 8192, "w": 8192, "small intermediates": 8192}
    assert "small intermediates" not in counted(text, small_bytes=8191).num_bytes


def test_a_fusion_that_is_one_operation_of_several_results():
    moved = counted("""HloModule m

%pair (a: f32[], i: s32[], b: f32[], j: s32[]) -> (f32[], s32[]) {
  %a = f32[] parameter(0)
  %i = s32[] parameter(1)
  %b = f32[] parameter(2)
  %j = s32[] parameter(3)
  ROOT %r = (f32[], s32[]) tuple(%b, %j)
}

%fused (x: f32[8,64], ids: s32[8,64]) -> (f32[8], s32[8]) {
  %x = f32[8,64]{1,0} parameter(0)
  %ids = s32[8,64]{1,0} parameter(1)
  %zero = f32[] constant(0)
  %none = s32[] constant(0)
  ROOT %both = (f32[8]{0}, s32[8]{0}) reduce(%x, %ids, %zero, %none), dimensions={1}, to_apply=%pair
}

ENTRY %main (x: f32[8,64], ids: s32[8,64]) -> (f32[8], s32[8]) {
  %x = f32[8,64]{1,0} parameter(0), metadata={op_name="x"}
  %ids = s32[8,64]{1,0} parameter(1), metadata={op_name="ids"}
  ROOT %best = (f32[8]{0}, s32[8]{0}) fusion(%x, %ids), kind=kLoop, calls=%fused
}
""")
    assert moved.num_bytes == {"x": 2048, "ids": 2048, "intermediates": 64} and moved.kernels == 1


def test_slices_and_gathers_count_what_comes_out():
    text = compiled(
        lambda table, ids: table.at[ids].get(mode="clip") * 2, (1000, 32), (4,), dtypes=[F32, jnp.int32]
    ).as_text()
    moved = counted(text)
    assert moved.num_bytes["table"] <= 2 * 4 * 32 * 4
    assert moved.total < 10 * 4 * 32 * 4


def test_update_in_place_counts_what_goes_in():
    def write(pool, at, new):
        return jax.lax.dynamic_update_slice(pool, new, (at, jnp.int32(0)))

    text = compiled(write, (1000, 32), (), (2, 32), donate=0, dtypes=[F32, jnp.int32, F32]).as_text()
    moved = counted(text)
    assert moved.num_bytes["pool"] == 2 * 32 * 4
    assert moved.total < 4 * 2 * 32 * 4


UPDATES = """HloModule m, is_scheduled=true

%two (pool: f32[100,8], new: f32[1,8], at: s32[]) -> f32[100,8] {
  %pool = f32[100,8]{1,0} parameter(0)
  %new = f32[1,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %first = f32[100,8]{1,0} dynamic-update-slice(%pool, %new, %at, %at)
  ROOT %second = f32[100,8]{1,0} dynamic-update-slice(%first, %new, %at, %at)
}

ENTRY %main (pool: f32[100,8], new: f32[1,8], at: s32[]) -> f32[100,8] {
  %pool.1 = f32[100,8]{1,0} parameter(0), metadata={op_name="pool"}
  %new.1 = f32[1,8]{1,0} parameter(1), metadata={op_name="new"}
  %at.1 = s32[] parameter(2), metadata={op_name="at"}
  ROOT %written = f32[100,8]{1,0} fusion(%pool.1, %new.1, %at.1), kind=kLoop, calls=%two
}
"""


def test_every_update_in_place_counts():
    assert counted(UPDATES).num_bytes == {"pool": 2 * 32, "new": 32, "at": 4}


def test_loops_count_every_trip():
    def scan(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.sin(x) * w, None), x, ws)[0]

    few, many = (counted(compiled(scan, (512,), (n, 512)).as_text()) for n in (5, 50))
    assert few.open_loops == many.open_loops == 0
    assert many.num_bytes["ws"] == 10 * few.num_bytes["ws"] == 50 * 512 * 4


OPEN_LOOP = """HloModule m, is_scheduled=true

%body (p: (s32[], f32[100])) -> (s32[], f32[100]) {
  %p = (s32[], f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[100]{0} get-tuple-element(%p), index=1
  %y = f32[100]{0} sine(%x)
  ROOT %t = (s32[], f32[100]{0}) tuple(%i, %y)
}

%cond (q: (s32[], f32[100])) -> pred[] {
  %q = (s32[], f32[100]{0}) parameter(0)
  ROOT %done = pred[] custom-call(%q), custom_call_target="unknowable"
}

ENTRY %main (n: s32[], x: f32[100]) -> f32[100] {
  %n = s32[] parameter(0), metadata={op_name="n"}
  %x.1 = f32[100]{0} parameter(1), metadata={op_name="leaves[0]"}
  %start = (s32[], f32[100]{0}) tuple(%n, %x.1)
  %loop = (s32[], f32[100]{0}) while(%start), condition=%cond, body=%body
  ROOT %out = f32[100]{0} get-tuple-element(%loop), index=1
}
"""


def test_open_loops_count_as_often_as_they_are_said_to():
    once, often = counted(OPEN_LOOP), counted(OPEN_LOOP, open_trips=7)
    assert (once.open_loops, once.kernels, once.num_bytes["leaves[0]"]) == (1, 1, 400)
    assert (often.open_loops, often.kernels, often.total) == (1, 7, 7 * 800)
    never = counted(OPEN_LOOP, open_trips=0)
    assert (never.open_loops, never.kernels, never.total) == (0, 0, 0)


KERNELS = """HloModule m, is_scheduled=true

ENTRY %main (pool: bf16[64,16,128], w: bf16[8,1024]) -> (bf16[8,1024], bf16[64,16,128]) {
  %pool = bf16[64,16,128]{2,1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="kv_pools[0]"}
  %w = bf16[8,1024]{1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="leaves[0]"}
  %fetch = (bf16[8,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[8,1024]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%w)
  %near = bf16[8,1024]{1,0:T(8,128)(2,1)S(1)} copy-done(%fetch)
  %ours = (bf16[8,1024]{1,0:T(8,128)(2,1)}, bf16[64,16,128]{2,1,0:T(8,128)(2,1)}) custom-call(%near, %pool), \
custom_call_target="tpu_custom_call", output_to_operand_aliasing={{1}: (1, {})}
  %out = bf16[8,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%ours), index=0
  %kept = bf16[64,16,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%ours), index=1
  %again = bf16[64,16,128]{2,1,0:T(8,128)(2,1)} copy(%kept)
  ROOT %all = (bf16[8,1024]{1,0:T(8,128)(2,1)}, bf16[64,16,128]{2,1,0:T(8,128)(2,1)}) tuple(%out, %again)
}
"""


def test_our_kernels_and_fast_memory_count_nothing():
    moved, pool = counted(KERNELS), 64 * 16 * 128 * 2
    assert (moved.pallas_calls, moved.kernels) == (1, 3)
    assert moved.num_bytes["leaves[0]"] == 8 * 1024 * 2  # fetched once, then read where it costs nothing
    assert moved.num_bytes["kv_pools[0]"] == pool  # read by the copy: the kernel's result is the pool still
    assert moved.largest.most_common(1) == [("again", 2 * pool)]
