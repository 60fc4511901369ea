"""GOAL: the weights and the code

Xuan, Chen: "Dissecting Deep Metric Learning Losses for Image-Text Retrieval" (2023).
Code: microsoft/VSE_Gradient@3db6c6d, one file,
`Gradient/gradient.py`. A triplet weight T and pair weights P are prescribed as the gradient: T P- on the negative, -T P+ on the positive.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import Tensor

from findings.base import (
    Shown,
    digits,
    embeddings,
    gradient,
    leaf,
    negatives,
    numbers,
    relative_error,
    scores_of,
)


def eqs_3_4_mined_negative() -> Shown:
    """The gradient on the mined negative is not printed.

    Kind: misprint
    Where: Eq. 3, section 3.1, and eq. 4, section 3.2.
    Found: The gradient on an image x has the terms where x is the anchor and where it is the positive of its text.
    Correct: x is also the hardest negative x' of other texts, which push it away: one term $T P- y_j$ for each text j that mined it.
        The code adds them.
    Effect: Without them the gradient is not that of the triplet loss of eq. 4.
    visavis: ``Goal`` prescribes $dL/ds$, from which the term of the mined negative follows.
    """
    images, texts = embeddings(16, seed=0)
    moved = leaf(images)
    scores = moved @ texts.T
    hinges = [0.2 + negatives(way).amax(1) - way.diag() for way in (scores, scores.T)]
    (true,) = gradient(torch.stack(hinges).clamp(min=0).sum(), moved)
    of_image, of_text = ((hinge > 0).double()[:, None] for hinge in hinges)
    printed = of_image * (texts[negatives(scores).argmax(1)] - texts) - of_text * texts
    right = printed.index_add(0, negatives(scores).argmax(0), of_text * texts)
    return Shown(
        relative_error(printed, true) > 0.1 and relative_error(right, true) < 1e-12,
        f"gradient on 16 images, printed apart from autograd by {digits(100 * relative_error(printed, true))} %, "
        f"with the mined negatives by {digits(relative_error(right, true))}",
    )


def code_without_heaviside() -> Shown:
    """The constant triplet weight of the code has no margin.

    Kind: code differs from paper
    Where: ``weight_triplet_con`` against eq. 5.
    Found: $T_con = 1$ always.
    Correct: $T_con = 1$ where $m + s_n - s_p > 0$, else 0. Only then is (con, con) the triplet loss (table 1, m = 0.2 in figure 2).
    Effect: Every triplet has a gradient forever, separated or not, which is another objective. Section 4.2 uses (con, con) as the check
        that the method equals the triplet loss.
    visavis: ``Goal(triplet="con", margin=0.2)`` has the margin. ``Goal(..., semantics="reference")`` has none.
    """
    scores = leaf(scores_of(16, seed=0, noise=1.5))
    gaps = negatives(scores).amax(1) - scores.diag()
    (true,) = gradient((0.2 + gaps).clamp(min=0).sum(), scores)
    (code,) = gradient((negatives(scores).amax(1) - scores.diag()).sum(), scores)
    idle = int((gaps <= -0.2).sum())
    return Shown(
        0 < idle < 16 and relative_error(code, true) > 0.1,
        f"16 images, {idle} of them with a closed hinge: dL/ds of the code apart from the triplet loss by {digits(100 * relative_error(code, true))} %",
    )


def code_extra_half() -> Shown:
    """The circle weight of the code has an extra 0.5 in its exponent.

    Kind: code differs from paper
    Where: ``weight_triplet_cir`` against eq. 8.
    Found: $1 / (1 + e^(tau (s_p (2 - s_p) - s_n^2 - 0.5)))$.
    Correct: As printed, without the 0.5. The weight is then one half on the circle $(1 - s_p)^2 + s_n^2 = 1$, in the code on the circle
        with 0.5.
    Effect: Up to $e^(tau / 2)$, at tau = 10 a factor of 148 for well separated triplets. $T_cir$ is the weight that the paper recommends.
    visavis: ``Goal(triplet="cir")`` is eq. 8, ``Goal(triplet="cir", semantics="reference")`` the code.
    """
    positive = numbers(0.9, 0.5, 0.3)
    negative = numbers(0.1, 0.4, 0.5)
    exponent = positive * (2 - positive) - negative**2
    paper = (10 * -exponent).sigmoid()
    code = (10 * (0.5 - exponent)).sigmoid()
    ratio = code / paper
    pairs = ", ".join(
        f"({p:g}, {n:g})" for p, n in zip(positive.tolist(), negative.tolist(), strict=True)
    )
    return Shown(
        bool((ratio > 2).all()) and bool(ratio[0] > 140),
        f"tau = 10, (s_p, s_n) = {pairs}: paper {', '.join(map(digits, paper))}\ncode {', '.join(map(digits, code))}\n"
        f"ratio {', '.join(map(digits, ratio))}",
    )


def code_ignores_grad_output() -> Shown:
    """The backward pass of the code ignores operations on the loss.

    Kind: behavior of the code
    Where: ``TripletGradFun.backward``.
    Found: It returns the stored gradient whatever ``grad_output`` is.
    Correct: The gradient times ``grad_output``. Both are the same while the loss is used alone and unscaled.
    Effect: Dividing the loss for gradient accumulation, weighting it against another loss (X-VLM's matching loss), loss scaling of mixed
        precision and even multiplying it by 0 have no effect on this gradient, without a warning.
    visavis: Every objective, including ``Goal``, follows operations on its value, in both semantics.
    """
    scores = leaf(numbers(0.5))
    results = {
        scale: gradient(scale * _Prescribed.apply(scores, numbers(3.0)), scores)[0].item()
        for scale in (1.0, 0.25, 0.0)
    }
    accumulated = sum(
        gradient(_Prescribed.apply(scores, numbers(3.0)) / 4, scores)[0].item() for _ in range(4)
    )
    return Shown(
        set(results.values()) == {3.0} and accumulated == 12.0,
        "a prescribed gradient of 3: "
        + ", ".join(f"loss times {scale:g} gives {value:g}" for scale, value in results.items())
        + f"\nfour steps of a quarter of the loss give {accumulated:g}",
    )


def code_default_tau() -> Shown:
    """The scale tau is 10 in the figures and 1 by default in the code.

    Kind: code differs from paper
    Where: ``TripletGrad.__init__`` (``tau=1``) against figure 2 (tau = 10). The weight functions themselves default to 10.
    Found: The module passes 1 unless the caller sets another value. The training script is not released.
    Correct: The paper does not state which value gave the tables.
    Effect: With $tau = 1$, $T_nca$ and $T_cir$ are almost flat.
    visavis: ``Goal(tau=10)``, as in the figures.
    """
    gaps = numbers(-0.2, 0.4)
    flat = (-gaps).sigmoid()
    steep = (-10 * gaps).sigmoid()
    return Shown(
        bool(steep[0] / steep[1] > 20 * flat[0] / flat[1]),
        f"T_nca at s_p - s_n = -0.2 and 0.4: tau = 10 {digits(steep[0])} and {digits(steep[1])}, tau = 1 {digits(flat[0])} and {digits(flat[1])}",
    )


def code_counts_nonzero() -> Shown:
    """The means of lin-ms leave out differences of exactly 0.

    Kind: code differs from paper
    Where: ``lin_ms_term`` against the definitions after eq. 13.
    Found: The size of P and N is counted as the number of nonzero differences (of positive ones for N).
    Correct: $|P|$ and $|N|$ are the sizes of the sets.
    Effect: Only where similarities tie exactly, as for a duplicated caption. The rule is harmless for sig-ms, where a kept entry is never
        0.
    visavis: ``Goal(pair="lin_ms")`` divides by the size, ``semantics="reference"`` by the count.
    """
    differences = 0.5 - numbers(0.5, 0.3)
    paper = differences.mean()
    code = differences.sum() / (differences > 0).sum()
    return Shown(
        bool((code - paper).abs() > 0.05),
        f"selected negative 0.5, other negatives 0.5 and 0.3: mean difference {digits(paper)} by the definition, {digits(code)} by the code",
    )


def code_keeps_bounds() -> Shown:
    """Similarities exactly at a bound of P or N are kept.

    Kind: code differs from paper
    Where: ``sig_ms_term`` and ``lin_ms_term`` against the definitions before eq. 12.
    Found: Similarities above $S_n + epsilon$, or below the least positive minus epsilon, are left out, so equality is kept.
    Correct: Eq. 12 has strict inequalities, which leave equality out.
    Effect: Only where a similarity is exactly at a bound.
    visavis: ``Goal`` keeps equality in both semantics, as its docstring states.
    """
    chosen, others = 0.75, numbers(0.25, 0.5)  # epsilon 0.25: others are in P up to a bound of 0.5
    paper, code = (
        (2 * (chosen - others[kept])).exp().mean() for kept in (others < 0.5, others <= 0.5)
    )
    return Shown(
        bool(paper - code > 0.1),
        f"own positive 0.75, others 0.25 and 0.5, bound 0.5: m+ of sig-ms {digits(paper)} by eq. 12, {digits(code)} by the code",
    )


def code_does_not_parse() -> Shown:
    """The released file does not parse.

    Kind: behavior of the code
    Where: ``Gradient/gradient.py``: in ``TripletGrad.__init__`` and at the end of ``TripletGradFun.forward``.
    Found: A comma is missing in each of two dictionaries, after ``fun_rs`` and after ``T_ti``. With both added, ``forward`` reads
        ``fun_rs``, and ``sig_ms_term`` reads ``ms_a`` and ``ms_b``, which are not defined there. littleredxh/VSE-Gradient, the address in
        the paper, is a README that points to this file. Its training example is an absent submodule.
    Correct: ``fun_rs`` from ``fun_dict``, ``ms_a`` and ``ms_b`` from ``param_dict``.
    Effect: In this state the file cannot have trained the models of the paper, so differences listed here need not be in its tables.
    visavis: ``Goal(semantics="reference")`` gives the gradients of the file with these repairs.
    """
    outcomes = []
    for text in ('{"fun_rs": 1 "T_ti": 2}', '{"fun_rs": 1, "T_ti": 2}'):
        try:
            outcomes.append(f"{len(ast.literal_eval(text))} entries")
        except SyntaxError:
            outcomes.append("SyntaxError")
    return Shown(
        outcomes == ["SyntaxError", "2 entries"],
        f"such a dictionary without the comma: {outcomes[0]}, with it: {outcomes[1]}",
    )


class _Prescribed(torch.autograd.Function):
    """A value with a prescribed gradient, which ignores ``grad_output``."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, prescribed: Tensor) -> Tensor:
        ctx.save_for_backward(prescribed)
        return scores.sum()

    @staticmethod
    def backward(ctx: Any, _grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None
