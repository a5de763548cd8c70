"""A plan as values: complete, JSON, and with the command that would serve it."""

import json
from dataclasses import replace
from inspect import signature

import pytest
from k3compile.runtime.engine_config import EngineConfig

from k3compile.cli.serve import serve
from k3compile.planning.change import smallest_changes
from k3compile.planning.gpus import GPUS
from k3compile.planning.plan import Question, make_plan
from k3compile.planning.released import read_draft, read_model
from k3compile.planning.report import as_values, serve_command

K3 = read_model("kimi-k3")
ENGINE = EngineConfig(max_num_batched_tokens=8192, max_num_seqs=64, prefix_cache=True, num_drafts=7)
PLAN = make_plan(Question(K3, GPUS["b300"], 8, ENGINE, 1, read_draft("released", K3)))
VALUES = as_values(PLAN, [], "kimi-k3", {})


def test_all_of_it_is_json_and_adds_up():
    assert json.loads(json.dumps(VALUES))["fits"] is True
    memory = VALUES["memory"]
    assert memory["usable"] == memory["weights"] + memory["reserve"]["total"] + memory["room"]
    assert memory["room"] == memory["pools"] + memory["free"]
    assert memory["weights"] == sum(one["rank"] for one in VALUES["weights"])
    pools = VALUES["pools"]
    states = (pools["slots"] + pools["checkpoints"]) * pools["slot_bytes"]
    records = pools["record_slots"] * pools["record_bytes"]
    assert states + records + pools["pages"] * pools["page_bytes"] == memory["pools"] == pools["bytes"]


def test_the_budget_is_the_schedulers():
    budget = VALUES["budget"]
    assert (budget["alone"], budget["full"], budget["row_charge"]) == (8192 - 6, 8192 - 64 * 6, 6)
    older = replace(ENGINE, adaptive_budget=False)
    budget = as_values(make_plan(replace(PLAN.question, engine=older)), [], "", {})["budget"]
    assert (budget["alone"], budget["full"], budget["row_charge"]) == (8192 - 64 * 6, 8192 - 64 * 6, 0)
    assert (budget["draft_rows"], budget["draft_limit"]) == (7, 8192)


def test_padding_is_what_a_block_has_too_much():
    block = VALUES["block"]
    assert (block["tokens"], block["unit"], block["state_bytes"]) == (768, 64, 814_080)
    assert block["padding"] == pytest.approx(768 * 1152 / 814_080 - 1)
    assert f"{block['padding']:.1%}" == "8.7%"


def test_a_plan_that_does_not_fit_has_changes_and_no_command():
    plan = make_plan(replace(PLAN.question, gpu=GPUS["h200"]))
    values = as_values(plan, smallest_changes(plan), "kimi-k3", {})
    assert values["misfits"]
    assert [change["settings"] for change in values["changes"]] == [{"tp": 16}]
    assert values["changes"][0]["nodes"] == 2
    assert not {"serve", "requests", "pools"} & set(values)
    assert json.dumps(values)


def test_the_command_gives_the_sizes_that_were_planned():
    command = " ".join(serve_command(PLAN, {"draft": "DRAFT"}))
    start = (
        "torchrun --standalone --nproc-per-node 8 examples/serve.py --model DIR --tp 8 --dcp 1 --device cuda"
    )
    assert command.startswith(start)
    assert f"--kv-cache-bytes {PLAN.room}" in command
    for flag in ("--num-drafts 7", "--max-num-seqs 64", "--max-num-batched-tokens 8192", "--draft DRAFT"):
        assert flag in command
    assert "--page-size" not in command


def test_the_command_for_several_nodes_repeats_what_was_asked():
    engine = replace(ENGINE, page_size=128, prefix_cache=False, num_pages=100, max_model_len=1000)
    plan = make_plan(replace(PLAN.question, engine=engine, tp=16))
    command = " ".join(serve_command(plan, {"model": "there"}))
    nodes = "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --nproc-per-node 8 "
    assert command.startswith(f"{nodes}examples/serve.py --model there")
    for flag in ("--page-size 128", "--no-prefix-cache", "--num-pages 100", "--max-model-len 1000"):
        assert flag in command
    assert "--kv-cache-bytes" not in command


def test_one_rank_needs_no_launcher_and_every_flag_is_one_of_the_servers():
    every = replace(ENGINE, block_size=128, retention_interval=256, num_checkpoints=70, draft_limit=900)
    question = replace(PLAN.question, gpu=PLAN.question.gpu._replace(memory=10**13), tp=1, engine=every)
    given = {"draft": "DRAFT", "features": "baseline"}
    command = serve_command(make_plan(question), given)
    assert command[0] == "k3 serve"
    said = {piece.split()[0].removeprefix("--").replace("-", "_") for piece in command[1:]}
    assert {"block_size", "features", "draft", "num_checkpoints"} <= said
    assert said <= set(signature(serve).parameters)
