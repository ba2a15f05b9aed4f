"""Optimisers of a recipe. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from anyformer.config import Spec
from anyformer.config.spec import BY_KIND, Positive, Probability

Decay = Annotated[float, Field(strict=True, ge=0)]


class AdamW(Spec):
    """Adam with decoupled weight decay on matrices (Loshchilov & Hutter 2019)."""

    kind: Literal["adamw"] = "adamw"
    lr: Positive  # peak learning rate
    # decay of the moving averages of the gradient and of its square
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: Positive = 1e-8  # added to the denominator of an update
    # decay of matrices per step, times the learning rate; norms and biases have none
    weight_decay: Decay = 0.1


class Adam(Spec):
    """Adam with the settings of the 2017 Transformer (Kingma & Ba 2015)."""

    kind: Literal["adam"] = "adam"
    lr: Positive  # peak learning rate
    # decay of the moving averages of the gradient and of its square
    betas: tuple[Probability, Probability] = (0.9, 0.98)
    eps: Positive = 1e-9  # added to the denominator of an update


class Muon(Spec):
    """Momentum whose update of each matrix is made orthogonal (Jordan et al. 2024), for linear layers of blocks.

    AdamW updates all other weights: vectors, embeddings, head, routers, recurrent cells, convolutions and adapters. An
    update has 0.2 · sqrt(larger side) times the learning rate, the size of an update of AdamW (Liu et al. 2025), so
    that one learning rate and one weight decay serve both.
    """

    kind: Literal["muon"] = "muon"
    lr: Positive  # peak learning rate
    momentum: Probability = 0.95  # decay of the moving average of a matrix's gradient, with Nesterov's look-ahead
    adam_lr: Positive | None = None  # peak learning rate of the weights that AdamW updates; None: `lr`
    # of AdamW: decay of the moving averages of the gradient and of its square
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: Positive = 1e-8  # of AdamW: added to the denominator of an update
    # decay of matrices per step, times the learning rate; norms and biases have none
    weight_decay: Decay = 0.1


class Adafactor(Spec):
    """Adam without momentum, whose mean squares of a matrix are stored as a row and a column (Shazeer & Stern 2018).

    At step t the rate is min(lr, 1/sqrt(t)) times the root mean square of the weight, which is at least 0.001. The root
    mean square of an update, before this rate, is at most 1.
    """

    kind: Literal["adafactor"] = "adafactor"
    lr: Positive = 1e-2  # peak learning rate, relative to the size of each weight
    weight_decay: Decay = 0.0  # decay of matrices per step, times the learning rate; norms and biases have none


class SGD(Spec):
    """Stochastic gradient descent with momentum (Sutskever et al. 2013)."""

    kind: Literal["sgd"] = "sgd"
    lr: Positive  # peak learning rate
    momentum: Probability = 0.9  # factor of the last update in the next; 0: none
    weight_decay: Decay = 0.0  # times a matrix, added to its gradient; norms and biases have none


Optimizer = Annotated[AdamW | Adam | Muon | Adafactor | SGD, *BY_KIND]
