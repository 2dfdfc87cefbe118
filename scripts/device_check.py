"""Checks on a device: see device_check.sh. Every check is one row of a table; exit code 1 if one of them fails."""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import kernels  # noqa: E402 (the program is one directory up)
from checkpoint import load_model, packed, random_model  # noqa: E402
from generate import (  # noqa: E402
    ModelDraft,
    NgramDraft,
    compile_model,
    decode_one_token,
    fix_shape,
    generate,
    speculative_decode,
    weight_bytes,
)
from model import ModelArgs, Transformer  # noqa: E402
from quantize import (  # noqa: E402
    Int4Linear,
    Int8Linear,
    dequantize_int4,
    dequantize_int8,
    quantize_int4,
    quantize_int8,
    replace_linears,
)

SMOLLM2 = ROOT / "checkpoints" / "SmolLM2-135M-Instruct"
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
TINY = LLAMA_8B | {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
TARGETS = {"bf16": 0.80, "int8": 0.65, "int4": 0.50}  # shares of the copy bandwidth
Row = tuple[str, str, bool | None]  # what, the figure, whether it passed (None: for information)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(device: torch.device, call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, after three to warm up."""
    times = []
    for _ in range(repeats + 3):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        times.append(time.perf_counter() - start)
    return median(times[3:])


@torch.inference_mode(False)
def ready(make: Callable[[], Transformer], length: int) -> Transformer:
    """A model with a cache of `length` entries: plain tensors, as generate.py loads them."""
    model = make()
    model.setup_caches(1, length)
    return model


# ---------------------------------------------------------------- quantized layers


def quantized_layers(device: torch.device, dtype: torch.dtype, tiny: bool) -> Iterator[Row]:
    """Each layer against its dequantized product in float64; the error is relative to the product's norm."""
    shapes = [(64, 128), (200, 192), (576, 1536), (1536, 576), (3072, 1024), *([] if tiny else [(6144, 4096)])]
    allowed = 2e-2 if dtype == torch.bfloat16 else 1e-3
    for mode, groupsize in (("int8", 0), ("int4", 32), ("int4", 64), ("int4", 128)):
        worst, where = 0.0, ""
        for n, k in shapes:
            if groupsize and k % groupsize:
                continue
            w = torch.randn(n, k, device=device) / k**0.5
            if mode == "int8":
                layer = Int8Linear(k, n)
                layer.weight, layer.scales = quantize_int8(w)
                exact = dequantize_int8(layer.weight, layer.scales)
            else:
                layer = Int4Linear(k, n, groupsize)
                layer.weight, layer.scales, layer.mins = quantize_int4(w, groupsize)
                exact = dequantize_int4(layer.weight, layer.scales, layer.mins)
            layer.pack()
            for rows in (1, 2, 5, 16, 64, 65, 300):
                x = torch.randn(rows, k, device=device, dtype=dtype)
                expected = x.double() @ exact.double().T
                error = ((layer(x).double() - expected).norm() / expected.norm()).item()
                if not error <= worst:  # NaN is worse than anything
                    worst, where = error, f"{n} x {k}, {rows} rows"
        name = mode + (f" g{groupsize}" if groupsize else "")
        yield f"{name} layers against float64: relative error", f"{worst:.1e} ({where})", worst < allowed


# ---------------------------------------------------------------- temperature 0


def quantized_copy(model: Transformer, mode: str, groupsize: int | None = None) -> Transformer:
    """The same model with quantized weights."""
    with torch.device("meta"):
        copy = Transformer(model.args)
        replace_linears(copy, mode, groupsize)
    for name, new in copy.named_modules():
        old = model.get_submodule(name)
        if isinstance(new, Int8Linear):
            new.weight, new.scales = quantize_int8(old.weight)
        elif isinstance(new, Int4Linear):
            new.weight, new.scales, new.mins = quantize_int4(old.weight, groupsize)
        else:
            new._parameters.update(old._parameters)
            continue
        new.bias = old.bias
    return packed(copy)


def temperature_0(
    name: str, make: Callable[[], Transformer], prompts: list[list[int]], tokens: int, compiled: bool
) -> Iterator[Row]:
    """Speculative decoding gives plain decoding's tokens. In one fixed shape (--exact) always, and without it wherever
    the kernels round alike for one row and for several, as the C++ ones do."""
    k = 4
    for exact in (False, True):
        model = ready(make, max(map(len, prompts)) + tokens)
        ints = ready(lambda model=model: quantized_copy(model, "int8"), model.max_seq_length)
        if compiled:
            compile_model(model, k + 1)
            compile_model(ints, 2)
        if exact:
            fix_shape(model, k + 1)
        for kind, draft in (("n-gram", NgramDraft()), ("int8 draft", ModelDraft(ints, model.args.vocab_size))):
            same, accepted, proposed = 0, 0, 0
            for prompt in prompts:
                plain = generate(model, prompt, tokens, temperature=0)[1]["generated_tokens"]
                stats = generate(model, prompt, tokens, draft=draft, speculate_k=k, temperature=0)[1]
                if stats["fallback"]:
                    raise RuntimeError(stats["fallback"])
                same += stats["generated_tokens"] == plain
                accepted += sum(n * count for n, count in enumerate(stats["accept_counts"]))
                proposed += sum(n * count for n, count in enumerate(stats["k_counts"]))
            promised = exact or model.norm.weight.device.type == "cpu"
            how = f"{name}{', compiled' if compiled else ''}{', exact' if exact else ''}, {kind}"
            figure = f"{same} of {len(prompts)} texts ({accepted}/{proposed} accepted)"
            yield f"temperature 0, {how}: same", figure, same == len(prompts) if promised else None


# ---------------------------------------------------------------- waits


def waits(make: Callable[[], Transformer], compiled: bool) -> Iterator[Row]:
    """A plain step does not wait for the device, a speculative round once. Counted by torch, on CUDA only."""
    model = ready(make, 128)
    ints = ready(lambda: quantized_copy(model, "int8"), 128)
    device = model.norm.weight.device
    how = "compiled" if compiled else "not compiled"
    on_cuda = device.type == "cuda"
    prompt = list(range(1, 9)) * 2
    for one in (model, ints) if compiled else ():
        compile_model(one, 5)
    generate(model, prompt, 24, temperature=0)
    token, input_pos = torch.tensor([[1]], device=device), torch.tensor([20], device=device)
    sampling = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
    step = lambda: decode_one_token(model, token, input_pos, **sampling)  # noqa: E731
    for _ in range(3):
        step()
    try:
        if on_cuda:
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            step()
        yield f"waits in a plain step, {how}", "0" if on_cuda else "not CUDA: not counted", True if on_cuda else None
    except RuntimeError as error:
        yield f"waits in a plain step, {how}", str(error).splitlines()[0], False
    finally:
        if on_cuda:
            torch.cuda.set_sync_debug_mode("default")

    for kind, draft in (("n-gram", NgramDraft()), ("int8 draft", ModelDraft(ints, model.args.vocab_size))):
        text = [prompt[:]]
        generate(model, prompt, 24, draft=draft, speculate_k=4, temperature=0)
        counts = []
        for _ in range(6):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if on_cuda:
                    torch.cuda.set_sync_debug_mode("warn")
                try:
                    cur_token = torch.tensor([[text[0][-1]]]).to(device, non_blocking=True)
                    new = speculative_decode(model, draft, cur_token, len(text[0]) - 1, 4, text=text, temperature=0)
                    text[0] += new.tolist()
                finally:
                    if on_cuda:
                        torch.cuda.set_sync_debug_mode("default")
            counts.append(sum("called a synchronizing" in str(w.message) for w in caught))
        figure = f"{max(counts[1:])} at most" if on_cuda else "not CUDA: not counted"
        passed = max(counts[1:]) <= 1 if on_cuda else None
        yield f"waits in a speculative round, {how}, {kind}", figure, passed


# ---------------------------------------------------------------- speed


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second of a copy, read and written."""
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / timed(device, lambda: target.copy_(source), 20)


def speed(config: Path, mode: str, device: torch.device, bandwidth: float, compiled: bool, tiny: bool) -> Iterator[Row]:
    """Greedy tokens/s of a model with random weights, and what share of the copy bandwidth its weights come at."""
    start = time.perf_counter()
    how = {"bf16": {}, "int8": {"mode": "int8"}, "int4": {"mode": "int4", "groupsize": 32}}[mode]
    model = ready(lambda: random_model(config, device, torch.bfloat16, **how), 256)
    wait(device)
    loaded = time.perf_counter()
    if compiled:
        compile_model(model, 5)
    generate(model, range(1, 17), 8, temperature=0)
    seconds = f"made in {loaded - start:.0f} s, compiled in {time.perf_counter() - loaded:.0f} s"
    runs = [generate(model, range(1, 17), 24 if tiny else 200, temperature=0)[1]["tokens_per_s"] for _ in range(3)]
    share = weight_bytes(model) * median(runs) / bandwidth
    figure = f"{median(runs):.1f} tokens/s, {weight_bytes(model) / 1e9:.2f} GB a token: {share:.0%} ({seconds})"
    yield (
        f"{mode}, share of the copy bandwidth (at least {TARGETS[mode]:.0%})",
        figure,
        None if tiny else share >= TARGETS[mode],
    )

    def pass_of(tokens: int) -> Callable[[], object]:
        idx = torch.arange(1, tokens + 1, device=device)[None]
        input_pos = torch.arange(32, 32 + tokens, device=device)
        return lambda: model(idx, input_pos)

    one, five = (timed(device, pass_of(tokens), 10) for tokens in (1, 5))
    yield f"{mode}, verifying 5 tokens relative to one step", f"{five / one:.2f} ({one * 1e3:.2f} ms)", None
    prompt, input_pos = torch.ones(1, 128, dtype=torch.int64, device=device), torch.arange(128, device=device)
    seconds = timed(device, lambda: model(prompt, input_pos, logits_to_keep=1), 5)
    yield f"{mode}, prompt of 128 tokens", f"{128 / seconds:.0f} tokens/s", None


# ---------------------------------------------------------------- all of it


def checks(args: argparse.Namespace, device: torch.device, config: Path, tiny_config: Path) -> Iterator[tuple]:
    """(name, function that yields rows), in the order of what they cost."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    yield "quantized layers", lambda: quantized_layers(device, dtype, args.tiny)
    generator = torch.Generator().manual_seed(0)
    size = ModelArgs.from_config(tiny_config).vocab_size
    prompts = [torch.randint(size, (12,), generator=generator).tolist() * 2 for _ in range(4)]
    make_tiny = lambda: random_model(tiny_config, device, dtype)  # noqa: E731

    def small(compiled: bool) -> Iterator[tuple]:
        yield "waits", lambda: waits(make_tiny, compiled)
        yield "temperature 0", lambda: temperature_0("tiny", make_tiny, prompts, 48, compiled)

    yield from small(compiled=False)
    bandwidth = copy_bandwidth(device, 2**26 if args.tiny else 2**31)
    yield "bandwidth", lambda: [("copy bandwidth, read + write", f"{bandwidth / 1e9:.0f} GB/s", None)]
    for mode in TARGETS:
        yield mode, lambda mode=mode: speed(config, mode, device, bandwidth, args.compile, args.tiny)
    if args.compile:
        yield from small(compiled=True)
    if SMOLLM2.is_dir() and not args.tiny:
        golden = json.loads((ROOT / "tests" / "golden" / "smollm2-135m.json").read_text(encoding="utf-8"))
        texts = [case["ids"] for case in golden[:3]]
        make = lambda: load_model(SMOLLM2, device, dtype)  # noqa: E731
        yield "SmolLM2", lambda: temperature_0("SmolLM2", make, texts, 64, args.compile)


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks on a device.", allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes: only to see whether the script works")
    parser.add_argument("--no_compile", dest="compile", action="store_false")
    parser.add_argument(
        "--seconds", type=float, default=420, help="begin no further check after so many (default: 420)"
    )
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda: there is none; --device cpu --tiny tries the script out", file=sys.stderr)
        return 2
    device = torch.device(args.device)
    begin = time.perf_counter()
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    results: list[dict] = []
    torch.manual_seed(0)
    if device.type == "cpu":
        kernels.load()
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        configs = []
        for name, sizes in (("config.json", TINY if args.tiny else LLAMA_8B), ("tiny.json", TINY)):
            configs.append(Path(scratch) / name)
            configs[-1].write_text(json.dumps(sizes))
        for name, check in checks(args, device, *configs):
            elapsed = time.perf_counter() - begin
            print(f"[{elapsed:5.0f} s] {name}", file=sys.stderr, flush=True)
            try:
                if elapsed > args.seconds:
                    raise TimeoutError(f"not begun: {elapsed:.0f} s had passed")
                for what, figure, passed in check():
                    results.append({"check": what, "figure": figure, "passed": passed})
            except Exception as error:  # a check that breaks is one that fails; the others go on
                traceback.print_exc()
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:150]
                results.append({"check": name, "figure": reason, "passed": False})
            torch._dynamo.reset()  # the next check's models are others: none of these graphs can serve them
            if device.type == "cuda":
                torch.cuda.empty_cache()

    words = {True: "pass", False: "FAIL", None: "-"}
    failed = sum(result["passed"] is False for result in results)
    print(f"{gpu}, torch {torch.__version__}, {time.perf_counter() - begin:.0f} s")
    for result in results:
        print(f"{words[result['passed']]:4}  {result['check']}: {result['figure']}")
    print(f"{failed} failed, {sum(result['passed'] is True for result in results)} passed")
    if os.environ.get("OUT"):
        file = Path(os.environ["OUT"]) / "device_check.json"
        scratch_file = file.with_name(f".{file.name}.{os.getpid()}")
        scratch_file.write_text(json.dumps({"device": gpu, "torch": torch.__version__, "rows": results}, indent=1))
        os.replace(scratch_file, file)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
