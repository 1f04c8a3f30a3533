"""Which processes a local cluster is made of."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.contract.errors import InvalidRequest
from services.common.state.known_models import Configured, parse_configured
from services.common.worlds.nodes import Nodes
from services.launcher import plan
from services.launcher.settings.mistakes import mistakes as found_mistakes
from services.launcher.settings.models import parse_model
from services.trainer.world.launch import node_command


def mistakes(settings: plan.Options) -> list[str]:
    return found_mistakes(settings, {"lo": ["127.0.0.1"], "eth0": ["10.0.0.7"]})


def launch(ranks: int, args: list[str]) -> list[str]:
    return ["launch", str(ranks), *args]


def options(tmp_path: Path, **changes: object) -> plan.Options:
    models = (plan.Model("org/one", "/models/one"), plan.Model("org/two", "/models/two"))
    return plan.Options(**{"models": models, "data_dir": tmp_path, "cores": tuple(range(8)), **changes})  # type: ignore[arg-type]


def test_every_model_gets_a_trainer_and_its_samplers(tmp_path: Path) -> None:
    planned = plan.processes(options(tmp_path, samplers=2, trainer_ranks=2, gateways=2), launch)
    assert [process.name for process in planned] == [
        *("gateway-0", "gateway-1"),
        *("trainer-0", "sampler-0", "sampler-1"),
        *("trainer-2", "sampler-2", "sampler-3"),
    ]
    second_trainer = planned[5]
    assert second_trainer.argv[:2] == ("launch", "2")
    assert "--first-process-index" in second_trainer.argv
    assert "org/two=/models/two" in second_trainer.argv


def test_every_process_has_a_port_of_its_own_for_its_metrics_or_none(tmp_path: Path) -> None:
    def ports(settings: plan.Options) -> list[str]:
        planned = plan.processes(settings, launch)
        return [dict(itertools.pairwise(process.argv))["--metrics-port"] for process in planned]

    assert ports(options(tmp_path, metrics_port=9100)) == ["9100", "9101", "9102", "9103", "9104"]
    assert ports(options(tmp_path)) == ["0"] * 5


@pytest.mark.parametrize(
    ("first", "wrong"), [(7996, True), (7995, False), (8001, True), (65532, True), (9100, False)]
)
def test_ports_for_metrics_are_free_of_the_others(tmp_path: Path, first: int, wrong: bool) -> None:
    found = mistakes(options(tmp_path, metrics_port=first))
    assert any("--metrics-port" in sentence for sentence in found) == wrong


def test_the_ports_that_were_asked_for_are_those_of_the_processes(tmp_path: Path) -> None:
    settings = options(tmp_path, host="0.0.0.0", gateways=2, metrics_port=9100)
    listening = plan.listeners(settings)
    assert [(each.flag, each.host) for each in listening[:2]] == [
        ("--port", "0.0.0.0"),
        ("--grpc-port", "0.0.0.0"),
    ]
    for each, process in zip(listening[2:], plan.processes(settings, launch), strict=True):
        argv = dict(itertools.pairwise(process.argv))
        assert (each.host, str(each.port)) == (argv["--host"], argv["--metrics-port"])
    # The model that is served when none is named has processes, too.
    assert len(plan.listeners(plan.Options((), tmp_path, metrics_port=9100))) == 5


def test_gateways_are_told_what_they_are_to_wait_for(tmp_path: Path) -> None:
    for samplers in (0, 2):
        gateway = plan.processes(options(tmp_path, samplers=samplers), launch)[0]
        told = dict(itertools.pairwise(gateway.argv))["--base-models"]
        sampled = samplers > 0
        assert parse_configured(told) == (
            Configured(name="org/one", sampled=sampled),
            Configured(name="org/two", sampled=sampled),
        )


def test_trainers_are_told_how_to_hold_models_that_train_all_weights(tmp_path: Path) -> None:
    settings = options(tmp_path, offload_optimizer="cpu", max_full_models=3, full_snapshot_steps=7)
    trainer = plan.processes(settings, launch)[1]
    given = dict(itertools.pairwise(trainer.argv))
    names = ("--offload-optimizer", "--max-full-models", "--full-snapshot-steps")
    assert [given[name] for name in names] == ["cpu", "3", "7"]


def test_trainers_are_told_how_to_share_weights_and_what_cannot_be_is_refused(tmp_path: Path) -> None:
    shared = {"zero_replica_ranks": 2, "zero_prefetch_elements": 0, "zero_quantized_base": "yes"}
    settings = options(tmp_path, zero_stage=3, trainer_ranks=4, **shared)
    assert mistakes(settings) == []
    given = dict(itertools.pairwise(plan.processes(settings, launch)[1].argv))
    names = ("--zero-replica-ranks", "--zero-prefetch-elements", "--zero-quantized-base")
    assert [given[name] for name in names] == ["2", "0", "yes"]
    assert "--zero-prefetch-elements" not in plan.processes(options(tmp_path), launch)[1].argv

    flags = {sentence.split()[0] for sentence in mistakes(options(tmp_path, trainer_ranks=4, **shared))}
    assert flags == set(names)
    (sentence,) = mistakes(options(tmp_path, zero_stage=3, trainer_ranks=2, zero_replica_ranks=2))
    assert sentence.startswith("--zero-replica-ranks 2: a trainer of 2 ranks")


def test_cores_are_shared_out_between_what_computes(tmp_path: Path) -> None:
    planned = plan.processes(options(tmp_path, samplers=1, trainer_ranks=1), launch)
    threads = {process.name: process.env.get("OMP_NUM_THREADS") for process in planned}
    assert threads["trainer-0"] == threads["sampler-0"] == "2"
    crowded = plan.processes(options(tmp_path, samplers=4, trainer_ranks=4), launch)
    assert crowded[-1].env["OMP_NUM_THREADS"] == "1"


def test_gateways_stop_before_what_they_send_work_to(tmp_path: Path) -> None:
    order = {process.name: process.stop_order for process in plan.processes(options(tmp_path), launch)}
    assert order["gateway-0"] < order["trainer-0"] == order["sampler-0"]


def test_a_directory_becomes_absolute_and_a_hub_id_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert parse_model("a/b=here") == plan.Model("a/b", str(tmp_path / "here"))
    assert parse_model("a/b=Qwen/Qwen3-8B") == plan.Model("a/b", "Qwen/Qwen3-8B")


@pytest.mark.parametrize("text", ["no-separator", "=x", "a=", "a=/no/such/dir", "a=./missing"])
def test_a_model_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--model"):
        parse_model(text)


def test_options_that_no_cluster_can_have_are_told_all_at_once(tmp_path: Path) -> None:
    same = (plan.Model("a/b", "x"), plan.Model("a/b", "y"))
    wrong = options(tmp_path, models=same, port=9, grpc_port=9, sampler_tp=2, checkpoint_store="s3://k:s@b")
    told = "\n".join(mistakes(wrong))
    for part in ("a/b is given twice", "--grpc-port must differ", "--sampler-tp is for GPUs", "credentials"):
        assert part in told
    assert mistakes(options(tmp_path)) == []


def test_samplers_that_could_not_start_are_told_before_they_do(tmp_path: Path) -> None:
    many = {"sampler_pp": 2, "speculative_ngram_tokens": 1, "quantization": "fp8_per_block"}
    wrong = options(
        tmp_path, kv_cache_dtype="fp8", max_batched_tokens=100, max_sequences=101, dtype="float32", **many
    )
    told = "\n".join(mistakes(wrong))
    assert "--sampler-pp is for GPUs" in told and "--quantization fp8_per_block is for GPUs" in told
    assert "--speculative-ngram-tokens does not go with --sampler-pp" in told
    assert "--quantization fp8_per_block is for bfloat16, and --dtype says float32" in told
    assert "--kv-cache-dtype fp8 is for GPUs" in told
    assert mistakes(options(tmp_path, model_runner="v2")) == [
        "--model-runner v2 is for GPUs, and the models compute on the CPU"
    ]
    assert "--max-batched-tokens is 100 and --max-sequences 101" in told
    assert mistakes(options(tmp_path, max_batched_tokens=100, max_sequences=100)) == []


def test_what_is_left_to_a_service_is_not_said(tmp_path: Path) -> None:
    _, trainer, sampler, *_ = plan.processes(options(tmp_path), launch)
    for flag in ("--max-context", "--micro-batch-tokens", "--kv-cache-gib", "--max-sequences"):
        assert flag not in (*trainer.argv, *sampler.argv)
    said = dict(itertools.pairwise(sampler.argv))
    assert (said["--head-dtype"], said["--speculative-ngram-tokens"]) == ("auto", "0")
    assert (said["--quantization"], said["--model-runner"]) == ("auto", "auto")
    assert (said["--routed-experts"], said["--enforce-eager"]) == ("no", "no")
    given = options(
        tmp_path,
        max_context=4096,
        micro_batch_tokens=512,
        kv_cache_gib=2.0,
        max_sequences=9,
        head_dtype="float32",
        speculative_ngram_tokens=4,
        quantization="fp8_per_channel",
        model_runner="v1",
        routed_experts="yes",
        enforce_eager="yes",
    )
    _, trainer, sampler, *_ = plan.processes(given, launch)
    said = dict(itertools.pairwise(trainer.argv)) | dict(itertools.pairwise(sampler.argv))
    assert (said["--max-context"], said["--micro-batch-tokens"]) == ("4096", "512")
    assert (said["--kv-cache-gib"], said["--max-sequences"]) == ("2.0", "9")
    assert (said["--head-dtype"], said["--speculative-ngram-tokens"]) == ("float32", "4")
    assert (said["--quantization"], said["--model-runner"]) == ("fp8_per_channel", "v1")
    assert (said["--routed-experts"], said["--enforce-eager"]) == ("yes", "yes")
    assert (said["--max-lora-rank"], said["--max-loras"]) == ("128", "8")


def test_a_name_that_is_not_its_weights_own_is_told(tmp_path: Path) -> None:
    models = (plan.Model("org/one", "org/one"), plan.Model("org/two", "/models/two"))
    (told,) = plan.aliases(options(tmp_path, models=models))
    assert told.startswith("org/two is /models/two.") and "tinsmith tokenizer org/two" in told


def test_models_of_the_hub_are_those_that_are_no_directory(tmp_path: Path) -> None:
    models = (plan.Model("a/one", "org/one"), parse_model(f"a/two={made(tmp_path)}"))
    assert plan.from_hub(options(tmp_path, models=models)) == ["org/one"]


def made(directory: Path) -> Path:
    (directory / "config.json").write_text("{}")
    return directory


def test_only_gateways_listen_on_the_address_that_is_asked_for(tmp_path: Path) -> None:
    planned = plan.processes(options(tmp_path, host="0.0.0.0"), launch)
    hosts = {process.name: dict(itertools.pairwise(process.argv))["--host"] for process in planned}
    assert hosts.pop("gateway-0") == "0.0.0.0"
    assert set(hosts.values()) == {"127.0.0.1"}


def test_samplers_on_the_cpu_share_what_there_is_for_keys_and_values(tmp_path: Path) -> None:
    def samplers(**changes: object) -> list[plan.Process]:
        planned = plan.processes(options(tmp_path, **changes), launch)
        return [process for process in planned if process.name.startswith("sampler")]

    for process in samplers(samplers=2):
        assert dict(itertools.pairwise(process.argv))["--machine-samplers"] == "4"
        assert process.computes.endswith(", up to 6.25% of its memory for keys and values")
    alone = {"models": (plan.Model("a/b", "x"),)}
    (process,) = samplers(**alone)
    assert dict(itertools.pairwise(process.argv))["--machine-samplers"] == "1"
    for told in ({"kv_cache_gib": 2.0}, {"device": "cuda", "gpus": ("0", "1")}):
        (process,) = samplers(**alone, **told)
        assert "--machine-samplers" not in process.argv and "keys and values" not in process.computes


def test_one_gpu_is_shared_in_stated_parts(tmp_path: Path) -> None:
    one = {"models": (plan.Model("a/b", "x"),), "device": "cuda", "gpus": ("0",)}
    gateway, trainer, sampler = plan.processes(options(tmp_path, **one), launch)
    assert (gateway.computes, trainer.computes) == ("", "GPU 0 (shared), 55% of its memory")
    assert sampler.computes == "GPU 0 (shared), 40% of its memory"
    _, trainer, sampler = plan.processes(options(tmp_path, **one, sampler_memory=0.55), launch)
    assert dict(itertools.pairwise(sampler.argv))["--gpu-memory-utilization"] == "0.55"
    assert dict(itertools.pairwise(trainer.argv))["--gpu-memory-share"] == "0.4"
    (sentence,) = mistakes(options(tmp_path, **one, sampler_memory=0.92))
    assert sentence.startswith("a trainer would have less than 5% of a GPU that it shares: give a lower")
    (sentence,) = mistakes(options(tmp_path, **one, kv_cache_gib=4.0))
    assert sentence.startswith("--kv-cache-gib 4 on a GPU that a trainer shares")
    assert sentence.endswith("give --sampler-memory instead")
    (sentence,) = mistakes(options(tmp_path, **one, kv_cache_gib=4.0, sampler_memory=0.4))
    assert sentence.endswith("and a trainer has the rest of its GPU: leave --kv-cache-gib out")
    (said,) = mistakes(options(tmp_path, **one | {"gpus": ("0", "1")}, kv_cache_gib=4.0, sampler_memory=0.4))
    assert said.endswith("whatever --sampler-memory 0.4 says: leave one of them out")
    many = {"models": tuple(plan.Model(f"a/{name}", "x") for name in range(20)), "samplers": 0}
    (sentence,) = mistakes(options(tmp_path, **one | many))
    assert sentence.endswith("give fewer --model, or more GPUs")


def test_a_sampler_of_a_shared_gpu_is_started_when_the_others_are_ready(tmp_path: Path) -> None:
    def order(**more: object) -> list[list[str]]:
        settings = options(tmp_path, device="cuda", trainer_ranks=1, **more)
        planned = plan.processes(settings, launch)
        return [[process.name for process in stage] for stage in plan.stages(planned)]

    others = ["gateway-0", "trainer-0", "trainer-1"]
    assert order(gpus=("0",)) == [others, ["sampler-0"], ["sampler-1"]]
    # The third and the fourth GPU have a sampler each to themselves, and the first two a trainer each.
    assert order(gpus=tuple("0123")) == [["gateway-0", "trainer-0", "sampler-0", "trainer-1", "sampler-1"]]
    (all_at_once,) = plan.stages(plan.processes(options(tmp_path), launch))
    assert len(all_at_once) == 5
    assert not any("--gpu-memory-share" in process.argv for process in all_at_once)


def test_a_sampler_of_several_gpus_has_them_to_itself(tmp_path: Path) -> None:
    eight = {"models": (plan.Model("a/b", "x"),), "device": "cuda", "gpus": tuple("01234567")}
    planned = plan.processes(options(tmp_path, **eight, trainer_ranks=4, samplers=2, sampler_tp=2), launch)
    assert [process.env.get("CUDA_VISIBLE_DEVICES") for process in planned] == [None, "0,1,2,3", "4,5", "6,7"]
    assert dict(itertools.pairwise(planned[2].argv))["--tensor-parallel-size"] == "2"


def test_a_sampler_of_stages_has_as_many_gpus_as_all_of_them(tmp_path: Path) -> None:
    eight = {"models": (plan.Model("a/b", "x"),), "device": "cuda", "gpus": tuple("01234567")}
    planned = plan.processes(
        options(tmp_path, **eight, trainer_ranks=4, samplers=1, sampler_tp=2, sampler_pp=2), launch
    )
    assert [process.env.get("CUDA_VISIBLE_DEVICES") for process in planned] == [None, "0,1,2,3", "4,5,6,7"]
    said = dict(itertools.pairwise(planned[2].argv))
    assert (said["--tensor-parallel-size"], said["--pipeline-parallel-size"]) == ("2", "2")


def test_trainers_and_samplers_get_the_gpus_in_turn(tmp_path: Path) -> None:
    planned = plan.processes(
        options(tmp_path, device="cuda", gpus=("0", "1", "2", "3"), trainer_ranks=1), launch
    )
    visible = {process.name: process.env.get("CUDA_VISIBLE_DEVICES") for process in planned}
    assert visible == {
        "gateway-0": None,
        "trainer-0": "0",
        "sampler-0": "2",
        "trainer-1": "1",
        "sampler-1": "3",
    }
    assert dict(itertools.pairwise(planned[2].argv))["--gpu-memory-utilization"] == "0.9"


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    wrong = options(tmp_path, device="cuda", gpus=("0",), trainer_ranks=2, sampler_tp=4)
    ranks, parallel = mistakes(wrong)
    assert ranks.startswith("--trainer-ranks 2 needs as many GPUs")
    assert parallel.startswith("--sampler-tp 4 needs as many GPUs")
    (stages,) = mistakes(options(tmp_path, device="cuda", gpus=("0", "1"), sampler_tp=2, sampler_pp=2))
    assert stages == "--sampler-tp 2 with --sampler-pp 2 needs 4 GPUs, and here are 2"


def test_adapters_in_float32_are_refused_on_gpus_where_they_would_be_sampled(tmp_path: Path) -> None:
    exact = options(tmp_path, device="cuda", gpus=("0", "1"), dtype="float32")
    (told,) = mistakes(exact)
    assert told.startswith("--dtype float32 on GPUs is for samplers without adapters")
    assert mistakes(replace(exact, samplers=0)) == mistakes(replace(exact, max_loras=0)) == []
    assert mistakes(options(tmp_path, dtype="float32")) == []


def test_gateways_and_trainers_are_told_where_checkpoints_are_kept(tmp_path: Path) -> None:
    told = {
        process.name: "s3://bucket/x" in process.argv
        for process in plan.processes(options(tmp_path, checkpoint_store="s3://bucket/x"), launch)
    }
    assert told == {
        "gateway-0": True,
        "trainer-0": True,
        "sampler-0": False,
        "trainer-1": True,
        "sampler-1": False,
    }


def test_gateways_are_told_which_loss_runs_in_place_of_stable_reinforce(tmp_path: Path) -> None:
    gateway, *others = plan.processes(options(tmp_path, stable_reinforce_as="ppo"), launch)
    assert dict(itertools.pairwise(gateway.argv))["--stable-reinforce-as"] == "ppo"
    assert not any("--stable-reinforce-as" in process.argv for process in others)


NODES: dict[str, object] = {
    "models": (plan.Model("org/one", "/models/one"),),
    "trainer_nodes": 3,
    "trainer_ranks": 2,
    "trainer_rendezvous": ("10.0.0.7", 29400),
    "trainer_interface": "eth0",
}


def test_a_trainer_on_several_machines_is_started_as_their_head_and_the_others_command_is_printed(
    tmp_path: Path,
) -> None:
    settings = options(tmp_path, **NODES, zero_stage=3, zero_replica_ranks=3)
    assert mistakes(settings) == []
    head = plan.nodes(settings)
    assert head == Nodes(3, 0, "10.0.0.7", 29400, "eth0")
    planned = plan.processes(settings, lambda ranks, args: node_command(head, ranks, args))
    said, command = plan.followers(settings, planned)
    assert "On the others, with --node-rank 1 to 2 and with the TINSMITH_ variables" in said
    words = shlex.split(command)
    mine = list(planned[1].argv)
    assert [(a, b) for a, b in zip(mine, words, strict=True) if a != b] == [("0", "1")]
    assert words[words.index("--node-rank") + 1] == "1"


def test_one_machine_has_nobody_to_wait_for(tmp_path: Path) -> None:
    settings = options(tmp_path)
    assert plan.nodes(settings) is None
    assert plan.followers(settings, plan.processes(settings, launch)) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"trainer_nodes": 1},
            "--trainer-rendezvous is for a trainer on several machines: give --trainer-nodes",
        ),
        ({"trainer_rendezvous": None}, "--trainer-nodes 3 needs --trainer-rendezvous"),
        ({"trainer_interface": None}, "--trainer-nodes 3 needs --trainer-interface"),
        (
            {"models": (plan.Model("a", "/a"), plan.Model("b", "/b"))},
            "--trainer-nodes 3 is for one base model",
        ),
        ({"trainer_interface": "eth1"}, "--trainer-interface eth1: here are eth0, lo"),
        ({"trainer_rendezvous": ("head", 1)}, "--trainer-rendezvous head:1 is a name"),
        ({"trainer_rendezvous": ("10.0.0.9", 1)}, "--trainer-rendezvous 10.0.0.9:1: the head listens there"),
        ({"zero_stage": 3, "zero_replica_ranks": 4}, "--zero-replica-ranks 4: a trainer of 6 ranks"),
    ],
)
def test_machines_that_cannot_be_one_trainer_are_refused(
    tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    assert mistakes(options(tmp_path, **{**NODES, **changes}))[0].startswith(sentence)
