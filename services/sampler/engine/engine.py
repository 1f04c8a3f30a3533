"""The vLLM engine behind plain dataclasses.

Invariant: vLLM's front end is started, asked and ended here and nowhere else; what one sequence asks for is
made in `params` and sent by `calls.asked`, what comes back is read in `answers`. One asyncio loop uses an
Engine; the model runs in another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import os
import secrets
import time
from dataclasses import replace
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError

from services.common.contract.errors import InvalidRequest, Unavailable
from services.common.contract.experts.routing import Routing
from services.common.contract.sample_schema import Scoring
from services.common.process.tasks import cancel_all
from services.common.weights.medium import Medium
from services.sampler.config import SamplerConfig, check_device
from services.sampler.engine import answers, child
from services.sampler.engine.calls import asked
from services.sampler.engine.calls.reports import ENDED, Reports
from services.sampler.engine.calls.workers import CALL_S, Workers
from services.sampler.engine.grammars.checking import Checks
from services.sampler.engine.logprobs import front as logprobs
from services.sampler.engine.params import Shared, bad_word_ids, vllm_params, vllm_prompt
from services.sampler.engine.runs import Run, Runs
from services.sampler.engine.sampling import (
    Change,
    Limits,
    SampleJob,
    SampleOutput,
    SamplingParams,
    ServedTokenizer,
    Tell,
    all_begun,
    served,
)
from services.sampler.engine.settings.arguments import started
from services.sampler.engine.settings.models import PAST_LOADERS, adapts
from services.sampler.engine.shifts.front import Shifts
from services.sampler.engine.shifts.full_front import ModelWeights
from services.sampler.engine.snapshot_key import Adapter
from services.sampler.worker.prompt_scores import ScorePlan, plan_of

log = logging.getLogger(__name__)

# Work on larger answers runs in a thread, so that other requests do not wait for it.
_THREAD_ABOVE_CELLS = 2**16

_ABORT_AGAIN_S = 0.02


class Engine:
    """One running vLLM engine."""

    def __init__(self, config: SamplerConfig) -> None:
        """Starts the engine's processes and loads the model; blocks until it stands.

        Must be called on the main thread: the engine core asks the kernel to end with the thread
        that started it.

        Raises:
            InvalidRequest: the configuration asks for a device that this vLLM does not have, or for what its
                device or the model cannot do.
        """
        device = str(current_platform.device_type)
        if config.device not in ("auto", device):
            raise InvalidRequest(f"--device {config.device}, but the installed vLLM runs on {device}")
        check_device(config, device)
        self._config = config
        self._llm = started(config, device)
        logprobs.install(self._llm)
        model, settings = self._llm.model_config, self._llm.vllm_config
        self.model_runner = "v2" if settings.use_v2_model_runner else "v1"
        log.info("vLLM's model runner %s computes the steps", self.model_runner.upper())
        self.device = device
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.arch = str(model.architectures[0])
        self.workers = config.workers
        self.quantization = str(model.quantization or "none")
        self.full_models = model.quantization is None and self.arch not in PAST_LOADERS
        self.adapts = adapts(config, device)
        sequences = int(settings.scheduler_config.max_num_seqs)
        self.limits = Limits(int(model.get_vocab_size()), int(model.max_model_len), sequences)
        self.batched_tokens = int(settings.scheduler_config.max_num_batched_tokens)
        """Tokens of prompts and sequences that one step computes."""
        self.kv_tokens = int(settings.cache_config.kv_cache_size_tokens or 0)
        """Tokens of prompts and outputs whose keys and values fit into its memory at once."""
        self.gpus: tuple[str, ...] = ()
        self.first_adapter_id = config.max_loras + 1
        """vLLM's own warm-up uses adapter ids 1 .. max_loras."""
        self._request_numbers = itertools.count()
        self._finished_tokens = self._given_up = 0
        self._runs = Runs(self._llm.output_processor)
        self._checks = Checks(self._llm.input_processor)
        self._reports = Reports(config.workers)
        self._shifts = Shifts(self._llm, lambda: self.dead)
        self._calls = Workers(self._llm.collective_rpc, lambda: self.dead, self._reports, CALL_S)
        self.weights = ModelWeights(self._llm, self._calls, self._runs, lambda: self.dead)

    async def prepare(self) -> None:
        """Corrects the workers and runs one request, so that the first user does not wait for it.

        Raises:
            InvalidRequest: experts are to be told, and cannot be.
        """
        async with self._reports.listening(CALL_S) as path:
            gpus = await self._calls.call("tinsmith_setup", path)
        self.gpus = tuple(gpu for gpu in gpus if gpu)
        if all(told := await self._calls.call("tinsmith_routing")):
            self.limits = replace(self.limits, routing=Routing(*told[0]))
        elif self._config.routed_experts:
            raise InvalidRequest(
                f"--routed-experts: layers of {self.arch} do not all route alike, or in a way of which vLLM "
                "tells nothing; leave it out"
            )
        prompt = [0] * min(16, self.limits.context_length - 1)
        params = SamplingParams(max_tokens=2)
        await self.sample(
            SampleJob("warm-up", None, prompt, 1, params, Scoring(prompt_logprobs=True)), adapter=None
        )

    @property
    def dead(self) -> bool:
        """One of the engine's processes is gone; only a restart of this one helps."""
        return bool(self._llm.errored) or self._reports.broken

    @property
    def running(self) -> int:
        """Sequences that the engine has not finished."""
        return int(self._llm.get_num_unfinished_requests())

    @property
    def at_rest(self) -> bool:
        """It makes no steps, whatever it has, as its weights are looked at or replaced."""
        return self.weights.at_rest

    @property
    def generated_tokens(self) -> int:
        """Tokens that it has generated since it started, for requests that are finished or still run."""
        running = self._llm.output_processor.request_states.values()
        return self._finished_tokens + sum(state.detokenizer.num_output_tokens() for state in running)

    def late(self, seconds: float) -> int:
        """Sequences that it has had for at least so long and has not begun to generate."""
        return self._runs.late(time.monotonic() - seconds)

    def tokens_of(self, request_id: str) -> int:
        """Tokens that it has generated for a request that still runs."""
        return self._runs.tokens_of(request_id)

    async def steps(self) -> int:
        """Steps that all workers have finished, and sequences that were given up: for one of which no grammar
        could be made in time there is no step. An engine that is stuck does not answer.

        Raises:
            Unavailable: the engine died.
        """
        return min(await self._calls.call("tinsmith_steps")) + self._given_up

    async def dump_stacks(self) -> None:
        """Has the engine core and its workers write where their threads are to the log, whatever they wait
        for."""
        await child.dump_stacks(os.getpid())

    def kill(self) -> None:
        """Ends the engine's processes at once; a stuck one heeds nothing else."""
        for process in multiprocessing.active_children():
            process.kill()

    async def close(self) -> None:
        """Ends what goes on in the background here; the engine's processes go on."""
        await self._calls.close()
        await self._reports.close()

    def shutdown(self, seconds: float) -> None:
        """Ends the engine's processes, killing them after `seconds`."""
        self._llm.shutdown(timeout=seconds)

    def tokenizer(self) -> ServedTokenizer:
        """The model's tokenizer. Takes a while; thread-safe. Raises as `served`."""
        return served(self._llm.get_tokenizer())

    async def sample(self, job: SampleJob, adapter: Adapter | None, tell: Tell | None = None) -> SampleOutput:
        """Generates what the job has not come to yet. Cancelling the caller aborts the request in the engine.

        Args:
            tell: is told the tokens as they come.

        Returns:
            What the job has come to; sequences are `cancelled` when it was interrupted.

        Raises:
            InvalidRequest: vLLM refused the request, or the weights give no numbers.
            Unavailable: the engine died.
            Internal: vLLM ended a sequence for another reason than stop, length or an interruption, or gave
                no log-probability.
        """
        run = self._runs.begin(job.request_id)
        run.take(adapter, job.version)
        try:
            return await self._run(job, tell, run)
        finally:
            if run.interruption is not None:
                await cancel_all([run.interruption])
            self._runs.end(job.request_id, run)

    def interrupt(self, request_id: str, at_once: bool) -> None:
        """Has `sample` return what a request has come to, if it runs.

        Args:
            at_once: as it is; otherwise each sequence makes a token first, if it has made none.
        """
        if (run := self._runs.find(request_id)) is not None:
            run.at_once |= at_once
            work = run.interruption or asyncio.create_task(self._abort(run), name=f"interrupt {request_id}")
            run.interruption = work

    async def _abort(self, run: Run) -> None:
        while not self.dead:
            # What vLLM is just about to take on is not known to it yet.
            with contextlib.suppress(EngineDeadError):
                await self._llm.abort(list(run.names) if run.at_once else self._runs.begun(run))
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def shift(self, request_id: str, adapter: Adapter, version: int) -> None:
        """Has a job that runs with an adapter go on with this one, of this version, and keep its keys and
        values. Returns when all of its sequences do or have ended.

        Raises:
            Unavailable, Internal: the engine did not say so; what made what, answers tell.
        """
        if (run := self._runs.find(request_id)) is not None:
            await self._shifts.shift(run, adapter, version)

    async def _run(self, job: SampleJob, tell: Tell | None, run: Run) -> SampleOutput:
        seed = secrets.randbits(64) if job.params.seed is None else job.params.seed
        plan = plan_of(job.scoring, len(job.prompt), seed, job.params.temperature)
        shared = Shared(
            await self._checks.check(job.constraint),
            await bad_word_ids(job.params.steering.bad_words, self._llm.input_processor),
        )
        before = all_begun(job)
        # The first sequence scores the prompt for all of them.
        scores = None if plan.empty or before[0].tokens or not plan.needed().size else plan
        goes_on = [index for index, sequence in enumerate(before) if sequence.stop_reason == "cancelled"]
        calls = [
            self._generate(job, index, before[index].tokens, None if index else scores, shared, tell, run)
            for index in goes_on
        ]
        done = dict(zip(goes_on, await asked.together(calls, job.request_id), strict=True))
        made = [done.get(index) for index in range(job.num_samples)]
        sampled = sum(len(each.output.outputs[0].token_ids) for each in made if each is not None)
        if sampled * (1 + job.scoring.topk_sample_logprobs) + plan.rows > _THREAD_ABOVE_CELLS:
            return await asyncio.to_thread(answers.whole, job, plan, made)
        return answers.whole(job, plan, made)

    async def _generate(
        self,
        job: SampleJob,
        index: int,
        before: list[int],
        plan: ScorePlan | None,
        shared: Shared,
        tell: Tell | None,
        run: Run,
    ) -> answers.Made | None:
        """What vLLM makes of a sequence that has come to `before`; None: it was interrupted before that."""
        if run.at_once:
            return None
        adapter, first, tokens = run.adapter, Change(0, run.version), 0
        lora = adapter and LoRARequest(adapter.name, adapter.id, adapter.directory)
        # The engine's own number keeps ids unique when a gateway sends one request twice.
        name = f"{job.request_id}-{index}-{next(self._request_numbers)}"
        prompt = vllm_prompt(job, before, self.weights.present)

        def take(output: RequestOutput, since: int) -> None:
            # Where a constraint has a dead end, its last token was not allowed: `whole` says so.
            if tell is None or not output.outputs[0].token_ids or output.outputs[0].finish_reason == "error":
                return
            made = answers.Made(output, self._shifts.changes(name, run, first))
            for new in answers.new_tokens(job, made, index, len(before) + since):
                tell(new)

        self._runs.enter(run, name, time.monotonic())
        try:
            stream, start = tell is not None, len(before)
            params = vllm_params(job, index, self.limits, plan, shared, stream=stream, start=start)
            output = await asked.output(self._llm, name, prompt, params, lora, take)
            changes = self._shifts.changes(name, run, first)
            tokens = len(output.outputs[0].token_ids)
        except EngineDeadError as error:
            raise Unavailable(ENDED) from error
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequest(str(error)) from error
        finally:
            self._shifts.forget(name)
            self._runs.leave(run, name, tokens)
        self._finished_tokens += tokens
        self._given_up += output.outputs[0].finish_reason == "error"
        answers.note_update(job, output)
        return answers.Made(output, changes)

    async def join_group(
        self, epoch: int, first_rank: int, world_size: int, medium: Medium, seconds: float
    ) -> None:
        """Makes all workers members of weight group `epoch`.

        Raises:
            DeadlineExceeded: a member did not come.
        """
        arguments = (epoch, first_rank, world_size, medium, self._config.base_model, seconds)
        await self._calls.run("tinsmith_join", arguments, seconds)

    async def leave_group(self) -> None:
        """Gives the weight group up."""
        await self._calls.call("tinsmith_leave")

    async def receive_adapter(
        self, adapter_id: int, epoch: int, rank: int, specs: list[list[Any]], checksum: int, seconds: float
    ) -> int:
        """Receives an adapter over the weight group; returns its bytes in memory, of all workers.

        Args:
            specs: [name, dtype, shape] of each tensor of the packed buffer.

        Raises:
            DataLoss, DeadlineExceeded, InvalidRequest.
        """
        arguments = (epoch, adapter_id, rank, specs, checksum, seconds)
        return await self._calls.run("tinsmith_receive", arguments, seconds)

    async def load_adapter(self, adapter_id: int, directory: str, seconds: float) -> int:
        """Loads an adapter from a PEFT directory; returns its bytes in memory, of all workers."""
        return await self._calls.run("tinsmith_load", (adapter_id, directory), seconds)

    async def drop_adapters(self, adapter_ids: list[int]) -> None:
        """Frees adapters that no request uses, at some later time if the workers do not answer."""
        await self._calls.free("tinsmith_drop", adapter_ids)
