"""Distillation losses against a worked example, signs of the clips' gradients included."""

import pytest

torch = pytest.importorskip("torch")

from adasim.real.losses import ClippedReverseKl, ForwardKl  # noqa: E402

Q = torch.tensor([[0.55, 0.30, 0.10, 0.05]], dtype=torch.float64)
P = torch.tensor([[0.80, 0.15, 0.04, 0.01]], dtype=torch.float64)


def value_and_grad(loss: ClippedReverseKl | ForwardKl) -> tuple[float, list[float], float]:
    q = Q.log().requires_grad_()
    result = loss(q, P.log())
    result.value.backward()  # type: ignore[no-untyped-call]
    assert q.grad is not None
    return float(result.value.detach()), q.grad[0].tolist(), result.clipped


@pytest.mark.parametrize(
    ("loss", "value", "grad_of_best"),
    [
        (ClippedReverseKl(alpha=1.0), 0.598, -0.45),
        (ClippedReverseKl(alpha=0.0, clip="none"), 0.174, -0.302),
        (ClippedReverseKl(alpha=0.0, delta=0.01), -0.176, 0.155),
        (ClippedReverseKl(alpha=0.8, delta=0.01), 0.443, -0.329),
        (ClippedReverseKl(alpha=0.8, clip="none"), 0.513, 0.8 * -0.45 + 0.2 * -0.302),
    ],
)
def test_worked_example(loss: ClippedReverseKl, value: float, grad_of_best: float) -> None:
    found, grad, _ = value_and_grad(loss)
    assert found == pytest.approx(value, abs=1e-3)
    assert grad[0] == pytest.approx(grad_of_best, abs=1e-3)
    assert sum(grad) == pytest.approx(0, abs=1e-9)


def test_entry_clip_alone_pushes_the_right_token_down_and_says_how_much_it_clips() -> None:
    _, grad, clipped = value_and_grad(ClippedReverseKl(alpha=0.0, delta=0.01))
    assert grad[0] > 0
    assert clipped == 0.75  # all but the term where q < p


def test_position_clip_hardly_ever_binds() -> None:
    loose, tight = (
        ClippedReverseKl(alpha=0.0, clip="position"),
        ClippedReverseKl(alpha=0.0, clip="position", delta=1e-5),
    )
    many_q, many_p = Q.log().expand(1000, 4), P.log().expand(1000, 4)
    assert loose(many_q, many_p).clipped == 0
    assert loose(many_q, many_p).value.item() == pytest.approx(0.174, abs=1e-3)
    assert tight(many_q, many_p).clipped == 1
    assert tight(many_q, many_p).value.item() == pytest.approx(0.01, abs=1e-9)


def test_forward_kl_is_zero_at_the_target_only() -> None:
    assert ForwardKl()(P.log(), P.log()).value.item() == pytest.approx(0, abs=1e-12)
    found, grad, _ = value_and_grad(ForwardKl())
    assert found == pytest.approx(float((P * (P / Q).log()).sum()), abs=1e-9)
    assert grad == pytest.approx((Q - P)[0].tolist(), abs=1e-9)
