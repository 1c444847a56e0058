"""A model run backward, one block at a time: gradients of its loss at every layer's output.

    forward: the inputs of every block are kept       (`KeptInputs`)
    head:    gradients are drawn at the logits, and taken back to the last hidden states
    reverse: blocks are loaded from the last to the first; each turns the gradient of its outputs
             into that of its inputs, and shows those of its linear layers, of K and of V

The mean of the gradients' outer products is to be the Fisher matrix, which is the Hessian of the KL
divergence (Martens 2020, "New insights and perspectives on the natural gradient method", arXiv
1412.1193, section 9). Of a token's logits it is F = diag(p) - p p^T = B B^T, with the predictions p
and B = diag(sqrt p) - p sqrt(p)^T: so what is taken back is B r, r a sign drawn for each logit
(Martens et al. 2012, "Estimating the Hessian by back-propagating curvature", arXiv 1206.6464).
Labels drawn from the predictions give F as well, but where the model is sure of itself most draws
show nothing: half the tokens do as well with signs. The signs come from a generator that a sample's
content seeds, and from the host on every device: they depend on that sample alone.

One block is in memory at any time, as in the stream forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from calibrate.block import DecoderBlock
from calibrate.gradients import OUTPUT, STATES, BlockGradients, Gradients, GradientSums
from calibrate.statistics import Key
from calibrate.stream import BlockStream
from calibrate.transfers import run_size, to_host
from calibrate.workers import BlockWorkers, InTurn, samples_of
from formats.files import writing

HEAD_BLOCK = 128  # outputs in a block of G of the layer that gives logits
IN_MEMORY = 10**9  # most bytes of blocks' inputs that are kept in memory, in fp32


class KeptInputs:
    """Hidden states of all samples before each block: in memory, or as bf16 in files.

    Files are written, and read again, while the blocks before and after are at work.

    Args:
        folder: Where files go; None for memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._held: dict[int, list[Tensor]] = {}
        self._pool = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None
        self._read: dict[int, Future[list[Tensor]]] = {}

    def put(self, index: int, states: Sequence[Tensor]) -> None:
        """Keep those before a block, which comes after the last one.

        Raises:
            CheckpointError: they, or those before the last block, cannot be written.
        """
        if self._folder is None:
            self._held[index] = list(states)
            return
        self._wait()
        self._written = self._pool.submit(self._write, index, list(states))

    def take(self, index: int) -> list[Tensor]:
        """Those before a block, which are kept no longer; the one before it comes next.

        Raises:
            CheckpointError: the last could not be written.
        """
        if self._folder is None:
            return self._held.pop(index)
        self._wait()
        found = self._read.pop(index, None) or self._pool.submit(self._load, index)
        if index:
            self._read[index - 1] = self._pool.submit(self._load, index - 1)
        return found.result()

    def close(self) -> None:
        """Wait for what is being written or read, whatever comes of it."""
        self._pool.shutdown()

    def _wait(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def _write(self, index: int, states: list[Tensor]) -> None:
        assert self._folder is not None
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file({str(i): x.bfloat16() for i, x in enumerate(states)}, self._path(index))

    def _load(self, index: int) -> list[Tensor]:
        found = load_file(self._path(index))
        states = [found[str(i)].clone() for i in range(len(found))]  # read, not only mapped
        self._path(index).unlink()
        return states

    def _path(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"inputs-{index:05d}.safetensors"


def backward(
    stream: BlockStream,
    sequences: Sequence[Tensor],
    *,
    size: int,
    inputs: KeptInputs,
    found: Callable[[str, BlockGradients], None],
    step: Callable[[], object] = lambda: None,
    workers: BlockWorkers | None = None,
) -> list[Tensor]:
    """Run samples through a model and back.

    Args:
        stream: Of the model; it is spent.
        sequences: Token ids of each sample: int64 [tokens].
        size: Most outputs in a block of G; see `calibrate.gradients.block_size`.
        found: Called with a full name and what gradients showed there: of the layer that gives
            logits, then of each block, from the last one.
        step: Called after each block, on the way there and on the way back.
        workers: Devices that take the samples between them, the stream's the first; it alone by
            default. The head is run there, whatever the others are.

    Returns:
        Gradients of each sample's loss at the inputs of the first block: [tokens, hidden].

    Raises:
        RecipeError: activations or gradients hold NaN or infinity.
        CheckpointError: the model is damaged, or takes no gradients.
    """
    workers = workers or BlockWorkers([stream.device])
    stream.start(list(sequences))
    for index in range(len(stream.blocks)):
        inputs.put(index, stream.inputs)
        block = stream.load(index, index + 1)
        workers.take(block)
        stream.advance(block, workers.outputs())
        step()
    gradients, of_head = head_gradients(stream, sequences)
    found(stream.head_layer, of_head)
    for index in reversed(range(len(stream.blocks))):
        stream.inputs[:] = inputs.take(index)
        block = stream.load(index, index - 1 if index else None)
        workers.take(block)
        found(block.name, block_gradients(block, gradients, size, workers))
        workers.leave()
        block.module.to("meta")
        step()
    return gradients


def head_gradients(
    stream: BlockStream, sequences: Sequence[Tensor]
) -> tuple[list[Tensor], BlockGradients]:
    """Gradients of each sample's loss at the outputs of the last block, and at the logits.

    Args:
        stream: Whose samples have run through all blocks.

    Returns:
        ([tokens, hidden] for each sample, in the host's memory; what those at the outputs of the
        layer that gives logits showed).
    """
    sums, gradients = GradientSums(HEAD_BLOCK), list[Tensor]()

    def on_output(logits: Tensor) -> None:
        logits.register_hook(lambda g: sums.observe(len(gradients), g[0]))

    with stream.head(on_output) as logits_of:
        for ids, hidden in zip(sequences, stream.inputs, strict=True):
            gradients.append(to_host(_head_gradient(logits_of, ids, hidden.to(stream.device))))
    name, lengths = stream.head_layer, [len(ids) for ids in sequences]
    return gradients, BlockGradients({(name, OUTPUT): sums.gradients(name, 0, lengths)})


def _head_gradient(
    logits_of: Callable[[Tensor, Tensor], Tensor], ids: Tensor, hidden: Tensor
) -> Tensor:
    leaf = hidden.detach().requires_grad_()
    with torch.enable_grad():
        logits = logits_of(ids, leaf)
    probabilities = logits.detach().float().softmax(dim=-1)
    drawn = fisher_root(probabilities, signs(ids, logits.shape[-1]))
    (found,) = torch.autograd.grad(logits, leaf, drawn.to(logits.dtype))
    return found


def signs(ids: Tensor, count: int) -> Tensor:
    """Random bits of a sample, by its content: uint8 [tokens, bytes] for so many logits."""
    seed = int.from_bytes(hashlib.sha256(ids.cpu().numpy().tobytes()).digest()[:7], "big")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (len(ids), -(-count // 8)), dtype=torch.uint8, generator=generator)


def fisher_root(probabilities: Tensor, bits: Tensor) -> Tensor:
    """B r, whose outer products are diag(p) - p p^T on average; see the module's docstring.

    Args:
        probabilities: p, fp32 [tokens, vocabulary]; overwritten.
        bits: Of which r is made, uint8 [tokens, bytes], eight logits each.

    Returns:
        fp32 [tokens, vocabulary].
    """
    bits, places = bits.to(probabilities.device), torch.arange(8, dtype=torch.uint8)
    drawn = (
        (bits[:, :, None] >> places.to(bits.device) & 1).flatten(1).to(torch.int8).mul_(2).sub_(1)
    )
    root = probabilities.sqrt()
    root *= drawn[:, : root.shape[1]]
    return root.sub_(probabilities.mul_(root.sum(dim=-1, keepdim=True)))


def block_gradients(
    block: DecoderBlock, gradients: list[Tensor], size: int, workers: BlockWorkers
) -> BlockGradients:
    """Take gradients through a block.

    Args:
        block: With the samples' hidden states before it.
        gradients: Of each sample at its outputs [tokens, hidden]; replaced by those at its inputs.
        size: Most outputs in a block of G.
        workers: Devices that have the block and take the samples between them.
    """
    total, turns, length = BlockSums(block, size), InTurn(workers), run_size(len(gradients))

    def run(worker: int) -> None:
        own = workers.block(worker)
        samples = samples_of(worker, len(gradients), len(workers))
        for number, group in groupby(samples, key=lambda sample: sample // length):
            part = BlockSums(own, size)
            for sample in group:
                workers.check()
                gradients[sample] = part.take(sample, gradients[sample])
            with turns.turn(number):
                total.merge(part)

    workers.each(f"running gradients back through {block.name}", run)
    return total.gradients([len(g) for g in gradients])


class BlockSums:
    """What gradients show of one block, gathered sample by sample.

    Args:
        block: With the samples' hidden states before it.
        size: Most outputs in a block of G.
    """

    def __init__(self, block: DecoderBlock, size: int) -> None:
        self._block, self._size = block, size
        self._sums: dict[Key, GradientSums] = {}

    def _of(self, name: str, role: str) -> GradientSums:
        size = self._size if role in (OUTPUT, STATES) else 0
        return self._sums.setdefault((name, role), GradientSums(size))

    def take(self, sample: int, gradient: Tensor) -> Tensor:
        """Take a sample's gradient at the block's outputs [tokens, hidden] to its inputs."""
        block = self._block
        self._of(block.name, STATES).observe(sample, gradient.to(block.device))
        return block.backward(
            sample,
            gradient,
            on_output=lambda name, *seen: self._of(name, OUTPUT).observe(sample, *seen),
            on_kv=lambda role, g: self._of(block.attended, role).observe(sample, g),
        )

    def merge(self, other: BlockSums) -> None:
        """Add what other samples have shown."""
        for (name, role), sums in other._sums.items():
            self._of(name, role).merge(sums)

    def gradients(self, lengths: Sequence[int]) -> BlockGradients:
        """What was seen of samples with so many tokens each; zeros where nothing was.

        Raises:
            RecipeError: a gradient was not finite.
        """
        linears, found = self._block.linears, dict[Key, Gradients]()
        for name in linears:
            self._of(name, OUTPUT)
        for name, role in sorted(self._sums):
            width = linears[name].out_features if role == OUTPUT else 0
            found[name, role] = self._of(name, role).gradients(name, width, lengths)
        return BlockGradients(found)
