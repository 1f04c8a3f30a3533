"""One node of a trainer with several ranks: `python -m services.trainer.world.node`.

Its ranks are processes of torch's elastic agent, which torchrun runs too. The head, node 0, has rank 0, which
serves gRPC; the other nodes, its followers, have the ranks after it. On one machine the head is the only one.

Invariant: the world lives and ends as one. A rank that dies ends its node; the others' connections to it
close, which ends them. The head then exits with an error, for its supervisor to start it anew, and followers
come to its next start by themselves, for as long as they were told to wait. What is dismissed, since the head
was asked to stop, exits 0. A node with a rank that refuses its settings ends with that rank's status, and the
head with REFUSED, whichever node has it: the same settings would be refused again.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from services.common.contract.errors import TinsmithError
from services.common.process.process import REFUSED, end_with_parent
from services.common.telemetry import logs
from services.common.worlds.nodes import (
    INTERFACE,
    LOOPBACK,
    LOOPBACK_ADDRESS,
    Nodes,
    endpoint,
    mistakes,
    on_loopback,
)
from services.trainer.world import refusals
from services.trainer.world.launch import addresses, rank_arguments
from services.trainer.world.rendezvous import Rendezvous

log = logging.getLogger("services.trainer.world.node")

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FAILED = 1
_POLL_S = 0.5
_AGAIN_S = 2.0
_STOP_S = 30
"""Longer than rank 0 takes to drain."""
_LAST_WORDS_S = 5.0
"""In which ranks see by themselves that one has ended, and tell what they know of it."""
_LOOK_S = 0.1


class _OwnLogs(DefaultLogsSpecs):
    """Ranks log where their node does, and write no files that threads of it would follow."""

    def __init__(self) -> None:
        super().__init__(log_dir=os.devnull)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return replace(super().reify(envs), tee_stdouts={}, tee_stderrs={})


class _Agent(LocalElasticAgent):
    def __init__(self, spec: WorkerSpec, meeting: Rendezvous) -> None:
        super().__init__(spec, _OwnLogs(), shutdown_timeout=_STOP_S)
        self._meeting = meeting

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Ranks may wait for one that refused its settings before it met them.

        Where one has died the others are not asked to stop: rank 0, which may wait on its device and not know
        of it, would take leave in order, and forget what the dead one lacked or was busy with.
        """
        if any(self._statuses()):
            for worker, status in zip(worker_group.workers, self._statuses(), strict=True):
                if status:
                    log.error("%s", _how_it_ended(worker.global_rank, status))
            deadline = time.monotonic() + _LAST_WORDS_S
            while None in self._statuses() and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            self._ranks().close(signal.SIGKILL)
        found: RunResult = super()._monitor_workers(worker_group)
        if found.state == WorkerState.HEALTHY and self._meeting.is_over():
            return RunResult(state=WorkerState.FAILED)
        return found

    def _statuses(self) -> list[int | None]:
        """Of this node's ranks; None of one that has not ended."""
        handlers = self._ranks().subprocess_handlers
        return [handlers[rank].proc.poll() for rank in sorted(handlers)]

    def _ranks(self) -> SubprocessContext:
        assert isinstance(self._pcontext, SubprocessContext)
        return self._pcontext

    def _construct_event(self, *_: Any, **__: Any) -> Event:
        """Nobody hears of events, and for torch's name servers would be asked what this machine is called."""
        return Event("", EventSource.AGENT)

    def _exit_barrier(self) -> None:
        """Waits for no other agent: ranks are dismissed together, and the head's store may be gone."""


def main(argv: list[str]) -> int:
    """Runs a node; the exit status."""
    nodes, ranks, args = _parse(argv)
    # As its ranks do.
    logs.configure(f"node-{nodes.rank}", _log_format(args))
    logs.take_over()
    # It warns of each signal that it gives to ranks, also of those that stop them in order.
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Of ranks that failed it names one, which mostly was ended for the sake of another.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(each.name for each in _SIGNALS)
    end_with_parent()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    # DeepSpeed's: ranks that are all here exchange by shared memory.
    os.environ["LOCAL_SIZE"] = str(ranks)
    # As torch does without an agent: to abort communicators of NCCL before a rank ends may hang.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    if nodes.count > 1:
        # Ranks have no business on other networks.
        os.environ[INTERFACE] = os.environ["NCCL_SOCKET_IFNAME"] = nodes.interface
    else:
        # NCCL reads its variable once in a process, and it brings weights to samplers, too.
        os.environ |= on_loopback(os.environ)
    try:
        while (status := _run(nodes, ranks, args)) == _FAILED and nodes.rank != 0:
            log.warning("the world ended; this node waits for the head's next start")
            time.sleep(_AGAIN_S)
        return status
    except SignalException:
        # Its ranks have ended.
        return 0
    except (TinsmithError, OSError) as error:
        log.critical("%s", error)
        return _FAILED


def _run(nodes: Nodes, ranks: int, args: list[str]) -> int:
    """One world, as far as it is on this node; the status that its node ends with, 0 if it was dismissed."""
    for number in _SIGNALS:
        # While nodes meet there is nothing to end, and nothing would hear a handler of Python's.
        signal.signal(number, signal.SIG_DFL)
    meeting = Rendezvous(nodes)
    spec = WorkerSpec(
        role="trainer",
        local_world_size=ranks,
        rdzv_handler=meeting,
        entrypoint=sys.executable,
        # torch takes what follows a dollar for the name of something it knows.
        args=tuple(argument.replace("$", "$$") for argument in rank_arguments(args)),
        max_restarts=0,
        monitor_interval=_POLL_S,
        local_addr=nodes.host if nodes.rank == 0 else None,
    )
    found = _Agent(spec, meeting).run()
    if not found.is_failed():
        return 0
    own = {failure.exitcode for failure in found.failures.values()} & {*refusals.STATUSES}
    if own and nodes.count > 1:
        # A rank that does not take its flags has no sentence for others.
        refusals.tell(f"node {nodes.rank} does not take its flags, and its log says why")
    if refusal := meeting.refusal():
        if nodes.rank == 0:
            meeting.until_heard()
        # The last line of a supervisor's log.
        log.critical("%s", refusal)
    return min(own) if own else REFUSED if refusal and nodes.rank == 0 else _FAILED


def _how_it_ended(rank: int, status: int) -> str:
    if status > 0:
        return f"rank {rank} ended with status {status}"
    means = ", which the kernel sends where memory is lacking" if status == -signal.SIGKILL else ""
    return f"rank {rank} was ended by signal {-status}{means}"


def _log_format(args: list[str]) -> str:
    """That of the ranks with these flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--log-format", default=os.environ.get("TINSMITH_LOG_FORMAT", "text"))
    return str(parser.parse_known_args(args)[0].log_format)


def _parse(argv: list[str]) -> tuple[Nodes, int, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer.world.node",
        description="One node of a trainer on one or several machines. After -- come the flags of "
        "services.trainer, the same on every node.",
    )
    parser.add_argument("--nodes", type=int, default=1, help="how many there are")
    parser.add_argument("--node-rank", type=int, default=0, help="of this one; 0 is the head")
    parser.add_argument(
        "--rendezvous",
        type=endpoint,
        metavar="HOST:PORT",
        help="of the head, where all nodes meet: its address, or for the others also its name",
    )
    parser.add_argument(
        "--interface",
        help="network interface on which this node's ranks speak with the others' (default: lo)",
    )
    parser.add_argument("--ranks", type=int, required=True, help="of the trainer on this node")
    parser.add_argument(
        "--wait", type=float, default=Nodes.wait_s, metavar="SECONDS", help="within which all nodes are there"
    )
    parser.add_argument("args", nargs=argparse.REMAINDER, help="flags of services.trainer")
    found = parser.parse_args(argv)
    if found.nodes > 1 and found.rendezvous is None:
        parser.error("several --nodes need a --rendezvous")
    if found.nodes == 1 and (found.rendezvous or found.interface):
        parser.error("--rendezvous and --interface are for several --nodes: one meets nobody")
    host, port = found.rendezvous or (LOOPBACK_ADDRESS, 0)
    interface = found.interface or LOOPBACK
    nodes = Nodes(found.nodes, found.node_rank, host, port, interface, found.wait)
    if found.ranks < 1 or found.wait <= 0:
        parser.error("--ranks and --wait must be above 0")
    for mistake in mistakes(nodes, addresses()):
        parser.error(mistake)
    return nodes, found.ranks, found.args[1:] if found.args[:1] == ["--"] else found.args


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    # Its ranks have ended. Taking PyTorch down in order takes seconds, more on a machine with much to do.
    os._exit(status)
