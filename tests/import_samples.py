"""Small files in the formats of other tools, with numbers that can be worked out by hand."""

import json
from pathlib import Path
from typing import Any

SERVER = {
    "model_path": "Qwen/Qwen3-8B",
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "version": "0.5.23",
    "internal_states": [{"avg_spec_accept_length": 2.5, "last_gen_throughput": 178.86}],
}
SGLANG_BENCH: dict[str, Any] = {
    "tag": None,
    "backend": "sglang",
    "dataset_name": "sharegpt",
    "request_rate": float("inf"),
    "max_concurrency": 1,
    "sharegpt_output_len": None,
    "random_input_len": 1024,
    "random_output_len": 1024,
    "random_range_ratio": 0.0,
    "server_info": SERVER,
    "duration": 10.0,
    "completed": 8,
    "total_input_tokens": 800,
    "total_output_tokens": 400,
    "total_output_tokens_retokenized": 399,
    "request_throughput": 0.8,
    "output_throughput": 40.0,
    "mean_e2e_latency_ms": 1100.0,
    "median_e2e_latency_ms": 1000.0,
    "p99_e2e_latency_ms": 1900.0,
    "mean_ttft_ms": 55.0,
    "median_ttft_ms": 50.0,
    "p99_ttft_ms": 90.0,
    "mean_tpot_ms": 21.0,
    "median_tpot_ms": 20.0,
    "p99_tpot_ms": 30.0,
    "mean_itl_ms": 21.0,
    "median_itl_ms": 20.0,
    "p99_itl_ms": 60.0,
    "concurrency": 0.9,
    "accept_length": 2.5,
}
DETAILS: dict[str, Any] = {
    # request 0: chunks of 1, 2, 1 and 3 tokens with gaps of .2, .3 and .12 s; request 1: 1 and 2 tokens, a gap of .12 s
    "input_lens": [100, 50, 70],
    "output_lens": [7, 3, 0],
    "ttfts": [0.5, 0.4, 0.0],
    "itls": [[0.1, 0.1, 0.3, 0.04, 0.04, 0.04], [0.06, 0.06], []],
    "generated_texts": ["a b c d e f g", "x y z", ""],
    "errors": ["", "", "Connection reset"],
}
META: list[dict[str, Any]] = [
    {
        "text": "...",
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "stop", "matched": 151645},
            "prompt_tokens": 20,
            "completion_tokens": 12,
            "cached_tokens": 0,
            "e2e_latency": 0.75,
            "weight_versions": [{"version": "default", "start": 0, "end": 12}],
            "spec_verify_ct": 4,
            "spec_accept_length": 2.75,
            "spec_accept_rate": 7 / 12,
            "spec_num_correct_drafts": 7,
            "spec_num_proposed_drafts": 12,
            "spec_correct_drafts_histogram": [1, 0, 2, 1],
        },
    },
    {
        "text": "...",
        "meta_info": {
            "id": "b",
            "finish_reason": {"type": "length", "length": 6},
            "prompt_tokens": 10,
            "completion_tokens": 6,
            "e2e_latency": 0.5,
            "spec_verify_ct": 4,
            "spec_accept_length": 1.25,
            "spec_accept_rate": 1 / 12,
            "spec_num_correct_drafts": 1,
            "spec_num_proposed_drafts": 12,
            "spec_correct_drafts_histogram": [3, 1],
        },
    },
]
VLLM_BENCH: dict[str, Any] = {
    "date": "20261120-101500",
    "endpoint_type": "openai-chat",
    "backend": "openai-chat",
    "label": "k3",
    "model_id": "Qwen/Qwen3-8B",
    "tokenizer_id": "Qwen/Qwen3-8B",
    "num_prompts": 64,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": 8,
    "duration": 20.0,
    "completed": 64,
    "failed": 0,
    "total_input_tokens": 6410,
    "total_output_tokens": 8000,
    "request_throughput": 3.2,
    "output_throughput": 400.0,
    "total_token_throughput": 720.0,
    "mean_ttft_ms": 60.0,
    "median_ttft_ms": 55.0,
    "p99_ttft_ms": 120.0,
    "mean_tpot_ms": 18.0,
    "median_tpot_ms": 17.5,
    "p99_tpot_ms": 25.0,
    "mean_itl_ms": 44.0,
    "median_itl_ms": 43.0,
    "p99_itl_ms": 70.0,
    "mean_e2el_ms": 2300.0,
    "median_e2el_ms": 2200.0,
    "p99_e2el_ms": 3000.0,
    "spec_decode_acceptance_rate": 50.0,
    "spec_decode_acceptance_length": 2.5,
    "spec_decode_num_drafts": 100,
    "spec_decode_draft_tokens": 300,
    "spec_decode_accepted_tokens": 150,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.5, 0.2],
}


def _stats(mean: float, p99: float, total: float = 0.0) -> dict[str, Any]:
    good = {
        "mean": mean,
        "median": mean,
        "std_dev": 0.0,
        "count": 2,
        "total_sum": total,
        "percentiles": {"p50": mean, "p99": p99},
    }
    return {"successful": good, "errored": None, "incomplete": None, "total": good}


def _request(start: float, ttft: float, itl: float, latency: float) -> dict[str, Any]:
    return {
        "type_": "generative_request_stats",
        "request_id": "r",
        "output": 'text, with [brackets] and "quotes"',
        "info": {"status": "completed", "timings": {"request_start": start, "token_iterations": 5}},
        "request_start_time": start,
        "request_latency": latency,
        "prompt_tokens": 128,
        "output_tokens": 11,
        "time_to_first_token_ms": ttft,
        "time_per_output_token_ms": 1e3 * latency / 11,
        "inter_token_latency_ms": itl,
    }


GUIDELLM: dict[str, Any] = {
    "metadata": {"version": 1, "guidellm_version": "0.6.0", "python_version": "3.12"},
    "args": {"target": "http://localhost:8000", "model": "m", "data": ["prompt_tokens=128,output_tokens=11"]},
    "benchmarks": [
        {
            "type_": "generative_benchmark",
            "config": {"id_": "b0", "run_index": 0, "strategy": {"type_": "concurrent", "streams": 2}},
            "scheduler_state": {"successful_requests": 2},
            "requests": {
                "successful": [_request(100.0, 50.0, 10.0, 0.15), _request(100.5, 70.0, 12.0, 0.19)],
                "incomplete": [],
                "errored": [],
            },
            "metrics": {
                "request_totals": {"successful": 2, "errored": 0, "incomplete": 0, "total": 2},
                "request_concurrency": _stats(1.5, 2.0),
                "request_latency": _stats(0.17, 0.19),
                "prompt_token_count": _stats(128.0, 128.0, 256.0),
                "output_token_count": _stats(11.0, 11.0, 22.0),
                "time_to_first_token_ms": _stats(60.0, 70.0),
                "time_per_output_token_ms": _stats(15.45, 17.3),
                "inter_token_latency_ms": _stats(11.0, 12.0),
                "output_tokens_per_second": _stats(44.0, 44.0),
            },
            "duration": 0.5,
        }
    ],
}


def aiperf(start_s: float, latency_ms: float, ttft_ms: float, **more: Any) -> dict[str, Any]:
    """One line of AIPerf's: nine tokens, eight gaps."""
    start = int(start_s * 1e9)
    tpot = (latency_ms - ttft_ms) / 8
    record = {
        "metadata": {
            "session_num": 0,
            "x_request_id": "q",
            "conversation_id": "c",
            "turn_index": 0,
            "request_start_ns": start,
            "request_ack_ns": start + 1000,
            "request_end_ns": start + int(latency_ms * 1e6),
            "worker_id": "w",
            "benchmark_phase": "profiling",
            "was_cancelled": False,
        },
        "metrics": {
            "input_sequence_length": {"value": 550, "unit": "tokens"},
            "time_to_first_token": {"value": ttft_ms, "unit": "ms"},
            "request_latency": {"value": latency_ms, "unit": "ms"},
            "output_sequence_length": {"value": 9, "unit": "tokens"},
            "inter_token_latency": {"value": tpot, "unit": "ms"},
            "inter_chunk_latency": {"value": [2 * tpot] * 4, "unit": "ms"},
        },
        "error": None,
    }
    return record | more


AIPERF = [
    aiperf(10.0, 400.0, 80.0)
    | {
        "spec_decode_acceptance": {
            "engine": "vllm",
            "mean_acceptance_length": 2.0,
            "draft_acceptance_rate": 1 / 3,
            "acceptance_histogram": {"0": 1, "1": 2, "2": 1},
            "num_accepted_draft_tokens": 4,
            "num_draft_tokens": 12,
            "num_spec_steps": 4,
            "num_spec_tokens": 3,
        }
    },
    aiperf(10.2, 600.0, 120.0),
    {
        "metadata": {
            "request_start_ns": 10_300_000_000,
            "request_end_ns": 10_400_000_000,
            "benchmark_phase": "profiling",
            "was_cancelled": True,
        },
        "metrics": {"error_isl": {"value": 550, "unit": "tokens"}},
        "error": {"code": 499, "type": "RequestCancellationError", "message": "cancelled"},
    },
]
SGLANG_LOG = """\
[2026-11-20 10:00:00] server_args=ServerArgs(model_path='Qwen/Qwen3-8B', tp_size=1, speculative_algorithm='EAGLE', \
speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4)
[2026-11-20 10:00:05] INFO:     Application startup complete.
[2026-11-20 10:00:09 TP0] Prefill batch. #new-seq: 1, #new-token: 64, #cached-token: 0, token usage: 0.00, #running-req: 0, #queue-req: 0,
[2026-11-20 10:00:10 TP0] Decode batch. #running-req: 1, #token: 108, token usage: 0.00, accept len: 2.50, accept rate: 0.50, \
cuda graph: True, gen throughput (token/s): 178.86, #queue-req: 0,
[2026-11-20 10:00:12 TP0] Decode batch, #running-req: 3, #token: 400, token usage: 0.01, accept len: 1.90, accept rate: 0.30, \
cuda graph: True, gen throughput (token/s): 320.00, #queue-req: 2
"""
VLLM_LOG = """\
INFO 11-20 09:59:00 [api_server.py:1000] vLLM API server version 0.14.0
(APIServer pid=7) INFO 11-20 10:00:08 [loggers.py:310] Engine 000: Avg prompt throughput: 93.9 tokens/s, Avg generation throughput: \
250.0 tokens/s, Running: 4 reqs, Waiting: 1 reqs, GPU KV cache usage: 0.1%, Prefix cache hit rate: 0.0%
(APIServer pid=7) INFO 11-20 10:00:08 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: \
15.00 tokens/s, Drafted throughput: 30.00 tokens/s, Accepted: 150 tokens, Drafted: 300 tokens, Per-position acceptance rate: \
0.800, 0.500, 0.200, Avg Draft acceptance rate: 50.0%
(APIServer pid=7) INFO 11-20 10:00:18 [loggers.py:310] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: \
200.0 tokens/s, Running: 2 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.1%, Prefix cache hit rate: 0.0%
(APIServer pid=7) INFO 11-20 10:00:18 [metrics.py:120] SpecDecoding metrics: Accepted: 120 tokens, Drafted: 300 tokens, Mean \
acceptance length: 2.20, Per-position acceptance rate: 0.600, 0.400, 0.200, Avg Draft acceptance rate: 40.0%
"""


def vllm_scrape(drafts: int, drafted: int, accepted: int, positions: list[int], tokens: int) -> str:
    """vLLM's ``/metrics``, two engines, as far as it matters."""
    lines = [
        "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
        "# TYPE vllm:spec_decode_num_drafts_total counter",
    ]
    for engine in (0, 1):
        label = f'engine="{engine}",model_name="Qwen/Qwen3-8B"'
        lines += [
            f"vllm:spec_decode_num_drafts_total{{{label}}} {drafts / 2}",
            f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {drafted / 2}",
            f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {accepted / 2}",
            *(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{i}"}} {n / 2}'
                for i, n in enumerate(positions)
            ),
            f"vllm:generation_tokens_total{{{label}}} {tokens / 2:e}",
            f'vllm:time_to_first_token_seconds_bucket{{{label},le="0.1"}} 3.0',
            f"vllm:num_requests_running{{{label}}} 4.0",
            f"vllm:spec_decode_num_drafts_created{{{label}}} 1.7e+09",
        ]
    return "\n".join(lines) + "\n"


def sglang_scrape(calls: int, tokens: int, requests: int) -> str:
    """SGLang's ``/metrics``, as far as it matters."""
    label = 'engine_type="unified",model_name="Qwen/Qwen3-8B"'
    return (
        f"sglang:spec_verify_calls_total{{{label}}} {calls}\n"
        f'sglang:generation_tokens_total{{{label},is_streaming="true"}} {tokens}\n'
        f"sglang:num_requests_total{{{label}}} {requests}\n"
        f'sglang:spec_accept_length{{{label},tp_rank="0"}} 2.5\n'
        f'sglang:spec_num_draft_tokens{{{label},tp_rank="0"}} 4\n'
    )


THROUGHPUT = """\
batch_size,steps,topk,num_draft_tokens,latency_s,throughput_tok_s,accept_length
1,0,0,0,795.87,218.89,1.0
1,3,1,4,1032.34,170.35,2.017
1,4,4,16,935.56,185.64,2.542
"""
COST = "batch,tokens_per_request,context,ms\n4,4,512,8.2\n4,8,512,8.7\n8,4,512,10.6\n"
SPS = {
    "bias_seconds": 0.01,
    "bs_probes": [1, 2, 4],
    "alpha_seconds": [0.0, 0.001, 0.003],
    "m_probes": [1, 4, 16],
    "theta_seconds": [0.0, 0.002, 0.006],
}
SHAREGPT = [
    {
        "id": "x",
        "conversations": [
            {"from": "human", "value": "a" * 40},
            {"from": "gpt", "value": "b" * 80},
            {"from": "human", "value": "c" * 8},
            {"from": "gpt", "value": "d" * 10},
        ],
    },
    {"id": "y", "conversations": [{"from": "gpt", "value": "no question"}]},
]


def _lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(r) + "\n" for r in records)


def texts() -> dict[str, tuple[str, str]]:
    """Kind and content of every sample, by name."""
    chat = VLLM_BENCH | {"label": "again"}
    return {
        "sglang_plain": ("sglang-bench", _lines([SGLANG_BENCH, SGLANG_BENCH | {"max_concurrency": 2}])),
        "sglang_details": ("sglang-bench", _lines([SGLANG_BENCH | DETAILS])),
        "sglang_meta": ("sglang-meta", _lines(META)),
        "sglang_meta_list": ("sglang-meta", json.dumps(META, indent=1)),
        "sglang_meta_bare": ("sglang-meta", _lines([m["meta_info"] for m in META])),
        "sglang_log": ("sglang-log", SGLANG_LOG),
        "vllm": ("vllm-bench", json.dumps(VLLM_BENCH)),
        "vllm_appended": ("vllm-bench", json.dumps(VLLM_BENCH) + "\n" + json.dumps(chat)),
        "vllm_details": ("vllm-bench", json.dumps(VLLM_BENCH | DETAILS, indent=2)),
        "vllm_log": ("vllm-log", VLLM_LOG),
        "guidellm": ("guidellm", json.dumps(GUIDELLM)),
        "guidellm_pretty": ("guidellm", json.dumps(GUIDELLM, indent=4)),
        "aiperf": ("aiperf", _lines(AIPERF)),
        "vllm_metrics": ("prometheus", vllm_scrape(300, 900, 450, [240, 150, 60], 1000)),
        "sglang_metrics": ("prometheus", sglang_scrape(100, 260, 10)),
        "throughput": ("throughput", THROUGHPUT),
        "runs": ("runs", "file,run,label,engine,k,concurrency,output_tok_s,tau\na.json,0,x,vllm,3,8.0,700.5,2.4\n"),
        "cost": ("cost", COST),
        "sps": ("sps", json.dumps(SPS)),
        "sps_plain": (
            "sps",
            json.dumps(
                {"sample_batch_tokens": [8, 16], "sample_steps_per_sec": [1000.0, 500.0], "max_batch_tokens": 128}
            ),
        ),
        "mooncake": (
            "mooncake",
            '{"timestamp": 0, "input_length": 655, "output_length": 52, "hash_ids": [46, 47]}\n{"timestamp": 1500, "input_length": 100, "output_length": 5, "hash_ids": [9]}\n',
        ),
        "azure": (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.9799600,110,27\n",
        ),
        "vidur": ("vidur", "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,100,20\n2.0,30,40\n"),
        "sharegpt": ("sharegpt", json.dumps(SHAREGPT)),
        "sharegpt_lines": ("sharegpt", _lines(SHAREGPT)),
    }


def write(folder: Path, name: str) -> Path:
    """One sample as a file whose name tells nothing."""
    path = folder / f"{name}.dat"
    path.write_text(texts()[name][1], encoding="utf-8")
    return path
