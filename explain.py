"""`--explain`: what happened in a run, in plain words, from the figures of `--stats_json` and one measurement."""

import time

import torch

from generate import DraftLength

PROBE_BYTES = 256 * 2**20  # far more than a last-level cache holds


def read_bandwidth(device: torch.device, seconds: float = 0.2) -> float:
    """Bytes per second that the device's memory gives: the best of repeated passes over 256 MB.

    On a CPU a sum, which only reads, with the threads that the model has. On a GPU a copy, which reads and writes.
    """
    buffer = torch.ones(PROBE_BYTES // 4, dtype=torch.float32, device=device)
    target = None if device.type == "cpu" else torch.empty_like(buffer)
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until or best == float("inf"):
        wait()
        start = time.perf_counter()
        buffer.sum() if target is None else target.copy_(buffer)
        wait()
        best = min(best, time.perf_counter() - start)
    return buffer.nbytes * (1 if target is None else 2) / best


def expected_tokens(alpha: float, k: int) -> float:
    """(1 - α^(k+1)) / (1 - α): of a round with k drafts, k + 1 if all are accepted (Leviathan et al. 2023, eq. 1)."""
    return k + 1 if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def explain(stats: dict, length: DraftLength, bandwidth: float, pass_bytes: int) -> str:
    """Lines that explain a run.

    stats: of `generate`, with `measured_speedup` if it was measured. length: what it drafted by. bandwidth: bytes a
    second, of the memory. pass_bytes: of weights, which one pass of the target reads.
    """
    if not stats["tokens_per_s"]:
        return "  explain  the one token came with the prompt: nothing was decoded"
    lines = bound(stats, bandwidth, pass_bytes)
    if stats.get("fallback"):
        lines.append(("draft", f"it failed ({stats['fallback']}); what followed was decoded without it"))
    if stats.get("rounds"):
        lines += speculation(stats, length)
    elif "rounds" in stats and not stats["fallback"]:
        lines.append(("draft", f"nothing was drafted: {why_plain(length)}, or the text was over too soon"))
    return "\n".join(f"  {label:<9}{line}" for label, line in lines)


def bound(stats: dict, bandwidth: float, pass_bytes: int) -> list[tuple[str, str]]:
    """Decoding is bound by reading weights: how fast that would be alone, and how near the run came."""
    per_token, reached = stats["bytes_per_token"], stats["bandwidth_gb_s"] * 1e9 / bandwidth
    ids = stats["generated_tokens"]
    shared = f", for {len(ids)} rows at once" if ids and isinstance(ids[0], list) else ""
    drafts = ", the draft's included" if draft_reads(stats, pass_bytes) else ""
    note = ""
    if reached > 1.1:
        note = "; more than memory gives: the weights fit in a cache, or the machine was busier just now"
    elif reached < 0.5:
        note = "; arithmetic, attention, the work between kernels and other programs took the rest"
    return [
        (
            "weights",
            f"a pass of the target reads {pass_bytes / 1e6:.1f} MB{shared}; memory gives {bandwidth / 1e9:.1f} GB/s "
            f"(measured just now), so a pass would take at least {pass_bytes / bandwidth * 1e3:.2f} ms",
        ),
        (
            "bound",
            f"each token took {per_token / 1e6:.1f} MB of reading{drafts}, so at most {bandwidth / per_token:.1f} "
            f"tokens/s; this run made {stats['tokens_per_s']:.1f}, {reached:.0%} of that{note}",
        ),
    ]


def draft_reads(stats: dict, pass_bytes: int) -> bool:
    """Whether the run read more than its passes of the target did: a lookup reads no weights, a model does."""
    if not stats.get("rounds"):
        return False
    ids = stats["generated_tokens"]
    decoded = sum(len(row) - 1 for row in ids) if isinstance(ids[0], list) else len(ids) - 1
    return stats["bytes_per_token"] * decoded > 1.001 * pass_bytes * sum(stats["k_counts"])


def why_plain(length: DraftLength) -> str:
    """Why rounds drafted nothing: only `auto` decides against it. (The first is plain to be measured, and so is one for
    a last token.)"""
    return "nothing was proposed" if length.fixed is not None else "it did not promise to pay, or nothing was proposed"


def speculation(stats: dict, length: DraftLength) -> list[tuple[str, str]]:
    """Acceptance, costs, speed-up, and what held it back, in the rounds that drafted."""
    alpha, rounds, plain_rounds = stats["alpha"], stats["rounds"], stats["k_counts"][0]
    ks = {k: n for k, n in enumerate(stats["k_counts"]) if k and n}
    k = max(ks, key=ks.get)
    mean_k = sum(n * k for k, n in ks.items()) / rounds
    used = f"k = {k}" if len(ks) == 1 else f"k = {mean_k:.1f} on average, most often {k},"
    expected = sum(n * expected_tokens(alpha, k) for k, n in ks.items()) / rounds
    seen = sum((accepted + 1) * n for accepted, n in enumerate(stats["accept_counts"])) / sum(stats["accept_counts"])
    drafting = mean_k * length.c
    verifying = sum(n * length.v(k) for k, n in ks.items()) / rounds
    predicted, measured = expected / (drafting + verifying), stats["measured_speedup"]
    idle = ""
    if plain_rounds > max(2, 0.1 * rounds):  # a few always are plain: all costs are relative to them
        drafted = f"{plain_rounds} of {plain_rounds + rounds} rounds"
        idle = f"; {drafted} drafted nothing: {why_plain(length)}"

    verified = f"verifying {k} drafts v_{k} = {length.v(k):.2f}"
    if len(ks) > 1:
        verified = f"verifying k drafts v_k = {verifying:.2f} on average (v_{k} = {length.v(k):.2f})"

    # What the speed-up would be without each of the three: the largest gain names what held it back.
    without = {
        "the draft's cost": expected / verifying,
        "acceptance": (mean_k + 1) / (drafting + verifying),
        "the cost of verification": expected / (drafting + 1),
    }
    free, accepted, cheap = without.values()
    worst = max(without, key=without.get)
    verdict = f"{worst} held it back most" if without[worst] > 1.05 * predicted else "nothing held it back much"
    return [
        ("α", f"{alpha:.2f}: so many of the drafts that were put to the test were accepted"),
        (
            "tokens",
            f"with {used} a round should yield (1 - α^(k+1)) / (1 - α) = {expected:.2f}; it yielded {seen:.2f}{idle}",
        ),
        (
            "cost",
            f"a draft step cost c = {length.c:.2f} of a plain pass ({length.plain_s * 1e3:.1f} ms), {verified}: "
            f"k c + v_k = {drafting:.2f} + {verifying:.2f} = {drafting + verifying:.2f} a round",
        ),
        (
            "speed-up",
            f"{expected:.2f} / {drafting + verifying:.2f} = {predicted:.2f} in a round that drafts; over the run "
            f"{stats['predicted_speedup']:.2f} predicted, "
            + (f"{measured:.2f} measured" if measured else "not measured (--compare)"),
        ),
        (
            "limit",
            f"in such a round the speed-up would be {free:.2f} if drafts cost nothing, {accepted:.2f} if all were "
            f"accepted, {cheap:.2f} if verifying cost no more than a plain pass: {verdict}",
        ),
    ]
