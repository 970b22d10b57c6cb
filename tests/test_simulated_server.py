"""The stand-in as a server: what it answers, what it says, how it lives and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from simulated_builders import plan, settings
from stand_in import StandIn, is_engine, run, until

from tuner.engine.simulated.engine import SimulatedEngine

SMALL = ("--max-model-len", "512", "--kv-cache-memory-bytes", "16M", "--block-size", "32")
"""128 blocks of 32 tokens, the null block among them."""


@pytest.fixture(scope="module")
def server():
    with StandIn(*SMALL, "--enforce-eager") as started:
        yield started.ready()


def choice(document):
    return document["choices"][0]


# --- of itself -----------------------------------------------------------------------------


def test_version_says_that_it_is_simulated_and_how_fast(server):
    assert json.loads(server.ask("GET", "/version")[1]) == {"version": "0.32.0+simulated.x50"}
    assert "version 0.32.0+simulated.x50" in server.log


def test_models_lists_the_model_with_its_context(server):
    listed = json.loads(server.ask("GET", "/v1/models")[1])["data"]
    assert [(entry["id"], entry["max_model_len"]) for entry in listed] == [("tiny", 512)]


def test_served_names_replace_the_model_s():
    with StandIn(*SMALL, "--served-model-name", "a", "b").ready() as server:
        listed = json.loads(server.ask("GET", "/v1/models")[1])["data"]
        assert [entry["id"] for entry in listed] == ["a", "b"]
        assert server.post("/v1/completions", model="b", prompt="x")["model"] == "a"
        assert server.ask("POST", "/v1/completions", {"model": "tiny", "prompt": "x"})[0] == 404


def test_tokenizer_is_a_word_a_token_and_goes_both_ways(server):
    answer = server.post("/tokenize", prompt="the w17  the fox")
    ids = answer["tokens"]
    assert (answer["count"], ids[1], ids[0] == ids[2], ids[0] == ids[3]) == (4, 17, True, False)
    words = server.post("/detokenize", tokens=ids)["prompt"]
    assert server.post("/tokenize", prompt=words)["tokens"] == ids


# --- completions ---------------------------------------------------------------------------


def test_completion_counts_its_tokens(server):
    answer = server.post("/v1/completions", prompt="w1 w2 w3", max_tokens=7, ignore_eos=True)
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["usage"]["total_tokens"] == 10
    assert choice(answer)["finish_reason"] == "length"
    assert len(choice(answer)["text"].split()) == 7


def test_completion_of_token_ids_is_that_of_their_words(server):
    texts = [
        choice(server.post("/v1/completions", prompt=prompt, max_tokens=5))["text"]
        for prompt in ("w5 w6", [5, 6], [[5, 6]])
    ]
    assert texts[0] == texts[1] == texts[2]
    assert choice(server.post("/v1/completions", prompt=[6, 5], max_tokens=5))["text"] != texts[0]


def test_completion_ends_by_itself_unless_it_ignores_that(server):
    natural = server.post("/v1/completions", prompt="w1", max_tokens=400)
    assert choice(natural)["finish_reason"] == "stop"
    length = natural["usage"]["completion_tokens"]
    assert 16 <= length < 256
    forced = server.post("/v1/completions", prompt="w1", max_tokens=400, ignore_eos=True)
    assert forced["usage"]["completion_tokens"] == 400
    longer = server.post("/v1/completions", prompt="w1", max_tokens=400, min_tokens=length + 9)
    assert longer["usage"]["completion_tokens"] == length + 9


def test_completion_has_16_tokens_unless_it_asks_for_more(server):
    assert server.post("/v1/completions", prompt="w1")["usage"]["completion_tokens"] == 16


def test_completion_is_cut_off_where_the_context_ends(server):
    answer = server.post("/v1/completions", prompt=[1] * 500, max_tokens=100, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 12
    assert choice(answer)["finish_reason"] == "length"


def test_stream_has_the_words_of_the_answer_in_one_piece(server):
    body = {"prompt": "w1 w2", "max_tokens": 60, "ignore_eos": True}
    whole = server.post("/v1/completions", **body)
    *pieces, usage, done = server.stream(**body, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert "".join(choice(piece)["text"] for piece in pieces) == choice(whole)["text"]
    reasons = [choice(piece)["finish_reason"] for piece in pieces]
    assert reasons == [None] * (len(pieces) - 1) + ["length"]


def test_stream_without_the_option_has_no_usage(server):
    *pieces, done = server.stream(prompt="w1", max_tokens=3)
    assert done == "[DONE]"
    assert all("usage" not in piece for piece in pieces)


def test_stream_comes_token_by_token_in_time():
    made = settings(max_model_len=512, kv_cache_memory_bytes="16M", block_size=32)
    engine = SimulatedEngine(made, plan(made), seed=0, noise=False)
    engine.add("1", [1], 100)
    while engine.busy:
        engine.step()
    with StandIn(*SMALL, SIMULATED_SPEED="0.5", SIMULATED_NOISE="0").ready() as server:
        started = time.monotonic()
        pieces = server.stream(prompt="w1", max_tokens=100, ignore_eos=True)
        took_s = time.monotonic() - started
    assert 2 * engine.now_s < took_s < 2 * engine.now_s + 5
    assert len(pieces) > 50


def test_chat_answers_whole_and_as_a_stream(server):
    body = {"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 6}
    whole = server.post("/v1/chat/completions", **body)
    message = choice(whole)["message"]
    assert message["role"] == "assistant"
    assert whole["usage"]["completion_tokens"] == 6
    opening, *pieces, done = server.stream("/v1/chat/completions", **body)
    assert done == "[DONE]"
    assert choice(opening)["delta"] == {"role": "assistant", "content": ""}
    content = "".join(choice(piece)["delta"]["content"] for piece in pieces)
    assert content == message["content"]


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("completions", {"prompt": [1] * 600}, 400, "maximum context length is 512 tokens"),
        ("completions", {"prompt": "a", "max_tokens": 600}, 400, "greater than max_model_len=512"),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "must be at least 1, got 0"),
        ("completions", {"prompt": "a", "min_tokens": 17}, 400, "min_tokens must be less"),
        ("completions", {"prompt": []}, 400, "cannot be empty"),
        ("completions", {"prompt": [2048]}, 400, "out of vocabulary"),
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": "b"}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "model": "other"}, 404, "`other` does not exist"),
        ("completions", b"{nonsense", 400, "JSON"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("nonsense", {}, 404, "Not Found"),
    ],
)
def test_bad_request_is_answered_as_vllm_does(server, path, body, status, told):
    got, text = server.ask("POST", f"/v1/{path}", body)
    assert got == status
    assert told in text
    if path != "nonsense":
        assert json.loads(text)["error"]["code"] == status


def test_api_key_is_asked_for():
    with StandIn(*SMALL, "--api-key", "secret").ready() as server:
        assert server.ask("GET", "/v1/models")[0] == 401
        headers = {"Authorization": "Bearer secret"}
        assert server.ask("GET", "/v1/models", headers=headers)[0] == 200
        assert "secret" not in server.log


# --- /metrics ------------------------------------------------------------------------------


def families(page):
    return {family.name: family for family in text_string_to_metric_families(page)}


def test_metrics_count_what_was_served():
    with StandIn(*SMALL).ready() as server:
        for number in range(3):
            server.post("/v1/completions", prompt=[number] * 10, max_tokens=5, ignore_eos=True)
        assert server.metric("vllm:prompt_tokens_total") == 30
        assert server.metric("vllm:generation_tokens_total") == 15
        assert server.metric("vllm:num_preemptions_total") == 0
        assert server.metric("vllm:num_requests_running") == 0
        assert server.metric("vllm:time_to_first_token_seconds_count") == 3
        page = families(server.ask("GET", "/metrics")[1])
        reasons = {
            sample.labels["finished_reason"]: sample.value
            for sample in page["vllm:request_success"].samples
        }
        assert reasons == {"stop": 0, "length": 3, "abort": 0, "error": 0}
        for name, length in (("prompt", 10), ("generation", 5)):
            samples = page[f"vllm:request_{name}_tokens"].samples
            below = {s.labels["le"]: s.value for s in samples if s.name.endswith("_bucket")}
            assert list(below)[:7] == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0"]
            assert next(float(le) for le, count in below.items() if count == 3) == length
            assert server.metric(f"vllm:request_{name}_tokens_sum") == 3 * length


def test_metrics_tell_the_cache_that_the_log_tells(server):
    page = families(server.ask("GET", "/metrics")[1])
    labels = page["vllm:cache_config_info"].samples[0].labels
    planned = plan(settings(max_model_len=512, kv_cache_memory_bytes="16M", block_size=32))
    assert labels["num_gpu_blocks"] == str(planned.num_blocks) == "128"
    assert labels["kv_cache_size_tokens"] == str(planned.kv_cache_tokens)
    assert f"KV cache size: {planned.kv_cache_tokens:,} tokens" in server.log


def test_metrics_with_a_slash_can_be_narrowed(server):
    name = "vllm:num_preemptions_total"
    page = families(server.ask("GET", f"/metrics/?name[]={name}&name[]=nonsense")[1])
    assert list(page) == ["vllm:num_preemptions"]
    assert page["vllm:num_preemptions"].samples[0].labels == {"engine": "0", "model_name": "tiny"}
    assert len(families(server.ask("GET", f"/metrics?name[]={name}")[1])) > 10


def test_prefix_cache_remembers_until_it_is_reset():
    with StandIn(*SMALL).ready() as server:
        prompt = list(range(100))
        for hits in (0, 96):  # three whole blocks
            server.post("/v1/completions", prompt=prompt, max_tokens=1)
            assert server.metric("vllm:prefix_cache_hits_total") == hits
        assert server.ask("POST", "/reset_prefix_cache")[0] == 200
        server.post("/v1/completions", prompt=prompt, max_tokens=1)
        assert server.metric("vllm:prefix_cache_hits_total") == 96


def test_load_beyond_the_kv_cache_preempts_and_is_served():
    # Slow enough for all requests to be there before the first has its answer.
    with StandIn(*SMALL, SIMULATED_SPEED="2").ready() as server:

        def one(number):
            prompt = [(number * 31 + k * 7) % 2048 for k in range(64)]
            return server.post("/v1/completions", prompt=prompt, max_tokens=256, ignore_eos=True)

        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(one, range(32)))
        assert [a["usage"]["completion_tokens"] for a in answers] == [256] * 32
        assert server.metric("vllm:num_preemptions_total") > 5
        assert server.metric("vllm:generation_tokens_total") == 32 * 256


# --- flags ---------------------------------------------------------------------------------


def test_unknown_flag_ends_with_argparse_s_words():
    ran = run("serve", "tiny", "--swap-space", "4")
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[-1] == "vllm: error: unrecognized arguments: --swap-space 4"


def test_refused_configuration_ends_with_vllm_s_words():
    ran = run("serve", "tiny", "--max-num-seqs", "64", "--max-num-batched-tokens", "32")
    assert ran.returncode == 1
    assert "1 validation error for SchedulerConfig" in ran.stdout
    assert "(32) must be greater than or equal to max_num_seqs (64)" in ran.stdout


def test_model_that_does_not_exist_ends_the_start():
    ran = run("serve", "./models/none")
    assert ran.returncode == 1
    assert "Repo id must be in the form" in ran.stdout


def test_version_and_help_end_at_once():
    assert run("--version").stdout == "0.32.0+simulated.x50\n"
    helped = run("--help").stdout
    assert "SIMULATED_SPEED" in helped
    assert "oom_runtime" in helped


@pytest.mark.parametrize("name", ["SIMULATED_SPEED", "SIMULATED_DEVICE", "SIMULATED_SEED"])
def test_environment_that_cannot_be_read_is_told(name):
    ran = run("serve", "tiny", **{name: "nonsense"})
    assert ran.returncode == 2
    assert "nonsense" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_config_file_starts_a_server(tmp_path):
    config = tmp_path / "serve.yaml"
    keys = {"model": "tiny", "max-model-len": 256, "kv-cache-memory-bytes": "16M"}
    config.write_text(yaml.safe_dump(keys))
    with StandIn("--config", str(config), model="tiny").ready() as server:
        listed = json.loads(server.ask("GET", "/v1/models")[1])["data"]
        assert listed[0]["max_model_len"] == 256


def test_folder_with_a_config_is_played(tmp_path):
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with StandIn("--kv-cache-memory-bytes", "1M", model=str(tmp_path)).ready() as server:
        assert json.loads(server.ask("GET", "/v1/models")[1])["data"][0]["max_model_len"] == 256
        # 2 x 2 layers x 2 heads x 16 x 2 bytes a token.
        assert f"CPU KV cache size: {2**20 // 256:,} tokens" in server.log


# --- life and death ------------------------------------------------------------------------


def test_port_in_use_ends_the_start():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = run(
            "serve", "tiny", *SMALL, "--host", "127.0.0.1", "--port", str(taken.getsockname()[1])
        )
    assert ran.returncode == 1
    assert "[Errno 98] Address already in use" in ran.stdout


def test_term_ends_an_idle_server_cleanly():
    with StandIn(*SMALL).ready() as server:
        started = time.monotonic()
        server.process.terminate()
        assert server.process.wait(20) == 0
        assert time.monotonic() - started < 5
        until(lambda: True if not server.members() else None)
        assert "Application shutdown complete" in server.log


def test_term_while_it_starts_is_swallowed():
    slow = {"SIMULATED_FAULT": "slow_start seconds=1"}
    with StandIn(*SMALL, **slow) as server:
        until(lambda: True if "Starting to load model" in server.log else None)
        os.killpg(server.process.pid, signal.SIGTERM)
        server.ready()
        assert server.post("/v1/completions", prompt="a")["usage"]["completion_tokens"] == 16


def test_term_under_load_hangs_until_the_client_has_gone():
    with StandIn(*SMALL, SIMULATED_SPEED="0.5").ready() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            body = json.dumps({"prompt": "a", "max_tokens": 500, "ignore_eos": True}).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            client.sendall(head.encode() + body)
            until(lambda: True if server.metric("vllm:num_requests_running") else None)
            server.process.terminate()
            until(lambda: True if not any(map(is_engine, server.members())) else None)
            time.sleep(0.5)
            assert server.process.poll() is None
            assert "Waiting for connections to close" in server.log
        assert server.process.wait(20) == 0


def test_death_of_the_engine_ends_the_server_with_exit_code_0():
    with StandIn(*SMALL, SIMULATED_SPEED="0.5").ready() as server, ThreadPoolExecutor() as pool:
        whole = pool.submit(
            server.ask, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 400}
        )
        stream = pool.submit(server.stream, prompt="b", max_tokens=400)
        until(lambda: True if server.metric("vllm:num_requests_running") == 2 else None)
        os.kill(server.engine_pid, signal.SIGKILL)
        assert whole.result(20)[0] == 500
        *_, error, done = stream.result(20)
        assert error["error"]["code"] == 500
        assert done == "[DONE]"
        assert server.process.wait(20) == 0
        assert "EngineDeadError" in server.log


def test_death_of_the_server_leaves_the_engine():
    with StandIn(*SMALL).ready() as server:
        engine = server.engine_pid
        server.process.kill()
        server.process.wait(20)
        time.sleep(0.3)
        assert engine in server.members()
        os.kill(engine, signal.SIGTERM)
        until(lambda: True if not server.members() else None)


def test_request_that_is_given_up_is_aborted():
    with StandIn(*SMALL, SIMULATED_SPEED="0.5").ready() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            body = b'{"prompt": "a", "max_tokens": 500, "ignore_eos": true}'
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
            client.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            until(lambda: True if server.metric("vllm:num_requests_running") else None)
        until(lambda: None if server.metric("vllm:num_requests_running") else True)
        assert server.post("/v1/completions", prompt="b", max_tokens=2)["usage"]


def test_engine_that_runs_out_of_memory_under_load_says_so():
    # A KV cache that is given in bytes leaves half a GiB; a full step takes 0.8 GiB.
    with StandIn(
        *("--max-model-len", "4096", "--kv-cache-memory-bytes", "6600M", "--enforce-eager"),
        *("--max-num-batched-tokens", "8192"),
        model="llama-3.1-8b",
        SIMULATED_DEVICE="a10-24g",
        SIMULATED_SEED="1",
    ) as server:
        server.ready()
        server.post("/v1/completions", prompt="a", max_tokens=1)
        with ThreadPoolExecutor(8) as pool:
            statuses = pool.map(
                lambda n: server.ask("POST", "/v1/completions", {"prompt": [n] * 4000}), range(8)
            )
            assert 500 in [status for status, _ in statuses]
        assert server.process.wait(20) == 0
        assert "CUDA out of memory. Tried to allocate" in server.log
        assert "EngineCore encountered a fatal error" in server.log
