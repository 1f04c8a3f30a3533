"""What `tinsmith up` shows: who is still loading, warnings from the logs, and what to export.

On a terminal one line says what is waited for, and what that does by its log; elsewhere one does every half
minute.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Errors of any kind, but only our own warnings: the libraries warn about what is meant to be so.
_NOTEWORTHY = re.compile(
    r'\b(ERROR|CRITICAL|Traceback)\b|^\d\d:\d\d:\d\d WARNING|^{"time".*"level": "WARNING"|^[\w.]*Error\b'
)
_OURS = re.compile(r"\d\d:\d\d:\d\d [A-Z]+ +\[[^]]*\] [\w.]+: (.*)")
_AGAIN_S = 30.0
"""Where there is no terminal, what is waited for is said this often."""
_CLEAR = "\r\033[K"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_GB = 1e9
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


# Trains a model on one sentence and has it speak.
_NEXT = """\
{python} - <<'END'
import tinker
from tinker import types
model = tinker.ServiceClient().create_lora_training_client("{model}", rank=8).result()
ids = model.get_tokenizer().encode("A tinsmith makes things out of tinplate.")
text = types.ModelInput.from_ints(ids[:-1])
targets = {{"target_tokens": ids[1:], "weights": [1.0] * len(ids[1:])}}
datum = types.Datum(model_input=text, loss_fn_inputs=targets)
for step in range(8):
    loss = model.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"]
    model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    print("step", step, "loss", round(loss, 3))
sampler = model.save_weights_and_get_sampling_client().result()
said = sampler.sample(types.ModelInput.from_ints(ids[:4]), 1, types.SamplingParams(max_tokens=8)).result()
print(model.get_tokenizer().decode(ids[:4] + said.sequences[0].tokens))
END
"""


def _next(model: str) -> str:
    python = shlex.quote(sys.executable)
    install = "" if importlib.util.find_spec("tinker") else f"{python} -m pip install tinker\n"
    return install + _NEXT.format(model=model, python=python)


@dataclass(frozen=True)
class Endpoint:
    """Where gateways listen."""

    host: str
    port: int
    grpc_port: int
    public_url: str | None = None
    tls: bool = False

    @property
    def _near(self) -> str:
        """The address for this machine."""
        return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)

    @property
    def _scheme(self) -> str:
        return "https" if self.tls else "http"

    @property
    def base_url(self) -> str:
        return f"{self._scheme}://{self._near}:{self.port}"

    @property
    def grpc_address(self) -> str:
        return f"{self._near}:{self.grpc_port}"

    @property
    def note(self) -> str:
        """What those on other machines need to know."""
        if self.public_url:
            return f"From other machines: TINKER_BASE_URL={self.public_url}"
        if self.host in _LOOPBACK:
            return (
                "Only this machine reaches it; from another one use `ssh -L "
                f"{self.port}:localhost:{self.port} {socket.gethostname()}`, or start it with --host 0.0.0.0."
            )
        name = socket.gethostname() if self._near != self.host else self.host
        reached = f"From other machines: TINKER_BASE_URL={self._scheme}://{name}:{self.port}."
        if self.tls:
            return reached
        return (
            f"{reached} Keys and data travel in the clear: keep it to a network that you trust, or give it a "
            "certificate with --tls-cert and --tls-key."
        )


def downloaded(source: str) -> int:
    """Bytes that this machine has of a model of the Hugging Face hub, also while it is downloaded."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.environ.get("HF_HOME") or home) / "hub"
    cache = Path(os.environ.get("HF_HUB_CACHE") or cache).expanduser()
    blobs = (cache / f"models--{source.replace('/', '--')}" / "blobs").glob("*")
    found = 0
    for blob in blobs:
        # One that was under way is renamed when it is whole.
        with contextlib.suppress(FileNotFoundError):
            found += blob.stat().st_blocks * 512
    return found


def _doing(line: str) -> str:
    """What a process of ours says in a line of its log; empty = nothing."""
    if line.startswith('{"time"'):
        with contextlib.suppress(ValueError):
            return " ".join(str(json.loads(line).get("message", "")).split())
    found = _OURS.match(line)
    return found[1] if found else ""


class Progress:
    """Prints to stdout.

    Args:
        verbose: every line of every log.
        hub: models that come from the Hugging Face hub, by their ids.
    """

    def __init__(self, log_dir: Path, verbose: bool, hub: Sequence[str] = ()) -> None:
        self._log_dir = log_dir
        self._verbose = verbose
        self._hub = hub
        self._offsets: dict[Path, int] = {}
        self._started = time.monotonic()
        self._tty = sys.stdout.isatty()
        self._spinner = itertools.cycle(_SPINNER)
        self._serving = False
        self._said: dict[str, str] = {}
        """By process, what its log says that it does."""
        self._say_at = self._started + _AGAIN_S

    def note(self, text: str) -> None:
        """One line that stays."""
        self._write(f"{_CLEAR if self._tty else ''}{text}\n")

    def downloads(self) -> None:
        """Says which models are downloaded before they load."""
        for source in self._hub:
            if not downloaded(source) and not os.environ.get("HF_HUB_OFFLINE"):
                self.note(f"{source} is not here yet: it is downloaded from the Hugging Face hub first")

    def waiting(self, names: list[str]) -> None:
        """Shows who is still loading, and what the first of them does at present."""
        self.follow()
        now = time.monotonic()
        if not names or not (self._tty or now >= self._say_at):
            return
        self._say_at = now + _AGAIN_S
        here = "".join(f"; {downloaded(source) / _GB:.1f} GB of {source} are here" for source in self._hub)
        does = self._said.get(names[0], "")
        said = f"{now - self._started:3.0f} s  loading {', '.join(names)}{here}{does and f'; {does}'}"
        if self._tty:
            columns = shutil.get_terminal_size().columns
            self._write(_CLEAR + f"{next(self._spinner)} {said}"[: columns - 1])
        else:
            self.note(said.strip())

    def ready(self, endpoint: Endpoint, api_key: str, model: str) -> None:
        """Says how to use the cluster."""
        self._serving = True
        self.note(
            f"\nTinsmith is up (gRPC on {endpoint.grpc_address}). In another terminal:\n\n"
            f"    export TINKER_BASE_URL={endpoint.base_url}\n"
            f"    export TINKER_API_KEY={api_key}\n"
            f"\n{_next(model)}\n{endpoint.note}\nCtrl-C stops it.\n"
        )

    def follow(self) -> None:
        """Prints what the logs have got since the last call: all of it when verbose, else what is
        noteworthy once the cluster serves."""
        for path in sorted(self._log_dir.glob("*.log")):
            for line in self._new_lines(path):
                if not self._serving:
                    self._said[path.stem] = _doing(line) or self._said.get(path.stem, "")
                if self._verbose or (self._serving and _NOTEWORTHY.search(line)):
                    self.note(f"{path.stem:>10} | {line}")

    def _new_lines(self, path: Path) -> list[str]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            data = file.read(1 << 20)
        # A line is printed once it is whole.
        data = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = self._offsets.get(path, 0) + len(data)
        return data.decode(errors="replace").splitlines()

    def _write(self, text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError:
            # The terminal was closed; the cluster must still be stopped in order.
            sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
            self._tty = False
