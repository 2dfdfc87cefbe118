"""The processes of a tensor-parallel run: rank 0 leads, the others follow.

Rank 0 runs the program. Whatever it does with a model (load it, allocate caches, compile, a pass) it first tells the
others, in a line of JSON over a socket, and they do it with their shares. So there is one reader of input, one random
generator and one clock, and nothing that ranks would have to agree on. The sockets are also how a rank learns at once
that another has ended: an operating system closes what a dead process had open.
"""

import json
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import generate
import kernels
import tp
from model import Transformer

PATIENCE = timedelta(minutes=10)  # of a rank with one that loads or compiles more slowly
GRACE = 2.0  # seconds for a rank to end in good order, or for the news that another is lost


class Led(Transformer):
    """Rank 0's share of a model. What is done with it, all ranks do."""

    def __call__(self, idx: Tensor, input_pos: Tensor, logits_to_keep: int = 0) -> Tensor:
        message = torch.stack((idx, self.check_positions(idx, input_pos)))
        with self.team.order("forward", self.number, *idx.shape, logits_to_keep):
            dist.broadcast(message, src=0)
            return super().__call__(*message, logits_to_keep)

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        super().setup_caches(max_batch_size, max_seq_length)  # what it refuses, the others need not hear
        with self.team.order("setup_caches", self.number, max_batch_size, max_seq_length):
            pass

    def share_prompt(self, rows: int, length: int) -> None:
        with self.team.order("share_prompt", self.number, rows, length):
            super().share_prompt(rows, length)


def compile_model(model: Transformer, *how: int) -> None:
    """`generate.compile_model`, on every rank that has a share of `model`."""
    if isinstance(model, Led):
        model.team.send("compile_model", model.number, *how)
    generate.compile_model(model, *how)


class Team:
    """The processes of one run. `sockets`: rank 0's to the ranks 1, 2, …; another rank's one to rank 0."""

    def __init__(self, rank: int, size: int, sockets: list[socket.socket]):
        self.rank, self.size, self.sockets = rank, size, sockets
        self.models: list[Transformer] = []
        self.last_word = threading.Lock()  # whoever takes it may say why the run ends
        self.goes_on = False  # after ctrl-C, with another prompt
        self.in_pass = self.interrupted = False

    def send(self, *words: object) -> None:
        for other in self.sockets:
            with suppress(OSError):  # whoever watches that rank says that it has gone
                other.sendall(json.dumps(words).encode() + b"\n")

    def load_share(self, path: Path | str, device: torch.device | str, precision: str) -> Transformer:
        """Load this rank's share to its own device. Raises ValueError if there is none."""
        device = torch.device(device)
        if device.type == "mps":
            raise ValueError("--device mps goes with one process")
        if device.type == "cuda":
            local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
            if local_rank >= torch.cuda.device_count():
                raise ValueError(f"{torch.cuda.device_count()} GPUs are too few for the processes on this machine")
            torch.cuda.set_device(local_rank)
        self.models.append(tp.load_share(path, device, getattr(torch, precision), self.rank, self.size))
        return self.models[-1]

    # ---- rank 0

    def load_model(self, path: Path | str, device: torch.device | str, precision: torch.dtype) -> Transformer:
        """`checkpoint.load_model` on every rank. Returns rank 0's share, which leads the others'."""
        words = str(path), str(device), str(precision).removeprefix("torch.")
        if str(device) == "cpu":
            kernels.load()  # built before the others look for it
        with self.order("load_share", *words):
            model = self.load_share(*words)
        model.__class__, model.team, model.number = Led, self, len(self.models) - 1
        return model

    @contextmanager
    def order(self, *words: object) -> Iterator[None]:
        """Tell the others to do something, and do it too, within. Where the run goes on after ctrl-C, that has to wait
        meanwhile: the others must not be left in the middle of a pass."""
        self.in_pass = True
        try:
            self.send(*words)
            yield
        except RuntimeError as error:
            time.sleep(GRACE)  # if a rank has gone, `watch` ends this process meanwhile, with a better message
            # The others are left in the middle of a pass, so this is no draft's error that the target could do without.
            raise SystemExit(f"error: rank 0 failed: {str(error).splitlines()[0]}") from error
        finally:
            self.in_pass = False
        if self.interrupted:
            self.interrupt()

    def interrupt(self, *signal: object) -> None:
        """What ctrl-C does. Torchrun gets it too and ends all its processes: nothing goes on then."""
        torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        self.interrupted = self.in_pass and self.goes_on and not torchrun
        if not self.interrupted:
            raise SystemExit(130) if torchrun else KeyboardInterrupt

    def watch(self, rank: int) -> None:
        """Wait for the one thing that another rank ever says, why it stops; or for its death."""
        message = ""
        with suppress(OSError):  # reset by a rank that died
            message = self.sockets[rank - 1].makefile().readline()
        if self.last_word.acquire(blocking=False):
            code, text = json.loads(message) if message else (1, "has gone: killed, or its machine is lost")
            print(f"error: rank {rank} {text}", file=sys.stderr, flush=True)
            self.send("exit", code)
            os._exit(code)

    def dismiss(self, code: int) -> None:
        self.last_word.acquire()  # not to be had while `watch` is about to end this process
        self.send("exit", code)

    # ---- the other ranks

    def follow(self) -> int:
        """Do what rank 0 says until it says exit. Returns the exit code."""
        orders = queue.SimpleQueue()
        threading.Thread(target=self.listen, args=(orders,), daemon=True).start()
        try:
            while (order := orders.get())[0] != "exit":
                self.obey(*order)
            return order[1]
        except Exception as error:
            time.sleep(GRACE)  # as in `order`
            refused = isinstance(error, ValueError | OSError)
            self.send(*(2, f"says: {error}") if refused else (1, f"failed: {type(error).__name__}: {error}"))
            time.sleep(PATIENCE.total_seconds())  # until told to exit
            return 1

    @torch.inference_mode()
    def obey(self, verb: str, *words: object) -> None:
        if verb == "load_share":
            self.load_share(*words)
            return
        model, *words = self.models[words[0]], *words[1:]
        if verb == "compile_model":
            compile_model(model, *words)
        elif verb == "forward":
            message = torch.empty(2, *words[:2], dtype=torch.int64, device=model.norm.weight.device)
            dist.broadcast(message, src=0)
            model(*message, words[2])
        else:
            getattr(model, verb)(*words)

    def listen(self, orders: queue.SimpleQueue) -> None:
        """Pass orders on. An exit that the main thread does not come round to is carried out here."""
        code = None
        try:
            for line in self.sockets[0].makefile():
                orders.put(json.loads(line))
                if json.loads(line)[0] == "exit":
                    code = json.loads(line)[1]
                    time.sleep(GRACE)
        finally:
            if code is None and self.rank == 1:
                print("error: rank 0 has gone: killed, or its machine is lost", file=sys.stderr, flush=True)
            os._exit(1 if code is None else code)


# ---------------------------------------------------------------- coming together


@contextmanager
def joined() -> Iterator[Team | None]:
    """The team that this process belongs to, as torchrun's environment says; None where it is alone. When the block
    ends on rank 0, however it does, the other ranks end."""
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdecimal():
        raise ValueError(f"WORLD_SIZE {size!r} in the environment is no number of processes")
    if int(size) <= 1:
        yield None
        return
    share_cores(int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    try:
        team = join()
    except RuntimeError as error:
        raise ValueError(f"the {size} processes did not come together: {str(error).splitlines()[0]}") from None
    if team.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        yield team
        return
    before = signal.signal(signal.SIGINT, team.interrupt)
    for rank in range(1, team.size):
        threading.Thread(target=team.watch, args=(rank,), daemon=True).start()
    code = 1
    try:
        yield team
        code = 0
    except BaseException as error:
        code = exit_code(error)
        raise
    finally:
        team.dismiss(code)
        signal.signal(signal.SIGINT, before)


def exit_code(error: BaseException) -> int:
    """That of the command line for what ended it."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    kinds = {BrokenPipeError: 0, ValueError: 2, OSError: 2, KeyboardInterrupt: 130}
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), 1)


def join() -> Team:
    """Wait until all processes are there and connected."""
    store, rank, size = next(dist.rendezvous("env://", timeout=PATIENCE))
    store = dist.PrefixStore("onepass", store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    host, sockets = os.environ["MASTER_ADDR"], {}
    if rank == 0:
        # On every interface: what other machines call MASTER_ADDR may be a loopback address in this one's hosts file.
        with socket.create_server(("", 0), family=socket.getaddrinfo(host, 0)[0][0]) as server:
            word = secrets.token_hex(16)
            store.set("door", f"{server.getsockname()[1]} {word}")
            server.settimeout(GRACE)
            until = time.monotonic() + PATIENCE.total_seconds()
            while len(sockets) < size - 1:
                try:
                    other = server.accept()[0]
                except TimeoutError:
                    if store.check(["failed"]):
                        raise RuntimeError(store.get("failed").decode()) from None
                    if time.monotonic() > until:
                        missing = sorted(set(range(1, size)) - set(sockets))
                        raise RuntimeError(f"no word from rank {', '.join(map(str, missing))}") from None
                    continue
                if number := caller(other, word):
                    sockets[number] = other
    else:
        port, word = store.get("door").decode().split()
        try:
            sockets[0] = socket.create_connection((host, int(port)), timeout=PATIENCE.total_seconds())
        except OSError as error:
            failure = f"rank {rank} does not reach rank 0 at {host}, port {port}: {error.strerror or error}"
            store.set("failed", failure)
            raise RuntimeError(failure) from None
        sockets[0].settimeout(None)
        sockets[0].sendall(f"{word} {rank}\n".encode())
    for other in sockets.values():
        other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Team(rank, size, [sockets[key] for key in sorted(sockets)])


def caller(other: socket.socket, word: str) -> int:
    """The rank of whoever connects to rank 0; 0 for a stranger, who does not know the word that the store has."""
    other.settimeout(GRACE)
    try:
        said, number = other.makefile("rb").readline().split()
        rank = int(number) if secrets.compare_digest(said, word.encode()) else 0
    except (OSError, ValueError):
        return 0
    other.settimeout(None)
    return rank


def share_cores(processes: int) -> None:
    """Give each process of this machine its part of the cores, unless OMP_NUM_THREADS says otherwise. (Torchrun sets it
    to 1 where it was not set.)"""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None or (threads == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // processes))
