"""Logits that are cut over the vocabulary but look whole, so that user code and losses work unchanged.

:class:`VocabParallelLogits` is a tensor that shows the whole shape and holds this rank's part. Python-level functions
on it (``__torch_function__``) fall in six groups, each a module of this folder or a table in ``tensor.py``:

* what the wrapper itself knows: shape, dtype, ...;
* casts, pointwise functions and views run on the local part and stay sharded; the sizes that a view is given for the
  vocabulary are localized by index arithmetic, and a view that would split or merge the vocabulary is none of these;
* a softmax over the vocabulary, sums over other dims, and what is joined of logits stay sharded, too; a sum, a mean, a
  log-sum-exp, the largest class and the values at given classes are computed from the parts
  (:mod:`~lightning_autotp.parallel.vocab_functions`);
* a *copy* of the logits at one position (``logits[:, -1].clone()``) that is made without gradients is gathered, without
  a word: the next token will be sampled from it, by many functions that need it whole;
* ``F.cross_entropy`` with class indices becomes
  :func:`~lightning_autotp.parallel.cross_entropy.vocab_parallel_cross_entropy`, or
  :func:`~lightning_autotp.parallel.linear_cross_entropy.vocab_parallel_linear_cross_entropy` where nothing has needed
  the local part so far;
* **everything else first gathers** the logits into an ordinary tensor (and says so, once per function), because a
  function that is not listed must not be silently wrong.

In-place changes are refused, because they would change only what was gathered for them. So are those of a view that
needed the logits gathered (``logits[..., 100:]``), which in one process would change the logits: it is a
:class:`GatheredLogits`, which can be read like any tensor.

Why not a ``DTensor`` with a ``TorchFunctionMode`` around the user's step: a mode is global state that an exception, a
thread or a generator can leak, a DTensor dispatches every operator below autograd, and it knows only even
shards. This is one subclass, alive where the logits are, for any ownership map.

A plain operand that requires a gradient (a learned temperature) is Invariant and meets a shard, so it goes through *f*
first. Of one with a value for each class (a bias, a mask) every rank takes those of its own classes. Code that bypasses
``__torch_function__`` (a custom ``autograd.Function``) is still right: the wrapper is a node of the autograd graph
whose backward takes this rank's slice, and operators on it below Python gather.

The local part itself may not be computed yet (:class:`~lightning_autotp.parallel.head_product.HeadProduct`): views,
casts and functions of single elements with numbers or a value for each class leave it so, and so does the loss.
Everything else computes it.

All functions that gather, and the loss, are collective.
"""

from lightning_autotp.parallel.logits import elementwise, losses, over_vocabulary, views  # they enter their handlers
from lightning_autotp.parallel.logits.losses import cross_entropy
from lightning_autotp.parallel.logits.tensor import GatheredLogits, VocabParallelLogits, check_vocab_is_last

__all__ = [
    "GatheredLogits",
    "VocabParallelLogits",
    "check_vocab_is_last",
    "cross_entropy",
    "elementwise",
    "losses",
    "over_vocabulary",
    "views",
]
