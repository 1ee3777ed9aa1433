"""Commands that measure more, for the engine that the data come from."""

from dataclasses import dataclass

from adasim.advice.known import Known
from adasim.advice.traffic import Traffic

PROMPTS, LEAST = 8, 32  # requests of a benchmark: a client, and in all


@dataclass(frozen=True, slots=True)
class Measure:
    """Writes commands for one set of data and one traffic."""

    known: Known
    traffic: Traffic

    @property
    def own_engine(self) -> bool:
        """The profile is of an engine that adasim itself runs."""
        identity = self.known.profile.identity
        return identity is not None and identity.engine in {"torch", "sglang"}

    @property
    def _scenario(self) -> str:
        return self.traffic.real_scenario or "SCENARIO.yaml"

    def times(self, load: float) -> list[str]:
        """What rounds cost near a load."""
        if not self.own_engine:
            return self.first_runs(load)
        batches = sorted({1, max(1, round(load / 2)), round(load), round(2 * load)} - {0})
        return [
            f"adasim profile {self._scenario} --budget 10m --set 'profile.batches={batches}' --out more",
            "adasim calibrate more RECORDED --out better.yaml",
        ]

    def text(self, load: float) -> list[str]:
        """What is accepted, and how well heads know it: full blocks of natural runs."""
        if not self.own_engine:
            return self.first_runs(load)
        full = f"{{kind: fixed, verify_len: {self.known.max_draft_len + 1}}}"
        heads = ", {kind: head}" * self.known.has_head
        policies = f"--set 'policies=[{{kind: off}}, {full}{heads}]'"
        return [
            f"adasim record {self._scenario} {policies} --set workload.concurrency={max(1, round(load))} --out more",
            "adasim calibrate PROFILED more --out better.yaml",
        ]

    def first_runs(self, load: float) -> list[str]:
        """Enough for a fit of its own: plain decoding at three loads, drafts at one."""
        loads = sorted({1, max(2, round(load / 4)), max(4, round(load))})
        runs = [self.run(n, 0) for n in loads] + [self.run(loads[-1], self.known.max_draft_len)]
        return [*runs, f"adasim advise k*.{self._ending}"]

    def one_run(self, load: int, k: int) -> list[str]:
        """One benchmark beside the files that were fitted."""
        files = " ".join([*self.known.sources, self._file(load, k)])
        return [self.run(load, k), f"adasim advise {files}"]

    def run(self, load: int, k: int) -> str:
        """A benchmark of k drafts at so many requests at a time."""
        count, output = max(PROMPTS * load, LEAST), f"{self.traffic.output:.0f}"
        shared = f"--dataset-name sharegpt --num-prompts {count} --max-concurrency {load} --sharegpt-output-len {output}"
        if self._vllm:
            server = f"num_speculative_tokens {k} in --speculative-config" if k else "no --speculative-config"
            bench = f"vllm bench serve --model MODEL --dataset-path SHAREGPT.json {shared} --save-result"
            return f"{bench} --result-filename {self._file(load, k)}   # server: {server}"
        drafts = f"--speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
        if self.known.one_pass:
            drafts = f"--speculative-num-draft-tokens {k + 1}"
        bench = f"python -m sglang.bench_serving --backend sglang {shared}"
        return f"{bench} --output-file {self._file(load, k)}   # server: {drafts if k else 'no speculation'}"

    @property
    def _vllm(self) -> bool:
        told = self.known.profile.provenance.engine.lower()
        return "vllm" in told and "sglang" not in told

    @property
    def _ending(self) -> str:
        return "json" if self._vllm else "jsonl"

    def _file(self, load: int, k: int) -> str:
        return f"k{k}_c{load}.{self._ending}"
