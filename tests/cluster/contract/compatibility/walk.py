"""Calls all of the SDK by probes, and notes what came of each.

A probe is a function that calls one method (or command, or variable) and asserts what must come of it. It
runs once, and once more through the twin that is awaited where the SDK has one. What it raises tells the
verdict: nothing, that it works; an error of the SDK, that it is refused and why; `ClientOnly`, that no server
is asked; anything else, that it is wrong, which fails the test.
"""

from __future__ import annotations

import asyncio
import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import tinker
from click.testing import CliRunner
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError

from tests.cluster.conftest import BASE_MODEL, Cluster
from tests.cluster.contract.compatibility import sdk

WORKS, REFUSED, CLIENT_ONLY, WRONG = "works", "refused", "client only", "WRONG"
SECONDS = 300
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(:(train|sample):\d+)?")
_DETAIL = re.compile(r"""'detail': (['"])(.*?)\1, 'code'""")

T = TypeVar("T")


class ClientOnly(Exception):
    """What was probed asks no server; the message says what it does."""


class Refused(Exception):
    """The command line refused; the message is what it said."""


@dataclass(frozen=True)
class Probe:
    """How one thing is called.

    Attributes:
        key: "Client.method", "tinker command", an environment variable, or a kind of `sdk.choices`.
        case: what is special about this call; empty: the plain one.
    """

    key: str
    case: str
    run: Callable[[Walk], str | None]


@dataclass(frozen=True)
class Row:
    """What came of a probe. `twin`: through the method that is awaited."""

    key: str
    case: str
    twin: bool
    verdict: str
    note: str


PROBES: list[Probe] = []


def probe(key: str, case: str = "") -> Callable[[Callable[[Walk], str | None]], Callable[[Walk], str | None]]:
    """Makes a function the probe of `key`. What it returns is noted in the table."""

    def register(run: Callable[[Walk], str | None]) -> Callable[[Walk], str | None]:
        PROBES.append(Probe(key, case, run))
        return run

    return register


class Walk:
    """One walk over the SDK.

    Attributes:
        used: names of the parameters that were given, by method, constructor or command.
    """

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.used: dict[str, set[str]] = defaultdict(set)
        self.environment = {
            "HOME": str(directory),
            "TINKER_BASE_URL": cluster.base_url,
            "TINKER_API_KEY": cluster.api_key,
        }
        self._twin = False
        self._names = 0
        self._runner = asyncio.Runner()

    def rows(self) -> list[Row]:
        """Runs every probe."""
        found = []
        with self._runner:
            for one in PROBES:
                twins = (False, True) if self._has_twin(one) else (False,)
                found += [self._row(one, twin) for twin in twins]
        return found

    def _has_twin(self, one: Probe) -> bool:
        client, _, method = one.key.partition(".")
        kind = getattr(tinker, client, None)
        return not one.case and isinstance(kind, type) and sdk.has_async(kind, method)

    def _row(self, one: Probe, twin: bool) -> Row:
        self._twin = twin
        verdict, note = self._verdict(one)
        return Row(one.key, one.case, twin, verdict, _ID.sub("…", note))

    def _verdict(self, one: Probe) -> tuple[str, str]:
        try:
            return WORKS, one.run(self) or ""
        except ClientOnly as error:
            return CLIENT_ONLY, str(error)
        except tinker.APIStatusError as error:
            body = error.body if isinstance(error.body, dict) else {}
            if error.status_code < 500 and "detail" in body:
                return REFUSED, str(body["detail"])
            return WRONG, str(error)
        except tinker.RequestFailedError as error:
            said = error.message.removeprefix("Request failed: ").partition(" for self.request_id=")[0]
            return (REFUSED if error.category == "user" else WRONG), said
        except Refused as error:
            told = _DETAIL.search(str(error))
            return REFUSED, told[2] if told else f"by the SDK itself: {error}"
        except (tinker.TinkerError, RuntimeError) as error:
            return REFUSED, f"by the SDK itself: {error}"
        except Exception as error:
            return WRONG, f"{type(error).__name__}: {error}"

    def call(self, client: object, method: str, of: str = "", **given: Any) -> Any:
        """What a method of a client comes to, waited for.

        Args:
            of: the client's name in the table, where that is not its type's.
        """
        self.used[f"{of or type(client).__name__}.{method}"].update(given)
        with warnings.catch_warnings():
            # The SDK's word that a twin will go some day.
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", tinker.ExperimentalWarning)
            if self._twin and sdk.has_async(type(client), method):
                return self._runner.run(self._awaited(client, f"{method}_async", given))
            answer = getattr(client, method)(**given)
            return answer.result(timeout=SECONDS) if isinstance(answer, tinker.APIFuture) else _whole(answer)

    async def _awaited(self, client: object, method: str, given: dict[str, Any]) -> Any:
        async with asyncio.timeout(SECONDS):
            answer = await getattr(client, method)(**given)
            return await answer if isinstance(answer, tinker.APIFuture) else answer

    def wait(self, coroutine: Any) -> Any:
        """What a coroutine comes to."""
        return self._runner.run(asyncio.wait_for(coroutine, SECONDS))

    def make(self, kind: Callable[..., T], **given: Any) -> T:
        """A client made with these arguments."""
        self.used[f"{kind.__name__}()"].update(given)
        made = kind(**given)
        if isinstance(made, tinker.ServiceClient):
            self.cluster.clients.append(made)
        return made

    def cli(self, words: str, answers: str = "", **given: Any) -> str:
        """What a command of the `tinker` command line prints.

        Args:
            answers: what is typed when it asks.

        Raises:
            Refused: it failed.
        """
        self.used[words].update(given)
        command: Any = main_cli
        for word in words.split():
            command = command.get_command(None, word)
        arguments = ["--format", "json", *words.split()]
        for parameter in command.params:
            if parameter.name not in given:
                continue
            value = given[parameter.name]
            if parameter.param_type_name == "argument":
                arguments += value if isinstance(value, list) else [value]
            else:
                arguments += [parameter.opts[0]] if parameter.is_flag else [parameter.opts[0], str(value)]
        done = CliRunner().invoke(main_cli, arguments, input=answers, env=self.environment)
        if isinstance(done.exception, TinkerCliError):
            error = done.exception
            raise Refused(f"{error.message}: {error.details}" if error.details else error.message)
        if done.exception is not None:
            raise done.exception
        return done.output

    def name(self) -> str:
        """A name that is not taken."""
        self._names += 1
        return f"n{self._names}"

    @cached_property
    def service(self) -> tinker.ServiceClient:
        return self.make(
            tinker.ServiceClient,
            base_url=self.cluster.base_url,
            api_key=self.cluster.api_key,
            user_metadata={"by": "walk"},
            project_id="walk",
            display_name="a walk",
            default_headers_overrides={"x-walk": "1"},
        )

    @cached_property
    def training(self) -> tinker.TrainingClient:
        return self.service.create_lora_training_client(BASE_MODEL, rank=8, seed=7).result()

    @cached_property
    def sampler(self) -> tinker.SamplingClient:
        return self.service.create_sampling_client(base_model=BASE_MODEL).result()

    @cached_property
    def rest(self) -> tinker.RestClient:
        return self.make(tinker.RestClient, base_url=self.cluster.base_url, api_key=self.cluster.api_key)

    @cached_property
    def admin(self) -> tinker.AdminClient:
        return self.make(tinker.AdminClient, base_url=self.cluster.base_url, api_key=self.cluster.api_key)

    @property
    def session_id(self) -> str:
        return self.training.model_id.split(":")[0]

    @cached_property
    def state(self) -> str:
        """Path of a training checkpoint that nothing changes."""
        return self.training.save_state("walk").result().path

    @cached_property
    def weights(self) -> str:
        """The same of a sampler checkpoint."""
        return self.training.save_weights_for_sampler("walk").result().path

    def new_state(self) -> str:
        """Path of a training checkpoint to do with as one likes."""
        return self.training.save_state(self.name()).result().path


def _whole(answer: Any) -> Any:
    """A client whose future acts as the client."""
    return answer.result() if type(answer).__name__.startswith("Backcompat") else answer


def window() -> dict[str, str]:
    """Yesterday and today, as the walk may have begun before midnight."""
    today = datetime.now(UTC).date()
    begin, end = today - timedelta(days=1), today + timedelta(days=1)
    return {"starting_on": f"{begin}T00:00:00Z", "ending_before": f"{end}T00:00:00Z"}
