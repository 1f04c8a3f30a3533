"""What `tinsmith up` can be told, and how it says what is wrong."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from services.common.contract.errors import InvalidRequest
from services.launcher import cli, plan
from services.launcher.settings import options
from services.launcher.settings.table import ROWS, TABLE
from services.sampler.config import LORA_RANKS

CPU = options.Machine(cores=(0, 1), gpus=(), cuda_build=False, addresses={})
EIGHT = options.Machine(cores=tuple(range(64)), gpus=tuple("01234567"), cuda_build=True, addresses={})


def asked(*words: str, machine: options.Machine = CPU, **environment: str) -> plan.Options:
    parser = cli._parser()
    flags, flags_unknown = parser.parse_known_args(["up", *words])
    flags.unknown = flags_unknown
    return options.options(flags, machine, environment)[0]


def refused(*words: str, machine: options.Machine = CPU, **environment: str) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        asked(*words, machine=machine, **environment)
    return caught.value.message.splitlines()


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    return str(file)


def test_every_setting_has_its_field_in_the_plan_and_the_other_way_round() -> None:
    planned = {field.name for field in fields(plan.Options)} - {"models", "cores", "gpus"}
    assert {name.replace("-", "_") for name in ROWS} - {"redis_url"} == planned


def test_a_default_of_the_table_is_that_of_the_plan() -> None:
    chosen, bare = asked(), plan.Options(models=(), data_dir=Path("data").resolve())
    assert chosen == bare


def test_the_ranks_are_those_that_a_sampler_takes() -> None:
    kind = ROWS["max-lora-rank"].kind
    assert [kind.parse(str(rank)) for rank in LORA_RANKS] == list(LORA_RANKS)
    assert ROWS["max-lora-rank"].default == 128


def test_flags_come_before_the_file_and_the_file_before_the_environment(tmp_path: Path) -> None:
    file = written(tmp_path, "port = 1\ngrpc-port = 2\n")
    chosen = asked("-f", file, "--port", "7", TINSMITH_GRPC_PORT="8", TINSMITH_GATEWAYS="3")
    assert (chosen.port, chosen.grpc_port, chosen.gateways) == (7, 2, 3)


def test_a_file_names_models_and_flags_take_their_place(tmp_path: Path) -> None:
    file = written(tmp_path, '[models]\n"a/one" = "org/one"\n"b/two" = "org/two"\n')
    assert asked("-f", file).models == (plan.Model("a/one", "org/one"), plan.Model("b/two", "org/two"))
    assert asked("-f", file, "--model", "c/d=org/x").models == (plan.Model("c/d", "org/x"),)


@pytest.mark.parametrize("between", [",", " ", "\n", ", ", " ,\n"])
def test_a_variable_names_models(between: str) -> None:
    told = between.join(("a/one=org/one", "b/two=org/two"))
    assert asked(TINSMITH_MODEL=told).models == (
        plan.Model("a/one", "org/one"),
        plan.Model("b/two", "org/two"),
    )


def test_flags_and_the_file_come_before_the_variable_that_names_models(tmp_path: Path) -> None:
    file = written(tmp_path, '[models]\n"a/one" = "org/one"\n')
    assert asked("-f", file, TINSMITH_MODEL="b/two=org/two").models == (plan.Model("a/one", "org/one"),)
    assert asked("--model", "c/d=org/x", TINSMITH_MODEL="b/two=org/two").models == (
        plan.Model("c/d", "org/x"),
    )
    bare = written(tmp_path, "port = 9000\n")
    assert asked("-f", bare, TINSMITH_MODEL="b/two=org/two").models == (plan.Model("b/two", "org/two"),)


def test_a_variable_without_a_model_is_as_none() -> None:
    assert asked(TINSMITH_MODEL=" ").models == ()


def test_every_model_of_the_variable_that_is_wrong_is_told() -> None:
    told = refused(TINSMITH_MODEL="nonsense,a/b=/no/such,c/d=org/x")
    assert told[0] == "2 things are to be changed:"
    assert "TINSMITH_MODEL: 'nonsense' is not NAME=PATH_OR_HUB_ID" in told[1]
    assert "TINSMITH_MODEL: 'a/b=/no/such': there is no directory /no/such" in told[2]


def test_every_mistake_is_told_in_one_answer(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        'port = 70000\nmax-lora-rnk = 8\ngateways = true\nzero-stage = "9"\n[models]\n"a/b" = "/no/such"\n',
    )
    words = ("-f", file, "--bogus", "--device", "cuda", "--samplers", "-1", "--kv-cache-gib", "nan")
    told = refused(*words, TINSMITH_DTYPE="float16", TINSMITH_MAX_LORA_RNK="8")
    assert told[0] == "11 things are to be changed:"
    for part in (
        "'--bogus' is no flag of tinsmith up",
        "no setting max-lora-rnk; did you mean max-lora-rank?",
        f"port in {file} must be a port number from 1 to 65535, not 70000",
        f"gateways in {file} must be a whole number from 1 to 64, not True",
        f"zero-stage in {file} must be one of 0, 1, 2, 3, not '9'",
        "--samplers must be a whole number from 0 to 64, or auto, not '-1'",
        "--kv-cache-gib must be a number above 0",
        "TINSMITH_DTYPE must be one of auto, float32, bfloat16, not 'float16'",
        "TINSMITH_MAX_LORA_RNK is no variable of Tinsmith; did you mean TINSMITH_MAX_LORA_RANK?",
        "there is no directory /no/such",
        "shows no NVIDIA GPU",
    ):
        assert any(part in line for line in told), part


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("port = ", "is not TOML"),
        ("models = 3", "must be a table of names and sources"),
        (
            '[models]\n"a/b" = "org/m"\na = 3',
            "the model 'a' must have a directory or hub id in quotes, not 3",
        ),
        ('[models]\n"a/b" = "org/m"\nport = 9000', "port stands below [models]"),
        ('[models]\n"a/b" = "org/m"\nhost = "0.0.0.0"', "host stands below [models]"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    assert complaint in "\n".join(refused("-f", written(tmp_path, text)))


def test_a_file_that_is_not_there_is_refused() -> None:
    assert refused("-f", "/no/such.toml") == ["/no/such.toml cannot be read: No such file or directory"]


def test_auto_is_what_no_word_means() -> None:
    autos = [row.name for row in ROWS.values() if row.kind.says.endswith("or auto")]
    assert {"trainer-ranks", "samplers", "max-context", "kv-cache-gib"} <= set(autos)
    words = [word for name in autos for word in (f"--{name}", "auto")]
    assert asked(*words, machine=EIGHT) == asked(machine=EIGHT)


def test_eight_gpus_train_and_sample_in_halves() -> None:
    chosen = asked("--model", "a/b=org/m", machine=EIGHT)
    assert (chosen.device, chosen.trainer_ranks, chosen.samplers) == ("cuda", 4, 4)
    wide = asked("--model", "a/b=org/m", "--sampler-tp", "4", machine=EIGHT)
    assert (wide.trainer_ranks, wide.samplers) == (4, 1)
    staged = asked("--model", "a/b=org/m", "--sampler-tp", "2", "--sampler-pp", "2", machine=EIGHT)
    assert (staged.trainer_ranks, staged.samplers) == (4, 1)


def test_a_context_holds_a_prompt_and_an_answer() -> None:
    assert "--max-context must be a whole number from 2" in refused("--max-context", "1")[0]
    assert asked("--max-context", "2").max_context == 2


def test_a_cpu_build_is_not_used_for_gpus() -> None:
    cpu_build = options.Machine(cores=(0,), gpus=("0",), cuda_build=False, addresses={})
    assert asked(machine=cpu_build).device == "cpu"
    assert "make setup DEVICE=cuda" in refused("--device", "cuda", machine=cpu_build)[0]


@pytest.mark.parametrize("url", ["ftp://a", "https://", "https://key@a", "https://a?b=c", "a.example.com"])
def test_a_public_url_of_another_form_is_refused(url: str) -> None:
    assert "--public-url must be an http(s) URL" in refused("--public-url", url)[0]
    assert asked("--public-url", "https://a.example.com/b/").public_url == "https://a.example.com/b"


def test_help_has_every_flag_under_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["up", "--help"])
    said = capsys.readouterr().out
    assert all(f"\n{heading}:\n" in said for heading in TABLE)
    assert all(f"--{name} " in said for name in ROWS)


def test_a_whole_file_can_be_written_from_the_defaults(tmp_path: Path) -> None:
    given: dict[str, Any] = {name: row.default for name, row in ROWS.items() if row.default is not None}
    lines = [f"{name} = {value!r}".replace("'", '"') for name, value in given.items()]
    text = "\n".join(lines)
    assert tomllib.loads(text) == given
    assert asked("-f", written(tmp_path, text)) == asked()


def test_of_a_table_of_models_all_that_is_wrong_is_told(tmp_path: Path) -> None:
    told = refused("-f", written(tmp_path, '[models]\n"a/b" = "/no/such"\nc = 3\nhost = "x"\n'))
    assert told[0] == "3 things are to be changed:"


def test_a_flag_is_not_to_be_shortened() -> None:
    assert refused("--gateway", "2") == ["'--gateway' is no flag of tinsmith up; did you mean --gateways?"]


def test_words_that_are_no_flags_are_told_each() -> None:
    assert refused("also", "--nonsense=1", "this")[1:] == [
        "  'also' belongs to no flag of tinsmith up",
        "  '--nonsense=1' is no flag of tinsmith up; tinsmith up --help lists them",
        "  'this' belongs to no flag of tinsmith up",
    ]


@pytest.mark.parametrize(
    "url",
    [
        "redis://:secret@host:1",
        "redis://host:1?password=secret",
        "rediss://host:1/0?a=b&ssl_password=secret",
        "redis://host:1?sentinel_pass%77ord=secret",
    ],
)
def test_a_password_of_redis_in_the_arguments_is_refused_however_it_is_given(url: str) -> None:
    assert "TINSMITH_REDIS_URL" in refused("--redis-url", url)[0]
    assert "secret" not in refused("--redis-url", url)[0]
    asked(TINSMITH_REDIS_URL=url)


def test_other_parameters_of_the_url_of_redis_may_stand_in_the_arguments() -> None:
    asked("--redis-url", "rediss://host:1/0?ssl_ca_certs=/etc/passwords&db=1")


@pytest.mark.parametrize("url", ["http://:secret@host:1", "redis+sentinel://:secret@host:1", "host:6379"])
def test_what_is_no_url_of_a_redis_is_told_before_anything_starts(url: str) -> None:
    (told,) = refused(TINSMITH_REDIS_URL=url)
    assert "redis+sentinel://" in told
    assert "secret" not in told


@pytest.mark.parametrize("address", ["999.1.1.1", "1.2.3", "a b"])
def test_what_is_no_address_is_told_before_anything_starts(address: str) -> None:
    assert "--host must be a host name or address" in refused("--host", address)[0]
    assert asked("--host", "10.0.0.7").host == "10.0.0.7"


def test_a_store_that_nothing_here_can_read_is_told_before_anything_starts() -> None:
    assert "no object store is called s4" in refused("--checkpoint-store", "s4://bucket/x")[0]
    assert "needs the package gcsfs" in refused("--checkpoint-store", "gs://bucket/x")[0]
    assert asked("--checkpoint-store", "s3://bucket/x").checkpoint_store == "s3://bucket/x"
