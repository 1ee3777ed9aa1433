"""Text for training: greedy answers, resumed where they stopped, prompts without end."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from adasim.real.features import read_features, score  # noqa: E402
from adasim.real.kv import Span  # noqa: E402
from adasim.real.prompts import DOMAINS, prompt  # noqa: E402
from adasim.real.shards import Text, read_shard  # noqa: E402
from adasim.real.target import Target  # noqa: E402
from adasim.real.textgen import TextGenerator, generate  # noqa: E402
from adasim.real.weights import RANDOM, random_target  # noqa: E402

TAPS, EOS = (0, 2), 7


class Bytes:
    """A tokenizer of bytes with a template of two signs."""

    eos_token_id = EOS

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return f"<{messages[0]['content']}>"


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(RANDOM["random-tiny"], seed=2)


def greedy(target: Target, text: Text, limit: int) -> list[int]:
    tokens = text.tokens[: text.prompt_len].tolist()
    kv, fresh = target.cache(1, 800), tokens
    while len(tokens) < text.prompt_len + limit and (len(tokens) == text.prompt_len or tokens[-1] != EOS):
        hidden, _ = target.forward(torch.tensor(fresh), [Span(0, len(tokens) - len(fresh), len(fresh))], kv)
        fresh = [int(target.logits(hidden[-1:]).argmax())]
        tokens = tokens + fresh
    return tokens


def run(target: Target, work: Path, indices: range) -> list[str]:
    generator = TextGenerator(target, Bytes(), TAPS, rows=4, max_new=20, max_prompt=400)
    return list(generate(generator, {"math": ["Tom has 3 apples and 4 pears."]}, work, indices, shard_size=6))


def test_answers_are_greedy_scored_and_resumed(target: Target, tmp_path: Path) -> None:
    run(target, tmp_path, range(10))
    run(target, tmp_path, range(16))  # the first ten are there already
    shards = sorted((tmp_path / "text").glob("shard-*.npz"))
    texts = [t for s in shards for t in read_shard(s)]
    indices = [t.index for t in texts]
    assert len(set(indices)) == len(indices)
    assert set(indices) <= set(range(16))
    assert max(indices) >= 10
    for text in texts:
        assert text.tokens.tolist() == greedy(target, text, 20)
    for lesson in read_features(shards[0], tmp_path / "features"):
        (fresh,) = score(target, TAPS, [lesson.text])
        seen, wanted = lesson.hidden_tensor()[:-1].float(), fresh.hidden_tensor()[:-1].float()
        torch.testing.assert_close(seen, wanted, rtol=2e-2, atol=2e-2)
        first = lesson.text.prompt_len - 1
        assert (lesson.top_ids[first:-1, 0] == lesson.text.tokens[first + 1 :]).all()


def test_prompts_depend_on_their_index_and_are_all_different() -> None:
    rows: dict[str, list[str]] = {d: ["Anna, who has 12 apples, asks Ben for 7 more."] for d in DOMAINS}
    many = [prompt(i, rows) for i in range(3000)]
    assert many[:50] == [prompt(i, rows) for i in range(50)]
    written = [p.text for p in many if p.source == "templates"]
    assert len(set(written)) > 0.9 * len(written)
    assert not any("{" in p.text and "}" in p.text for p in many if p.source == "templates" and p.domain == "math")
    varied = {p.text for p in many if p.source == "rows" and p.domain == "math"}
    assert len(varied) > 50
    shares = [sum(p.domain == d for p in many) / len(many) for d in DOMAINS]
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.05)
