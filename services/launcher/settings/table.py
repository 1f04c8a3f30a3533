"""The settings of `tinsmith up`, one row each, in the groups that its help shows.

Invariant: a default is what the cluster does; "auto" says that it is decided by the machine, and how.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from services.common.contract.stand_ins import STAND_INS
from services.common.process.flags import HTTP_URL, PROXIES, Kind
from services.common.telemetry import logs
from services.common.worlds.nodes import endpoint
from services.launcher.settings.setting import Setting

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256)
"""What vLLM compiles its kernels for."""

AUTO = "auto"


def _whole(least: int, most: int = 1_000_000, *, auto: bool = False) -> Kind:
    def parse(text: str) -> int | None:
        if auto and text == AUTO:
            return None
        if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
            raise ValueError
        return int(text)

    return Kind(f"a whole number from {least} to {most}{_or_auto(auto)}", "N", parse)


def _number(above: float, most: float, *, auto: bool = False) -> Kind:
    def parse(text: str) -> float | None:
        if auto and text == AUTO:
            return None
        if not above < float(text) <= most:
            raise ValueError
        return float(text)

    return Kind(f"a number above {above:g}, at most {most:g}{_or_auto(auto)}", "X", parse)


def _or_auto(auto: bool) -> str:
    return ", or auto" if auto else ""


def _one_of(*choices: Any) -> Kind:
    found = {str(choice): choice for choice in choices}

    def parse(text: str) -> Any:
        if text not in found:
            raise ValueError
        return found[text]

    return Kind(f"one of {', '.join(found)}", "{" + ",".join(found) + "}", parse)


def _host(text: str) -> str:
    if not text or any(character.isspace() or character == "/" for character in text):
        raise ValueError
    if all(character.isdigit() or character == "." for character in text):
        ipaddress.ip_address(text)
    return text


def _word(text: str) -> str:
    if not text or not text.isprintable() or " " in text:
        raise ValueError
    return text


_PORT = Kind("a port number from 1 to 65535", "PORT", _whole(1, 65535).parse)

TABLE: dict[str, tuple[Setting, ...]] = {
    "where it is reached": (
        Setting(
            "host",
            Kind("a host name or address", "ADDRESS", _host),
            "127.0.0.1",
            "address that the gateways listen on; 0.0.0.0 lets other machines in (default: 127.0.0.1, this "
            "machine alone)",
        ),
        Setting("port", _PORT, 8000, "HTTP port for the SDK (default: 8000)"),
        Setting("grpc-port", _PORT, 8001, "port of the gRPC service (default: 8001)"),
        Setting(
            "metrics-port",
            _PORT,
            None,
            "port of Prometheus' /metrics of the first gateway; every other process has the next one: first "
            "gateways, then each model's trainer and samplers (default: none)",
        ),
        Setting(
            "public-url",
            HTTP_URL,
            None,
            "what clients reach the gateways as, when a proxy with TLS stands before them: download links "
            "begin with it (default: what each request names)",
        ),
    ),
    "models": (
        Setting(
            "max-context",
            _whole(2, 10_000_000, auto=True),
            None,
            "most tokens of a prompt and its answer, and of a training example (default: auto, what the "
            "model takes; of a sampler no more than there is memory for)",
        ),
        Setting(
            "max-lora-rank",
            _one_of(*LORA_RANKS),
            128,
            "largest rank of an adapter that is sampled from; samplers set memory aside for it (default: "
            "128)",
        ),
        Setting(
            "dtype",
            _one_of(AUTO, "float32", "bfloat16"),
            AUTO,
            "of the base model (default: auto, bfloat16 on CUDA and float32 on CPU). Adapters are trained in "
            "float32 whatever it says; on CUDA, float32 is for samplers without adapters",
        ),
    ),
    "what runs where": (
        Setting(
            "device",
            _one_of(AUTO, "cpu", "cuda"),
            AUTO,
            "where models compute (default: auto, CUDA when there is a GPU and the CUDA builds are "
            "installed). CUDA_VISIBLE_DEVICES chooses GPUs",
        ),
        Setting("gateways", _whole(1, 64), 1, "gateways that share both ports (default: 1)"),
        Setting(
            "trainer-ranks",
            _whole(1, 64, auto=True),
            None,
            "data-parallel ranks of each model's trainer on this machine, one GPU each (default: auto, the "
            "GPUs that samplers leave, else 1)",
        ),
        Setting(
            "trainer-nodes",
            _whole(1, 99),
            1,
            "machines with --trainer-ranks ranks each that train the model together. This one is the head; "
            "what to start on the others is printed (default: 1)",
        ),
        Setting(
            "trainer-rendezvous",
            Kind("ADDRESS:PORT", "ADDRESS:PORT", endpoint),
            None,
            "with --trainer-nodes, where they meet: an address of this machine (default: none)",
        ),
        Setting(
            "trainer-interface",
            Kind("the name of a network interface", "NAME", _word),
            None,
            "with --trainer-nodes, network interface on which ranks speak with the others', neither "
            "encrypted nor asked who they are (default: none)",
        ),
        Setting(
            "samplers",
            _whole(0, 64, auto=True),
            None,
            "vLLM replicas of each model; 0 = only train and save (default: auto, half of the GPUs, else 1)",
        ),
        Setting(
            "sampler-tp",
            _whole(1, 64),
            1,
            "GPUs of each replica that share its layers, by tensor parallelism (default: 1)",
        ),
        Setting(
            "sampler-pp",
            _whole(1, 64),
            1,
            "stages of each replica, by pipeline parallelism: each has --sampler-tp GPUs and a part of the "
            "layers (default: 1)",
        ),
        Setting(
            "sampler-memory",
            _number(0.05, 0.95, auto=True),
            None,
            "fraction of a GPU's memory for a sampler; a trainer on the same GPU has the rest (default: "
            "auto, 0.9 alone and 0.8 divided by the processes on it)",
        ),
    ),
    "training": (
        Setting(
            "zero-stage",
            _one_of(0, 1, 2, 3),
            0,
            "ZeRO stage of the frozen base: 3 shards it over the ranks, else each has it all; and of models"
            " that train all weights, whose optimizer state is always sharded (default: 0)",
        ),
        Setting(
            "zero-replica-ranks",
            _whole(1, 64),
            1,
            "with ZeRO stage 3, ranks in a row that hold all weights once more among themselves and gather "
            "them from each other, DeepSpeed's hpZ: a divisor below all ranks (default: 1, none do)",
        ),
        Setting(
            "zero-prefetch-elements",
            _whole(0, 100_000_000_000, auto=True),
            None,
            "with ZeRO stage 3, elements of weights that a rank gathers before it needs them; 0 = none "
            "(default: auto, DeepSpeed's 50 million)",
        ),
        Setting(
            "zero-quantized-base",
            _one_of("yes", "no"),
            "no",
            "yes: with ZeRO stage 3, ranks hold and gather the frozen base as int8: half of bfloat16's "
            "bytes, other log-probabilities than the sampler's (default: no)",
        ),
        Setting(
            "micro-batch-tokens",
            _whole(1, 10_000_000, auto=True),
            None,
            "tokens that a rank computes at once: fewer take less memory (default: auto, 8192 on "
            "CUDA and 1024 on CPU)",
        ),
        Setting(
            "offload-optimizer",
            _one_of("none", "cpu"),
            "none",
            "cpu: models that train all weights hold their optimizer state, and step, on the CPU (default: "
            "none)",
        ),
        Setting(
            "max-full-models",
            _whole(1, 1000),
            1,
            "models that train all weights which a trainer holds at once; idle ones make room for others "
            "(default: 1)",
        ),
        Setting(
            "full-snapshot-steps",
            _whole(1),
            10,
            "optimizer steps of such a model that a restart may have to repeat (default: 10)",
        ),
    ),
    "losses": (
        Setting(
            "stable-reinforce-as",
            _one_of(*STAND_INS),
            None,
            "loss that runs where a client asks for stable_reinforce, whose formula is not public; results "
            "name it in their metrics (default: such requests are refused)",
        ),
    ),
    "sampling": (
        Setting(
            "kv-cache-gib",
            _number(0, 100_000, auto=True),
            None,
            "memory of each sampler for keys and values, in GiB (default: auto, on CUDA what is left of its"
            " fraction, on CPU two contexts, and for all together a quarter of the machine or 1 GiB each)",
        ),
        Setting(
            "max-loras",
            _whole(0, 4096),
            8,
            "adapters in one step of a sampler; requests for more take turns; 0: only base and full models "
            "are sampled (default: 8)",
        ),
        Setting(
            "max-sequences",
            _whole(1, auto=True),
            None,
            "sequences that a sampler generates at once (default: auto, what vLLM takes on this device)",
        ),
        Setting(
            "max-batched-tokens",
            _whole(1, auto=True),
            None,
            "tokens of prompts and sequences in a sampler's step (default: auto, vLLM's of this device)",
        ),
        Setting(
            "kv-cache-dtype",
            _one_of("auto", "fp8"),
            "auto",
            "of keys and values; fp8 has room for twice as many, on CUDA, and changes log-probabilities "
            "(default: auto, the model's)",
        ),
        Setting(
            "head-dtype",
            _one_of("auto", "float32"),
            "auto",
            "in which samplers compute logits; float32 brings log-probabilities of a bfloat16 model nearer "
            "to the trainer's (default: auto, the model's)",
        ),
        Setting(
            "quantization",
            _one_of(AUTO, "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"),
            AUTO,
            "in which samplers hold weights, on CUDA, quantised while they load; changes log-probabilities, "
            "and full models are not sampled then (default: auto, as the model's files are)",
        ),
        Setting(
            "model-runner",
            _one_of(AUTO, "v1", "v2"),
            AUTO,
            "which of vLLM's two computes the steps of samplers: with another one a seed gives other tokens "
            "(default: auto, v1 on a CPU, and where tokens are drafted without --routed-experts, else what "
            "vLLM takes)",
        ),
        Setting(
            "speculative-ngram-tokens",
            _whole(0, 128),
            0,
            "tokens that samplers draft for each sequence and step, from what followed its last five tokens "
            "when they came before; tokens and log-probabilities stay what they are (default: 0, none)",
        ),
        Setting(
            "routed-experts",
            _one_of("yes", "no"),
            "no",
            "yes: samples may ask which experts had their tokens on GPUs too, where samplers then note those "
            "of all tokens; every --model must have routed experts then (default: no, on a CPU alone)",
        ),
        Setting(
            "enforce-eager",
            _one_of("yes", "no"),
            "no",
            "yes: samplers compile nothing, and start sooner (default: no; on CPUs only with --max-loras 0)",
        ),
    ),
    "logs": (
        Setting(
            "log-format",
            _one_of(*logs.FORMATS),
            "text",
            "of the processes' logs in DATA_DIR/logs: text, lines to read, or json, objects to search "
            "(default: text)",
        ),
        Setting(
            "access-log",
            _one_of("yes", "no"),
            "no",
            "yes: they have a line for every request and call (default: no)",
        ),
    ),
    "wires": (
        Setting(
            "tls-cert",
            Kind("a file", "FILE", str),
            None,
            "PEM certificate, with its chain, of the HTTP and the gRPC port; read again when it rotates "
            "(default: none, in the clear)",
        ),
        Setting("tls-key", Kind("a file", "FILE", str), None, "PEM key of that certificate"),
        Setting(
            "trusted-proxy",
            Kind(PROXIES.says, PROXIES.unit, lambda text: ",".join(PROXIES.parse(text))),
            None,
            "proxies, by address or network, whose X-Forwarded-For and X-Forwarded-Proto are believed "
            "(default: none)",
        ),
        Setting(
            "mtls",
            _one_of("on", "off"),
            "on",
            "gateways, trainers and samplers call each other by mutual TLS, with certificates that are made "
            "in DATA_DIR/tls and renewed; so no other user of this machine can call a trainer (default: on)",
        ),
    ),
    "state": (
        Setting(
            "data-dir",
            Kind("a directory", "DIR", str),
            "data",
            "checkpoints, snapshots, logs, pid files and API keys (default: ./data)",
        ),
        Setting(
            "checkpoint-store",
            Kind("a directory or URL", "DIR_OR_URL", str),
            "",
            "keep named checkpoints and exports here: a directory, or a URL such as s3://bucket/prefix with"
            " credentials in the environment (default: in the data directory)",
        ),
        Setting(
            "redis-url",
            Kind("a URL", "URL", str),
            None,
            "use this Redis, not the embedded one; a URL with a password is given as TINSMITH_REDIS_URL",
        ),
        Setting(
            "redis-appendfsync",
            _one_of("always", "everysec"),
            None,
            "when the embedded Redis syncs its file: `always` keeps every acknowledged request even when "
            "the machine loses power, `everysec` all but the last second, and is faster (default: everysec)",
        ),
    ),
}

ROWS = {row.name: row for rows in TABLE.values() for row in rows}
