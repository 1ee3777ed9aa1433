"""Drafter versions: what is bad is refused with a reason, what is good is taken."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from adasim.real.checkpoint import Checkpoint  # noqa: E402
from adasim.real.drafter import DrafterShape  # noqa: E402
from adasim.real.versions import Refused, Version, VersionStore  # noqa: E402
from adasim.real.weights import RANDOM  # noqa: E402

SHAPE = DrafterShape(replace(RANDOM["random-tiny"], layers=1, qk_norm=True), (0, 1), 4, 8, 0)
USED = Checkpoint(SHAPE, SHAPE.fresh(0))


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    store = VersionStore(tmp_path / "store")
    store.publish(Checkpoint(SHAPE, SHAPE.fresh(0)), {"tau": 1.5})
    return store


def refusal(store: VersionStore) -> str:
    """Why version 2 is refused; version 1 stays the newest usable one."""
    good, refused = store.newest([1, 2], USED)
    assert good is not None
    assert good.number == 1
    assert [r.number for r in refused] == [2]
    assert isinstance(store.load(2, USED), Refused)
    return refused[0].reason


def test_the_newest_good_version_is_found_once(store: VersionStore) -> None:
    assert store.publish(Checkpoint(SHAPE, SHAPE.fresh(1)), {}) == 2
    found, refused = store.newest([2], USED)
    assert isinstance(found, Version)
    assert found.number == 2
    assert not refused
    assert torch.equal(found.checkpoint.weights["fc.weight"], SHAPE.fresh(1)["fc.weight"].bfloat16())
    assert store.newest([], USED) == (None, [])
    assert store.load(1, USED).manifest["tau"] == 1.5  # type: ignore[union-attr]


def test_a_version_names_its_parent(store: VersionStore) -> None:
    store.publish(Checkpoint(SHAPE, SHAPE.fresh(1)), {"parent": 1})
    assert [store.parent(n) for n in (1, 2, 3)] == [None, 1, None]
    (store.folder / "v000002" / "manifest.json").write_text("[")
    assert store.parent(2) is None


def test_truncated_weights_are_refused(store: VersionStore) -> None:
    store.publish(Checkpoint(SHAPE, SHAPE.fresh(1)), {})
    weights = store.folder / "v000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "checksum" in refusal(store)


def test_a_missing_file_is_refused(store: VersionStore) -> None:
    store.publish(Checkpoint(SHAPE, SHAPE.fresh(1)), {})
    (store.folder / "v000002" / "manifest.json").unlink()
    assert "cannot be read" in refusal(store)


def test_values_that_are_not_finite_are_refused(store: VersionStore) -> None:
    weights = SHAPE.fresh(1) | {"norm.weight": torch.full((64,), float("nan"))}
    store.publish(Checkpoint(SHAPE, weights), {})
    assert "'norm.weight' holds values that are not finite" in refusal(store)


def test_another_shape_is_refused(store: VersionStore) -> None:
    other = replace(SHAPE, block=4)
    store.publish(Checkpoint(other, other.fresh(1)), {})
    assert "shape" in refusal(store)


@pytest.mark.parametrize(
    ("head", "vocab", "says"),
    [
        ({"out.bias": torch.zeros(1)}, None, "'length_head.out.bias' is unknown"),
        ({}, torch.arange(9), "draft vocabulary is not the one of the drafter in use"),
    ],
    ids=["head", "vocabulary"],
)
def test_another_head_or_vocabulary_is_refused(store: VersionStore, head: dict[str, Any], vocab: Any, says: str) -> None:
    store.publish(Checkpoint(SHAPE, SHAPE.fresh(1), vocab, head), {})
    assert says in refusal(store)


def test_a_head_that_is_not_finite_is_refused(store: VersionStore) -> None:
    used = Checkpoint(SHAPE, SHAPE.fresh(0), None, {"out.bias": torch.zeros(1)})
    store.publish(Checkpoint(SHAPE, SHAPE.fresh(1), None, {"out.bias": torch.tensor([float("inf")])}), {})
    found = store.load(2, used)
    assert isinstance(found, Refused)
    assert "'length_head.out.bias' holds values that are not finite" in found.reason


def test_a_failed_publication_leaves_nothing(store: VersionStore) -> None:
    with pytest.raises(TypeError):
        store.publish(Checkpoint(SHAPE, SHAPE.fresh(1)), {"tau": object()})
    assert store.numbers() == [1]
    assert [p.name for p in store.folder.iterdir()] == ["v000001"]
