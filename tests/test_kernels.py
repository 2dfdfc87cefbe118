"""Each C++ operator against its reference in float64, and the promise that a row's bits depend on that row only."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import kernels

MANY_ROWS = (*range(1, 10), 17, 64, 128, 300)
SHAPES = [(96, 64), (61, 100), (3, 37), (1, 2500), (200, 1536)]  # N, K
KINDS = ("float32", "bfloat16", "float16", "int8", "int4.32", "int4.64", "int4.128")
CASES = [
    (kind, n, k)
    for kind in KINDS
    for n, k in [*SHAPES, (50, 128)]
    if "float" in kind or k % (2 if kind == "int8" else int(kind[5:])) == 0  # pairs and groups must divide K
]


@pytest.fixture(scope="module", autouse=True)
def library():
    assert kernels.load(), "these tests need a C++ compiler"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def layer(kind: str, n: int, k: int):
    """The operator and its reference, with the same random weights."""
    if kind.startswith("int4"):
        group = int(kind[5:])
        weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
        scales, mins = torch.rand(n, k // group).half(), -8 * torch.rand(n, k // group).half()
        panels = kernels.int4_panels(weight, scales, mins)
        return (
            lambda x, *rest: kernels.linear_int4(x, panels, n, *rest),
            lambda x, *rest: kernels.linear_int4_reference(x, weight, scales, mins, *rest),
        )
    if kind == "int8":
        weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        scales, panels = torch.rand(n) / 100, kernels.int8_panels(weight)
        return (
            lambda x, *rest: kernels.linear_int8(x, panels, scales, *rest),
            lambda x, *rest: kernels.linear_int8_reference(x, weight, scales, *rest),
        )
    weight = torch.randn(n, k).to(getattr(torch, kind))
    return (
        lambda x, *rest: kernels.linear(x, weight, *rest),
        lambda x, *rest: kernels.linear_reference(x, weight, *rest),
    )


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """The largest error, relative to the largest element."""
    error = ((got.double() - want).abs().max() / want.abs().max()).item()
    assert error < tolerance, error


@pytest.mark.parametrize("kind, n, k", CASES)
def test_linear_matches_reference(kind, n, k):
    op, reference = layer(kind, n, k)
    bias = torch.randn(n)
    x, residual = torch.randn(300, k), torch.randn(300, n)
    around = (None, 1e-6, False, residual)
    tolerance = 1e-5 if "float" in kind else 2e-4
    close(op(x), reference(x.double()), tolerance)
    close(op(x, bias, *around), reference(x.double(), bias.double(), *around), tolerance)


@pytest.mark.parametrize("kind, n, k", CASES)
def test_a_row_has_the_same_bits_whatever_rows_and_threads_are_beside_it(kind, n, k):
    op, _ = layer(kind, n, k)
    x, bias, residual = torch.randn(300, k), torch.randn(n), torch.randn(300, n)
    threads = torch.get_num_threads()

    def run(rows):
        return op(x[rows], bias, None, 1e-6, False, residual[rows])

    try:
        torch.set_num_threads(1)
        single = torch.cat([run(slice(i, i + 1)) for i in range(300)])
        for count in (1, 2):
            torch.set_num_threads(count)
            for m in MANY_ROWS:
                assert torch.equal(run(slice(0, m)), single[:m]), (count, m)
                assert torch.equal(run(slice(300 - m, 300)), single[300 - m :]), (count, m)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ("float32", "int8", "int4.32"))
def test_norm_and_gate_inside_a_linear_layer_are_the_operators_outside(kind):
    op, _ = layer(kind, 40, 96)
    x, gates, norm = torch.randn(7, 96), torch.randn(7, 192), torch.rand(96)
    assert torch.equal(op(x, None, norm, 1e-5), op(kernels.rms_norm(x, norm, 1e-5)))
    assert torch.equal(op(gates, None, None, 1e-5, True), op(kernels.silu_mul(gates)))


@pytest.mark.parametrize("kind", KINDS)
def test_linear_takes_leading_dimensions_strides_and_no_rows(kind):
    op, _ = layer(kind, 24, 128)
    x = torch.randn(128, 3, 2).permute(1, 2, 0)
    assert not x.is_contiguous()
    assert torch.equal(op(x), op(x.reshape(6, 128).clone()).view(3, 2, 24))
    assert op(x[:0]).shape == (0, 2, 24)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", (float("nan"), float("inf"), float("-inf")))
def test_an_input_that_is_not_finite_reaches_its_own_row_and_no_other(kind, bad):
    op, _ = layer(kind, 24, 128)
    x = torch.randn(9, 128)
    want = op(x)
    x[4, 77] = bad
    got = op(x)
    assert not got[4].isfinite().any()
    keep = [i for i in range(9) if i != 4]
    assert torch.equal(got[keep], want[keep])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", (0.0, 1e-38, 1e-20, 1e30))
def test_rows_of_zeros_and_of_extreme_size(kind, size):
    op, reference = layer(kind, 24, 128)
    x = torch.randn(3, 128)
    x[1] *= size
    got, want = op(x), reference(x.double())
    assert got.isfinite().all()
    assert (got.double() - want).abs()[1].max() <= max(3e-4 * want[1].abs().max().item(), 1e-30)


def test_float16_subnormals_and_large_values_are_exact():
    weight = torch.tensor([[6e-8, 65504.0, -6.1e-5, 3e-6] * 4], dtype=torch.float16)
    close(kernels.linear(torch.ones(1, 16), weight), weight.double().sum(1, keepdim=True), 1e-6)


@pytest.mark.parametrize(
    "x, weight, says",
    [
        (torch.randn(2, 31), torch.randn(4, 32), "must be 32"),
        (torch.randn(2, 32).double(), torch.randn(4, 32), "float32"),
        (torch.randn(2, 32), torch.zeros(4, 32, dtype=torch.int32), "weight must be"),
        (torch.randn(2, 32), torch.randn(32, 4).t(), "contiguous"),
    ],
)
def test_linear_names_what_is_wrong(x, weight, says):
    with pytest.raises(RuntimeError, match=says):
        kernels.linear(x, weight)


def test_panels_that_do_not_fit_are_named():
    z = torch.zeros(8, 4).half()
    panels = kernels.int4_panels(torch.zeros(8, 32, dtype=torch.uint8), z, z)
    with pytest.raises(RuntimeError, match="group size must be 32, 64 or 128, not 16"):
        kernels.linear_int4(torch.randn(1, 64), panels, 8)
    panels = kernels.int4_panels(torch.zeros(8, 64, dtype=torch.uint8), z, z)
    with pytest.raises(RuntimeError, match=r"must be contiguous Int \[2, 4, 40\]"):
        kernels.linear_int4(torch.randn(1, 128), panels, 9)
    panels = kernels.int8_panels(torch.zeros(8, 64, dtype=torch.int8))
    for columns in (63, 65, 66):
        with pytest.raises(RuntimeError, match="last dimension must be 64"):
            kernels.linear_int8(torch.randn(1, columns), panels, torch.ones(8))
    with pytest.raises(RuntimeError, match=r"must be contiguous Char \[2, 32, 8, 2\]"):
        kernels.linear_int8(torch.randn(1, 64), panels, torch.ones(9))
    empty = torch.zeros(0, 4, 8, 2, dtype=torch.int8)
    for op, *weights in (
        (kernels.linear_int8, empty, torch.ones(0)),
        (kernels.linear_int8, empty.view(1, 0, 8, 2), torch.ones(8)),
        (kernels.linear_int4, torch.zeros(0, 1, 40, dtype=torch.int32), 0),
        (kernels.linear_int4, torch.zeros(1, 0, 40, dtype=torch.int32), 8),
    ):
        with pytest.raises(RuntimeError, match="panels must be"):
            op(torch.zeros(1, 8), *weights)


@pytest.mark.parametrize("n, k", SHAPES)
def test_panels_give_their_rows_back(n, k):
    weight = torch.randint(-128, 128, (n, k // 2 * 2), dtype=torch.int8)
    panels = kernels.int8_panels(weight)
    assert panels.shape == ((n + 7) // 8, k // 2, 8, 2) and panels.is_contiguous()
    assert torch.equal(kernels.int8_rows(panels, n), weight)
    assert panels[0, 1, 2, 1] == (weight[2, 3] if n > 2 else 0)
    for group in (32, 64, 128):
        weight = torch.randint(0, 256, (n, 3 * group // 2), dtype=torch.uint8)
        scales, mins = torch.randn(n, 3).half(), torch.randn(n, 3).half()
        panels = kernels.int4_panels(weight, scales, mins)
        assert panels.shape == ((n + 7) // 8, 3, group + 8) and panels.is_contiguous()
        for found, want in zip(kernels.int4_rows(panels, n), (weight, scales, mins), strict=True):
            assert torch.equal(found, want)


@pytest.mark.parametrize("d", (8, 37, 576))
def test_rms_norm_and_silu_mul(d):
    x, weight = 3 * torch.randn(40, 2, d), torch.rand(d)
    got = kernels.rms_norm(x, weight, 1e-5)
    close(got, kernels.rms_norm_reference(x.double(), weight.double(), 1e-5), 1e-5)
    assert torch.equal(got[3:4], kernels.rms_norm(x[3:4], weight, 1e-5))
    x = torch.cat((10 * torch.randn(40, 2, d), torch.randn(40, 2, d)), -1)
    got = kernels.silu_mul(x)
    torch.testing.assert_close(got.double(), kernels.silu_mul_reference(x.double()), rtol=1e-5, atol=1e-7)
    assert torch.equal(got[3:4], kernels.silu_mul(x[3:4]))
    far = torch.tensor([-200.0, -88.5, -87.0, 0.0, 87.0, 200.0, float("nan"), 1.0])
    want = torch.nn.functional.silu(far.double())
    got = kernels.silu_mul(torch.cat((far, torch.ones(8))))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-30, equal_nan=True)


def inputs(b, s, h, hkv, d, t):
    angles = 6 * torch.rand(t, d // 2)
    cache = torch.randn(b, hkv, t, d)
    return torch.randn(b, s, (h + 2 * hkv) * d), torch.stack((angles.cos(), angles.sin()), -1), cache, cache.flip(2)


@pytest.mark.parametrize("h, hkv, d", [(9, 3, 64), (4, 4, 16), (8, 1, 80), (2, 1, 128)])
@pytest.mark.parametrize("normed", (False, True))
def test_attention_matches_reference(h, hkv, d, normed):
    b, s, t = 3, 37, 200
    qkv, rope, k, v = inputs(b, s, h, hkv, d, t)
    pos = torch.arange(s) + torch.tensor([[0], [63], [150]])  # ragged
    norms = (torch.rand(d), torch.rand(d)) if normed else (None, None)
    k64, v64 = k.double(), v.double()
    norms64 = [None if n is None else n.double() for n in norms]
    got = kernels.attention(qkv, rope, k, v, pos, *norms, 1e-5)
    want = kernels.attention_reference(qkv.double(), rope.double(), k64, v64, pos, *norms64, 1e-5)
    close(got, want, 1e-5)
    close(k, k64, 1e-5)
    assert torch.equal(v.double(), v64)


def test_attention_has_the_same_bits_in_one_call_and_in_chunks_and_for_any_cache_length():
    s = 200
    qkv, rope, k, v = inputs(2, s, 6, 2, 32, s)
    pos = torch.arange(s).expand(2, s)
    whole_k, whole_v = k.clone(), v.clone()
    whole = kernels.attention(qkv, rope, whole_k, whole_v, pos)
    threads = torch.get_num_threads()
    try:
        for size, count in ((1, 1), (5, 2), (64, 2), (77, 1)):
            torch.set_num_threads(count)
            # What lies beyond a row's position must not touch it, not even NaN; nor the cache's length.
            chunk_k, chunk_v = (torch.full((3, 2, 333, 32), float("nan")) for _ in range(2))
            long_rope = torch.cat((rope, rope))
            parts = [
                kernels.attention(qkv[:, i : i + size], long_rope, chunk_k, chunk_v, pos[:, i : i + size])
                for i in range(0, s, size)
            ]
            assert torch.equal(torch.cat(parts, 1), whole), size
            assert torch.equal(chunk_k[:2, :, :s], whole_k) and torch.equal(chunk_v[:2, :, :s], whole_v)
            assert chunk_k[2].isnan().all() and chunk_k[:, :, s:].isnan().all()
    finally:
        torch.set_num_threads(threads)


def test_attention_of_no_tokens_is_empty():
    _, rope, k, v = inputs(1, 3, 2, 1, 16, 20)
    for rows, tokens in ((1, 0), (0, 3)):
        y = kernels.attention(torch.randn(rows, tokens, 64), rope, k, v, torch.zeros(rows, tokens, dtype=torch.int64))
        assert y.shape == (rows, tokens, 32)


def test_parts_that_other_threads_hold_and_release_harm_no_pass():
    """The operators run without Python's lock: a map changed under a reader ends the process."""
    d, layer_parts = 64, []
    for n, k in ((96, 64), (64, 32), (64, 64), (64, 32)):
        layer_parts += [torch.randn(n, k), None, None]
    caches = [torch.zeros(1, 1, 8, 32), torch.zeros(1, 1, 8, 32)]
    parts = [*caches, torch.ones(d), torch.ones(d), None, None, *layer_parts]
    x, rope, input_pos = torch.randn(1, 1, d), torch.randn(8, 16, 2), torch.zeros(1, 1, dtype=torch.int64)
    mine = kernels.Held(parts)
    want = kernels.held_blocks(x, rope, input_pos, mine.number, 1e-5)
    stop = threading.Event()

    def others() -> None:
        while not stop.is_set():
            [kernels.Held(parts) for _ in range(50)]

    threads = [threading.Thread(target=others) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3000):
            assert torch.equal(kernels.held_blocks(x, rope, input_pos, mine.number, 1e-5), want)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("native", (True, False))
@pytest.mark.parametrize("bad", (-1, 20, 10**12))
def test_a_position_outside_the_cache_is_named_and_nothing_is_written(native, bad):
    qkv, rope, k, v = inputs(1, 3, 2, 1, 16, 20)
    before = k.clone()
    pos = torch.tensor([[3, 4, bad]])
    with pytest.raises(IndexError, match=f"position {bad} is outside the cache, which has 20 positions"):
        (kernels.attention if native else kernels.attention_reference)(qkv, rope, k, v, pos)
    assert torch.equal(k, before)


def test_operators_compile_without_graph_breaks_in_a_nested_region():
    linear, _ = layer("int8", 4 * 16, 32)
    qkv, rope, k, v = inputs(1, 1, 2, 1, 16, 20)

    @torch.compiler.nested_compile_region
    def block(x, k, v, pos):
        x = linear(x)
        return kernels.attention(x, rope, k, v, pos)

    def model(x, pos):
        for _ in range(2):
            x = x + block(x, k, v, pos)
        return kernels.silu_mul(kernels.rms_norm(x, torch.ones(32), 1e-5))

    with torch.inference_mode():
        x, pos, before = torch.randn(1, 1, 32), torch.tensor([[2]]), k.clone()
        want, want_k = model(x, pos), k.clone()
        k.copy_(before)
        got = torch.compile(model, fullgraph=True)(x, pos)
        torch.testing.assert_close(got, want)
        assert torch.equal(k, want_k) and not torch.equal(k, before)  # the cache itself is written, not a copy


def test_disabled_runs_the_references():
    op, reference = layer("int8", 8, 64)
    x = torch.randn(2, 64)
    with kernels.disabled():
        assert torch.equal(op(x), reference(x))
    assert not torch.equal(op(x), reference(x))


def start(
    tmp_path: Path, script: str, code: str = "import kernels; print(kernels.load())"
) -> subprocess.CompletedProcess:
    """Runs code in a process of its own whose compiler is the given shell script and whose cache is empty."""
    compiler = tmp_path / "fake-c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    env = {**os.environ, "CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache")}
    root = Path(kernels.__file__).parent
    return subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, timeout=60)


def test_a_failed_build_says_so_in_one_line_and_the_reference_runs(tmp_path):
    code = (
        "import kernels, torch; print(kernels.load()); print(kernels.linear(torch.ones(1, 8), torch.ones(1, 8)).item())"
    )
    run = start(tmp_path, "echo 'x.cpp:1: fatal error: no such header' >&2; exit 1", code)
    assert run.stdout.split() == ["False", "8.0"], run.stderr
    assert "Traceback" not in run.stderr and "no such header" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1, run.stderr
    assert not list((tmp_path / "cache" / "onepass").iterdir())


def test_a_missing_compiler_says_so_in_one_line(tmp_path):
    run = start(
        tmp_path, "exit 0", "import os; os.environ['CXX'] = '/nowhere/c++'; import kernels; print(kernels.load())"
    )
    assert run.stdout.strip() == "False" and "/nowhere/c++" in run.stderr and "Traceback" not in run.stderr


def test_a_killed_build_does_not_stop_the_next_one(tmp_path):
    killed = start(tmp_path, 'kill -9 "$PPID"')
    assert killed.returncode == -9
    library = kernels.build()  # stands in for a second, slow compilation
    run = start(tmp_path, f'while [ "$1" != -o ]; do shift; done; cp "{library}" "$2"')
    assert run.stdout.strip() == "True", run.stderr
